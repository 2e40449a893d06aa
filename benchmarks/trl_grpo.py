"""TRL's GRPOTrainer on first light's task, for comparison: fixed groups of 8, one phase after another.

TRL is no dependency of ours (it is a peer): install it into an environment of its own that has torch, transformers,
accelerate and datasets, and run this there with the repository as working directory.

    python -m benchmarks.trl_grpo --train TRAIN.jsonl --steps 4

fp32 weights with bf16 autocast: with bf16 weights the updates at lr 1e-5 are lost to rounding and nothing is learned.
Writes one JSON line a step: seconds, mean reward, useful groups (rewards differ), and their rate since training began.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  (not in our environment)

from benchmarks.first_light import LEVELS
from workers.graders.numeric import grade

PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 24


class StepLines(TrainerCallback):
    """Prints one line a step."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._useful = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self._began_at = time.monotonic()

    def on_log(self, _args: object, state: object, _control: object, logs: dict | None = None, **_: object) -> None:
        """A step was logged."""
        if not logs or "reward" not in logs:
            return
        useful = PROMPTS * (1.0 - logs["frac_reward_zero_std"])
        self._useful += useful
        elapsed_s = time.monotonic() - self._began_at
        row = {"t": round(elapsed_s, 1), "reward": logs["reward"], "useful_groups": round(useful, 3)}
        row["useful_groups_per_min"] = round(60.0 * self._useful / elapsed_s, 2)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def rewards(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 for a right answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(grade(completion[-1]["content"], right) == "correct") for completion, right in pairs]


def load(path: Path, levels: list[str]) -> Dataset:
    """Prompts as conversations."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["problem"]}], "answer": str(row["answer"])}
            for row in rows
            if row["level"] in levels
        ]
    )


def main() -> int:
    """Train a few steps; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--levels", default=LEVELS)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="runs/trl")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = GRPOConfig(
        output_dir=options.out, use_cpu=True, bf16=True, report_to="none", disable_tqdm=True, save_strategy="no",
        num_generations=SAMPLES, per_device_train_batch_size=32, gradient_accumulation_steps=PROMPTS * SAMPLES // 32,
        max_completion_length=MAX_TOKENS, temperature=1.0, learning_rate=options.lr, lr_scheduler_type="constant",
        max_steps=options.steps, logging_steps=1, beta=0.0, seed=0, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=rewards,
        args=config,
        train_dataset=load(options.train, options.levels.split(",")),
        callbacks=[StepLines()],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
