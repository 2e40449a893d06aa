"""One way of taking the training step of `benchmarks/learner.py`, in a process of its own.

    python -m benchmarks.learner_ways WAY --model FOLDER --batch FILE

Every line on standard input asks for one step, answered by a JSON line: seconds, processor seconds, gradient norm (of
the token mean, before clipping) and the most resident memory so far. `behaviour` writes the model's own logprobs into
the batch.

- shared, packed: `learner.backends.torch` with and without shared prefixes. Timed: splitting, packing, forward,
  backward, clipping, AdamW on the fp32 master copy, copy to bf16.
- plain, sorted: `benchmarks.plain_learner`, samples as they come or like with like. Timed: padding, forward, all
  logits, backward, clipping, fused AdamW on an fp32 master copy, copy to bf16.
- trl: `GRPOTrainer.train()` on prepared tensors (prompts padded left, answers right, as it pads them itself) instead of
  generated ones. Timed: from `on_step_begin` to `on_step_end`: its loss, backward, clipping, fused AdamW.

The objective is the same everywhere: PPO-clip 0.2/0.28, global token mean, no KL, no entropy bonus, temperature 1. TRL
runs where it is installed, so its way imports nothing of ours but this file.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WAYS = ("shared", "packed", "plain", "sorted", "trl", "behaviour")
LR = 1e-6


@dataclass
class Setup:
    """What a way is given."""

    model: str
    groups: list[dict]
    """`prompt` ids and `samples` with `tokens`, `logprobs`, `advantage`."""
    size: int
    """Tokens (shared, packed) or samples (plain, trl) of a micro-batch."""
    dtype: torch.dtype
    """Of TRL's weights; passes are bf16 everywhere."""
    folder: Path
    """For what TRL writes."""


class Turns:
    """Waits for a turn, and reports how long it took."""

    def __init__(self) -> None:
        self._began_at = self._cpu_began_at = 0.0

    def wait(self) -> bool:
        """Whether another step is wanted; starts the clock."""
        is_wanted = bool(sys.stdin.readline())
        self._began_at, self._cpu_began_at = time.perf_counter(), time.process_time()
        return is_wanted

    def done(self, grad_norm: float) -> None:
        """A step was taken."""
        seconds = time.perf_counter() - self._began_at
        cpu = time.process_time() - self._cpu_began_at
        row = {"seconds": seconds, "cpu_seconds": cpu, "grad_norm": grad_norm, "peak_rss_bytes": peak_rss_bytes()}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def peak_rss_bytes() -> int:
    """Most resident memory of this process since it began (getrusage also counts what it was forked from)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def run(turns: Turns, step: Callable[[], float]) -> None:
    """Take a step a turn."""
    while turns.wait():
        turns.done(step())


def run_ours(setup: Setup, turns: Turns, *, share_prefixes: bool) -> None:
    """The torch backend."""
    import numpy as np

    from configs import Config
    from configs.training import Learner, Optimizer
    from engine.wire import Span, TrainGroup, TrainSample
    from learner.backends.torch import TorchBackend
    from learner.loading import load_policy

    def sample(index: int, given: dict) -> TrainSample:
        tokens, logprobs = np.array(given["tokens"], np.int32), np.array(given["logprobs"], np.float32)
        return TrainSample(index, tokens, logprobs, [Span(0, 0, tokens.size)], 0.0, given["advantage"])

    def group(index: int, given: dict) -> TrainGroup:
        samples = [sample(number, one) for number, one in enumerate(given["samples"])]
        prompt = np.array(given["prompt"], np.int32)
        return TrainGroup(index, str(index), prompt, samples, train_version=0, max_staleness=1)

    groups = [group(index, given) for index, given in enumerate(setup.groups)]
    config = Config(
        model={"path": setup.model},
        learner=Learner(micro_batch_tokens=setup.size, share_prefixes=share_prefixes),
        optimizer=Optimizer(lr=LR),
        loss={"entropy_weight": 0.0},
    )
    backend = TorchBackend(load_policy(config), config)

    def step() -> float:
        gradient = backend.accumulate(groups)
        return backend.optimizer_step(gradient.sums.normaliser).grad_norm

    run(turns, step)


def run_plain(setup: Setup, turns: Turns, *, by_length: bool) -> None:
    """A plain loop of transformers and torch."""
    from benchmarks.plain_learner import PlainLearner

    learner = PlainLearner(setup.model, LR, micro_batch=setup.size, fused=True, by_length=by_length)
    samples = plain_samples(setup)
    run(turns, lambda: learner.step(samples)[1])


def plain_samples(setup: Setup) -> list:
    """The batch as the plain learner takes it."""
    from benchmarks.plain_learner import Sample

    return [
        Sample(group["prompt"], one["tokens"], one["logprobs"], 0.0, one["advantage"])
        for group in setup.groups
        for one in group["samples"]
    ]


def padded(setup: Setup) -> dict[str, torch.Tensor]:
    """The batch as TRL's generation step hands it to its training step."""
    prompts = [group["prompt"] for group in setup.groups for _ in group["samples"]]
    samples = [one for group in setup.groups for one in group["samples"]]
    longest_prompt, longest = max(map(len, prompts)), max(len(one["tokens"]) for one in samples)
    prompt_ids, completion_ids = torch.zeros(len(prompts), longest_prompt), torch.zeros(len(prompts), longest)
    prompt_mask, completion_mask, logps = map(torch.zeros_like, (prompt_ids, completion_ids, completion_ids))
    for row, (prompt, one) in enumerate(zip(prompts, samples, strict=True)):
        length = len(one["tokens"])
        prompt_ids[row, -len(prompt) :], prompt_mask[row, -len(prompt) :] = torch.tensor(prompt).float(), 1
        completion_ids[row, :length], completion_mask[row, :length] = torch.tensor(one["tokens"]).float(), 1
        logps[row, :length] = torch.tensor(one["logprobs"])
    return {
        "prompt_ids": prompt_ids.long(), "prompt_mask": prompt_mask.long(),
        "completion_ids": completion_ids.long(), "completion_mask": completion_mask.long(),
        "old_per_token_logps": logps, "advantages": torch.tensor([one["advantage"] for one in samples]),
    }  # fmt: skip


