"""The loop one writes first: sample in rounds, train on what was kept, load the weights back, and start over.

The baseline of `benchmarks/first_light.py`. One process, every phase on all cores, nothing overlaps. Adaptive sampling
as in Reinforce-Ada: rounds of 8 a prompt, exit at 2 right and 2 wrong, 32 samples at most, 4 kept, advantage
`reward - mean of the pool`; the learner pads. Writes one JSON line an event to `--out`.

    python -m benchmarks.naive_loop --train TRAIN.jsonl --test TEST.jsonl --steps 30 --out naive.jsonl
"""

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core in this process: nothing to ship

import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from benchmarks.plain_learner import PlainLearner, Sample
from configs.inputs import Data
from engine.datasets import PromptRow, load_prompts
from workers.graders.numeric import grade

ROUND, N_MAX, K_POS, K_NEG, MAX_TOKENS = 8, 32, 2, 2, 24
PROMPTS_PER_STEP, MICRO_BATCH = 16, 12
set_num_threads = torch.set_num_threads


@dataclass
class _NoInit(WeightTransferInitInfo):
    """Nothing to set up."""


@dataclass
class _Tensors(WeightTransferUpdateInfo):
    """The tensors themselves: sender and receiver share the process."""

    tensors: list[tuple[str, torch.Tensor]]


class _SameProcess(WeightTransferEngine[_NoInit, _Tensors]):
    init_info_cls = _NoInit
    update_info_cls = _Tensors

    def init_transfer_engine(self, init_info: _NoInit) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Tensors) -> None:
        self.model.load_weights(update_info.tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[str, list[int], list[float]]]:
    """Text, token ids and logprobs of one response a prompt."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    drawn = []
    for output in outputs:
        response = output.outputs[0]
        ids = list(response.token_ids)
        drawn.append(
            (response.text, ids, [at[token].logprob for at, token in zip(response.logprobs, ids, strict=True)])
        )
    return drawn


def sample_pools(llm: LLM, prompts: list[list[int]], rows: list[PromptRow]) -> list[list[Sample]]:
    """Rounds of `ROUND` samples for every prompt that still needs some."""
    pools: list[list[Sample]] = [[] for _ in rows]
    for _ in range(N_MAX // ROUND):
        active = [i for i, pool in enumerate(pools) if not is_balanced(pool)]
        if not active:
            break
        wanted = [i for i in active for _ in range(ROUND)]
        params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0)
        for i, (text, ids, logprobs) in zip(wanted, generate(llm, [prompts[i] for i in wanted], params), strict=True):
            reward = float(grade(text, rows[i].answer) == "correct")
            pools[i].append(Sample(prompts[i], ids, logprobs, reward))
    return pools


def is_balanced(pool: list[Sample]) -> bool:
    """Whether the exit rule holds."""
    right = sum(sample.reward > 0 for sample in pool)
    return right >= K_POS and len(pool) - right >= K_NEG


def keep(pool: list[Sample], rng: random.Random) -> list[Sample]:
    """Four samples, two a class where there are two, with the pool's mean as baseline; none of a one-sided pool."""
    right = [sample for sample in pool if sample.reward > 0]
    wrong = [sample for sample in pool if sample.reward <= 0]
    if not right or not wrong:
        return []
    num_right = min(len(right), max(K_POS, K_POS + K_NEG - len(wrong)))
    kept = rng.sample(right, num_right) + rng.sample(wrong, K_POS + K_NEG - num_right)
    mean = len(right) / len(pool)
    for sample in kept:
        sample.advantage = sample.reward - mean
    return kept


def load_into(llm: LLM, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Replace the weights that `llm` samples from."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"tensors": tensors}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()


def encode(llm: LLM, rows: list[PromptRow]) -> list[list[int]]:
    """Token ids of each prompt in the model's chat template."""
    tokenizer = llm.get_tokenizer()
    chats = ([{"role": "user", "content": row.text}] for row in rows)
    texts = (tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def greedy_accuracy(llm: LLM, rows: list[PromptRow]) -> float:
    """Share of right answers at temperature 0."""
    drawn = generate(llm, encode(llm, rows), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0))
    return sum(grade(text, row.answer) == "correct" for (text, _, _), row in zip(drawn, rows, strict=True)) / len(rows)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--train", default="datasets/arithmetic/train.jsonl")
    parser.add_argument("--test", default="datasets/arithmetic/test.jsonl")
    parser.add_argument("--levels", default="1d+1d,1d-1d,1d*1d,2d+1d,2d-1d,a+b+c", help="empty = all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    """Run the loop; returns the exit status."""
    options = parse()
    levels = [level for level in options.levels.split(",") if level]
    train, test = load_prompts(options.train, Data(), levels), load_prompts(options.test, Data(), levels)
    WeightTransferEngineFactory.register_engine("same_process", _SameProcess)
    llm = LLM(
        options.model, dtype="bfloat16", max_model_len=128, max_num_seqs=128, enforce_eager=True, seed=options.seed,
        kv_cache_memory_bytes=1 << 30, logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="same_process"),
    )  # fmt: skip
    # vLLM lowers torch's threads to one while it starts, replaces the function that sets them, and so stays at one.
    set_num_threads(len(os.sched_getaffinity(0)))
    learner = PlainLearner(options.model, options.lr, micro_batch=MICRO_BATCH)
    prompts, rng = encode(llm, train), random.Random(options.seed)
    order: list[int] = []
    with options.out.open("w", encoding="utf-8") as out:

        def write(event: str, **fields: float) -> None:
            out.write(json.dumps({"event": event, "t": round(time.perf_counter() - started, 3), **fields}) + "\n")
            out.flush()

        started = time.perf_counter()
        write("evaluated", step=0, greedy_accuracy=greedy_accuracy(llm, test))
        started = time.perf_counter()  # training time alone is compared
        for step in range(1, options.steps + 1):
            if len(order) < PROMPTS_PER_STEP:
                order += rng.sample(range(len(train)), len(train))
            chosen, order = order[:PROMPTS_PER_STEP], order[PROMPTS_PER_STEP:]
            begun = time.perf_counter()
            pools = sample_pools(llm, [prompts[i] for i in chosen], [train[i] for i in chosen])
            generated = time.perf_counter()
            groups = [kept for pool in pools if (kept := keep(pool, rng))]
            loss = learner.step([sample for kept in groups for sample in kept])[0] if groups else 0.0
            learned = time.perf_counter()
            load_into(llm, learner.tensors())
            ended = time.perf_counter()
            write(
                "step", step=step, wall_s=ended - begun, generate_s=generated - begun, learn_s=learned - generated,
                update_s=ended - learned, first_sample_reward=sum(pool[0].reward for pool in pools) / len(pools),
                useful_groups=len(groups), samples=sum(len(pool) for pool in pools),
                tokens=sum(len(sample.token_ids) for pool in pools for sample in pool), loss=loss,
            )  # fmt: skip
        write("evaluated", step=options.steps, greedy_accuracy=greedy_accuracy(llm, test))
    return 0


if __name__ == "__main__":
    sys.exit(main())
