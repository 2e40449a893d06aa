"""One training step of the same batch, model and machine in several ways: ours, a plain transformers loop, and TRL's.

    python -m benchmarks.learner --trl-python TRLENV/bin/python

Every way has processes of its own (`benchmarks/learner_ways.py` says what it is and what is timed), pinned to the same
cores with as many threads; they take turns, so that all see the same machine. Rates count the same tokens for
everyone: prompt and response of every sample, without padding, shared or not. TRL needs an environment of its own.

Prompts are the arithmetic task's in the model's chat template (about 40 tokens), answers random tokens whose lengths
are log-normal (median 9, sigma 0.45, at most 24: mean 10), as first light's were; `--median 40 --spread 1 --longest
400` looks like reasoning: mostly short, a few ten times as long.
Writes `learner.json` into `--out`: for each way the seconds of every step, tokens a second, the most resident memory.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.first_light import LEVELS
from configs.inputs import Data
from engine.datasets import load_prompts

SHORTEST = 2
DEFAULT_WAYS = ("shared:2048", "packed:2048", "plain:16", "sorted:16", "trl:16", "trl:16:float32")


@dataclass(frozen=True, slots=True)
class Way:
    """`NAME:SIZE[:DTYPE]`."""

    name: str
    size: str
    dtype: str = "bfloat16"

    def command(self, options: argparse.Namespace, batch: Path) -> list[str]:
        """The process that takes steps this way."""
        python = options.trl_python if self.name == "trl" else sys.executable
        given = ["--model", options.model, "--batch", str(batch), "--size", self.size, "--dtype", self.dtype]
        return [str(python), "-m", "benchmarks.learner_ways", self.name, *given]


@dataclass(slots=True)
class Result:
    """What one way showed."""

    seconds: list[float] = field(default_factory=list[float])
    """Of every step after warm-up."""
    cpu_seconds: list[float] = field(default_factory=list[float])
    """Processor time of those: with one thread it is what counts on a machine that others use too."""
    grad_norm: float = 0.0
    """Of the first step: all ways compute the same gradient."""
    peak_rss_bytes: int = 0
    tokens_per_s: float = 0.0
    """Useful tokens over the median step."""
    tokens_per_cpu_s: float = 0.0

    def add(self, rows: Sequence[dict]) -> None:
        """Count one turn: warm-up steps and, last, the step that is measured."""
        self.grad_norm = rows[0]["grad_norm"]
        self.seconds.append(rows[-1]["seconds"])
        self.cpu_seconds.append(rows[-1]["cpu_seconds"])
        self.peak_rss_bytes = max(self.peak_rss_bytes, rows[-1]["peak_rss_bytes"])


RATES: tuple[Callable[[Result], float], ...] = (lambda one: one.tokens_per_s, lambda one: one.tokens_per_cpu_s)


def draw_groups(
    prompts: Sequence[list[int]], samples: int, draw_length: Callable[[random.Random], int], seed: int
) -> list[dict]:
    """Groups with random answers.

    Args:
        prompts: Token ids of each group's prompt.
        samples: n, answers of a group.
        draw_length: Tokens of one answer.
        seed: Of lengths, tokens and advantages.
    """
    rng = random.Random(seed)

    def sample(index: int, mean: float) -> dict:
        tokens = [rng.randrange(100, 40_000) for _ in range(draw_length(rng))]
        return {"tokens": tokens, "logprobs": [0.0] * len(tokens), "advantage": index % 2 - mean}

    means = [rng.uniform(0.1, 0.9) for _ in prompts]
    return [
        {"prompt": prompt, "samples": [sample(index, mean) for index in range(samples)]}
        for prompt, mean in zip(prompts, means, strict=True)
    ]


def log_normal(median: float, sigma: float, longest: int) -> Callable[[random.Random], int]:
    """Draws lengths, from SHORTEST to `longest` tokens."""
    return lambda rng: min(longest, max(SHORTEST, round(rng.lognormvariate(math.log(median), sigma))))


def useful_tokens(groups: Sequence[dict]) -> int:
    """Prompt and response tokens of every sample."""
    return sum(len(group["prompt"]) + len(sample["tokens"]) for group in groups for sample in group["samples"])


def encode(model: str, train: str, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of first light's levels, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_prompts(train, Data(), LEVELS.split(","))[:count]
    chats = ([{"role": "user", "content": row.text}] for row in rows)
    texts = (tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def take_turns(ways: Sequence[Way], options: argparse.Namespace, batch: Path) -> dict[Way, Result]:
    """Every way in turn: a new process, its warm-up, one step; as often as asked.

    One process at a time, so that memory holds only one copy of everything.

    Raises:
        RuntimeError: a way ended early; what it wrote is in its log.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false"}
    results = {way: Result() for way in ways}
    for turn in range(options.turns):
        for way, result in results.items():
            with (
                (options.out / f"{way.name}-{way.size}-{way.dtype}.log").open("w") as log,
                subprocess.Popen(
                    way.command(options, batch), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    bufsize=0, env=environment,
                ) as process,
            ):  # fmt: skip
                rows = [_step(way, process) for _ in range(options.warm_up + 1)]
                result.add(rows)
            sys.stderr.write(f"turn {turn + 1}, {way.name} {way.size} {way.dtype}: {rows[-1]}\n")
    return results


