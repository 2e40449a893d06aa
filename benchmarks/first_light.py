"""The engine against the naive loop: same model, levels, learning rate and cores, one after the other.

Compares useful groups (non-zero advantage) a minute over the first five minutes of training, and the time each takes to
reach the naive loop's last reward (mean over 5 steps of the first sample of each prompt, the one figure that adaptive
sampling cannot flatter). Start-up and evaluation are outside both clocks. Writes `comparison.json` into `--out`.

    python -m benchmarks.first_light --train TRAIN.jsonl --test TEST.jsonl --out DIR
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LEVELS = "1d+1d,1d-1d,1d*1d,2d+1d,2d-1d,a+b+c"
FIRST_S = 300.0
SMOOTHING_STEPS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    ended_s: float
    """Since training began."""
    reward: float
    """Mean reward of the first sample of each prompt."""
    useful_groups: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the two runs show."""

    engine_useful_groups_per_min: float
    naive_useful_groups_per_min: float
    target_reward: float
    engine_s_to_target: float | None
    naive_s_to_target: float | None
    time_ratio: float | None
    """Engine over naive; None when the engine never got there."""
    engine_steps: int
    naive_steps: int


def read_steps(path: Path) -> list[Step]:
    """The `step` events of a run; a step in which no prompt was begun repeats the reward before it.

    Raises:
        ValueError: no step in the file.
    """
    steps: list[Step] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            reward = event["first_sample_reward"]
            if reward is None:
                reward = steps[-1].reward if steps else 0.0
            steps.append(Step(event["t"], reward, event["useful_groups"]))
    if not steps:
        raise ValueError(f"{path} holds no step")
    return steps


def useful_groups_per_min(steps: Sequence[Step], first_s: float) -> float:
    """Rate over the first `first_s` seconds, or over the whole run where it is shorter."""
    inside = [step for step in steps if step.ended_s <= first_s] or list(steps[:1])
    return 60.0 * sum(step.useful_groups for step in inside) / inside[-1].ended_s


def smoothed_rewards(steps: Sequence[Step]) -> list[float]:
    """Mean of each step's reward and those of the 4 before it; no value for the first 4."""
    rewards = [step.reward for step in steps]
    ends = range(SMOOTHING_STEPS, len(rewards) + 1)
    return [sum(rewards[end - SMOOTHING_STEPS : end]) / SMOOTHING_STEPS for end in ends]


def seconds_to(steps: Sequence[Step], target: float) -> float | None:
    """When the smoothed reward first reached `target`."""
    pairs = zip(steps[SMOOTHING_STEPS - 1 :], smoothed_rewards(steps), strict=True)
    return next((step.ended_s for step, reward in pairs if reward >= target - 1e-9), None)


def compare(engine: Sequence[Step], naive: Sequence[Step]) -> Comparison:
    """The figures of both runs side by side."""
    smoothed = smoothed_rewards(naive)
    if not smoothed:
        raise ValueError(f"the naive loop needs at least {SMOOTHING_STEPS} steps, got {len(naive)}")
    target = smoothed[-1]
    engine_s, naive_s = seconds_to(engine, target), seconds_to(naive, target)
    return Comparison(
        engine_useful_groups_per_min=useful_groups_per_min(engine, FIRST_S),
        naive_useful_groups_per_min=useful_groups_per_min(naive, FIRST_S),
        target_reward=target,
        engine_s_to_target=engine_s,
        naive_s_to_target=naive_s,
        time_ratio=engine_s / naive_s if engine_s and naive_s else None,
        engine_steps=len(engine),
        naive_steps=len(naive),
    )


def run_engine(options: argparse.Namespace) -> list[Step]:
    """Train with the engine and read its steps."""
    levels = json.dumps(options.levels.split(","))
    overrides = [
        "run.name=engine",
        f"run.folder={options.out}",
        f"run.max_steps={options.engine_steps}",
        f"run.max_train_s={options.engine_s}",
        f"run.seed={options.seed}",
        f"model.path={options.model}",
        f"data.train={options.train}",
        f"data.test={options.test if options.evaluate else ''}",
        f"data.levels={levels}",
        f"optimizer.lr={options.lr}",
        *options.override,
    ]
    command = [sys.executable, "-m", "engine.serve", "--config", "configs/quickstart.toml", *overrides]
    subprocess.run(command, check=True)
    return read_steps(options.out / "engine" / "events.jsonl")


def run_naive(options: argparse.Namespace) -> list[Step]:
    """Train with the naive loop and read its steps."""
    out = options.out / "naive.jsonl"
    given = {
        "model": options.model, "train": options.train, "test": options.test, "levels": options.levels,
        "steps": options.naive_steps, "lr": options.lr, "seed": options.seed, "out": out,
    }  # fmt: skip
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "benchmarks.naive_loop", *arguments], check=True)
    return read_steps(out)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--train", default="datasets/arithmetic/train.jsonl")
    parser.add_argument("--test", default="datasets/arithmetic/test.jsonl")
    parser.add_argument("--levels", default=LEVELS)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--naive-steps", type=int, default=30)
    parser.add_argument("--engine-steps", type=int, default=0, help="0 = as many as the time holds")
    parser.add_argument("--engine-s", type=float, default=420.0, help="seconds of training with the engine")
    parser.add_argument("--evaluate", action="store_true", help="let the engine evaluate the held-out test too")
    parser.add_argument("--out", type=Path, default=Path("runs/first_light"))
    parser.add_argument("override", nargs="*", help="more engine overrides, e.g. staleness.max=1")
    return parser.parse_args()


def main() -> int:
    """Run both and print the comparison; returns the exit status."""
    options = parse()
    if (options.out / "engine").exists():
        sys.stderr.write(f"error: {options.out} already holds a comparison; pass another folder with --out\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    comparison = compare(run_engine(options), run_naive(options))
    text = json.dumps(asdict(comparison) | {"cores": len(os.sched_getaffinity(0))}, indent=2)
    (options.out / "comparison.json").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