def run_trl(setup: Setup, turns: Turns) -> None:
    """TRL's trainer, its generation replaced by the batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  (not in our environment)

    batch = padded(setup)
    rows = len(batch["advantages"])
    tokens = batch["completion_mask"].sum()
    micro_batches = [
        {name: part[first : first + setup.size] for name, part in batch.items()} | {"num_items_in_batch": tokens}
        for first in range(0, rows, setup.size)
    ]

    class Prepared(GRPOTrainer):
        grad_norm = 0.0

        def _prepare_inputs(self, _batch: object) -> dict[str, torch.Tensor]:
            return micro_batches[self._step % len(micro_batches)]

        def _clip_grad_norm(self, model: object) -> Any:  # noqa: ANN401  (as its base)
            norm = super()._clip_grad_norm(model)
            self.grad_norm = float(norm)
            return norm

    class Clock(TrainerCallback):
        def on_step_begin(self, _args: object, _state: object, _control: object, **_: object) -> None:
            if not turns.wait():
                os._exit(0)  # no more turns; train() has no way out before the end of a step

        def on_step_end(self, _args: object, _state: object, _control: object, **_: object) -> None:
            turns.done(trainer.grad_norm)

    config = GRPOConfig(
        output_dir=str(setup.folder), use_cpu=True, bf16=setup.dtype == torch.float32, report_to="none",
        disable_tqdm=True, save_strategy="no",
        num_generations=len(setup.groups[0]["samples"]), per_device_train_batch_size=setup.size,
        gradient_accumulation_steps=len(micro_batches), learning_rate=LR, lr_scheduler_type="constant",
        max_steps=1_000_000, logging_strategy="no", beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip
    trainer = Prepared(
        model=AutoModelForCausalLM.from_pretrained(setup.model, dtype=setup.dtype),
        processing_class=AutoTokenizer.from_pretrained(setup.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * rows),
        callbacks=[Clock()],
    )
    trainer.train()


def write_behaviour(setup: Setup, path: Path) -> None:
    """Put the model's own logprobs into the batch, so that ratios begin at 1."""
    from benchmarks.plain_learner import PlainLearner

    learner, samples = PlainLearner(setup.model, LR, micro_batch=setup.size), plain_samples(setup)
    with torch.inference_mode():
        logprobs, response = learner.logprobs(samples)
    rows = iter([row[seen].tolist() for row, seen in zip(logprobs, response, strict=True)])
    for group in setup.groups:
        for one in group["samples"]:
            one["logprobs"] = next(rows)
    path.write_text(json.dumps(setup.groups), encoding="utf-8")


def main() -> int:
    """Serve turns until standard input ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    groups = json.loads(options.batch.read_text(encoding="utf-8"))
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    setup = Setup(options.model, groups, options.size, dtype, options.batch.parent)
    turns = Turns()
    if options.way == "behaviour":
        write_behaviour(setup, options.batch)
    elif options.way in ("plain", "sorted"):
        run_plain(setup, turns, by_length=options.way == "sorted")
    elif options.way == "trl":
        run_trl(setup, turns)
    else:
        run_ours(setup, turns, share_prefixes=options.way == "shared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