def _step(way: Way, process: subprocess.Popen[bytes]) -> dict:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(b"\n")
        line = process.stdout.readline()
        while line and not line.startswith(b'{"seconds"'):  # TRL and transformers print too
            line = process.stdout.readline()
    except BrokenPipeError:
        line = b""
    if not line:
        raise RuntimeError(f"{way.name} ended before its turn; see its log in --out")
    return json.loads(line)


def table(results: dict[Way, Result]) -> str:
    """One line a way; ratios are to the fastest plain and the fastest TRL way."""
    best = {
        name: [
            max([rate(result) for way, result in results.items() if way.name == name] or [math.nan]) for rate in RATES
        ]
        for name in ("plain", "trl")
    }
    lines = [
        "way size dtype | s median (least-most) | tokens/s x plain x trl | tokens/cpu s x plain x trl | GB | gradient"
    ]
    for way, result in results.items():
        seconds = result.seconds
        cells = [
            f"{way.name} {way.size} {way.dtype}",
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
        ]
        for index, rate in enumerate(RATES):
            own = rate(result)
            cells.append(f"{own:.0f} {own / best['plain'][index]:.2f} {own / best['trl'][index]:.2f}")
        cells += [f"{result.peak_rss_bytes / 1e9:.2f}", f"{result.grad_norm:.4f}"]
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--train", default="datasets/arithmetic/train.jsonl")
    parser.add_argument("--trl-python", type=Path, help="python of an environment with trl; without it TRL is left out")
    parser.add_argument("--ways", nargs="+", default=DEFAULT_WAYS, help="NAME:SIZE[:DTYPE], see learner_ways")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--median", type=float, default=9.0, help="tokens of the median answer")
    parser.add_argument("--spread", type=float, default=0.45, help="sigma of log lengths")
    parser.add_argument("--longest", type=int, default=24, help="tokens of the longest answer")
    parser.add_argument("--cores", default="", help="e.g. 0,1; default: those this process may use")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/learner"))
    return parser.parse_args()


def main() -> int:
    """Measure and print; returns the exit status."""
    options = parse()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    ways = [Way(*text.split(":")) for text in options.ways]
    ways = [way for way in ways if way.name != "trl" or options.trl_python]
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = encode(options.model, options.train, options.groups)
    draw_length = log_normal(options.median, options.spread, options.longest)
    groups = draw_groups(prompts, options.samples, draw_length, options.seed)
    tokens, batch = useful_tokens(groups), options.out / "batch.json"
    batch.write_text(json.dumps(groups), encoding="utf-8")
    subprocess.run(Way("behaviour", "64").command(options, batch), check=True)
    results = take_turns(ways, options, batch)
    for result in results.values():
        result.tokens_per_s = tokens / statistics.median(result.seconds)
        result.tokens_per_cpu_s = tokens / statistics.median(result.cpu_seconds)
    rows = [asdict(way) | asdict(result) for way, result in results.items()]
    summary = {"useful_tokens": tokens, "cores": sorted(os.sched_getaffinity(0)), "ways": rows}
    (options.out / "learner.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{tokens} useful tokens a step\n{table(results)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
