"""Generate a graded data set: `python -m engine.prepare arithmetic --out DIR --seed N`.

Invariants: the same arguments give the same bytes; no problem stands twice in train and test together; a file appears
whole or not at all.
"""

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import DataError

_DIGITS = {1: range(10), 2: range(10, 100), 3: range(100, 1000)}


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of sum: operands by number of digits, with the operators between them (`*` binds first)."""

    digits: tuple[int, ...]
    operators: tuple[str, ...]

    def operands(self) -> list[tuple[int, ...]]:
        """Operands of every problem of this level whose value is not negative."""
        every = itertools.product(*(_DIGITS[digits] for digits in self.digits))
        if "-" not in self.operators:
            return list(every)
        return [numbers for numbers in every if self.value(numbers) >= 0]

    def expression(self, numbers: Sequence[int]) -> str:
        """The problem as text."""
        tail = (f" {operator} {number}" for operator, number in zip(self.operators, numbers[1:], strict=True))
        return str(numbers[0]) + "".join(tail)

    def value(self, numbers: Sequence[int]) -> int:
        """The answer."""
        total, term = 0, numbers[0]
        for operator, number in zip(self.operators, numbers[1:], strict=True):
            if operator == "*":
                term *= number
            else:
                total, term = total + term, number if operator == "+" else -number
        return total + term


LEVELS: Mapping[str, Level] = {
    "1d+1d": Level((1, 1), ("+",)),
    "1d-1d": Level((1, 1), ("-",)),
    "1d*1d": Level((1, 1), ("*",)),
    "2d+1d": Level((2, 1), ("+",)),
    "2d-1d": Level((2, 1), ("-",)),
    "2d+2d": Level((2, 2), ("+",)),
    "2d-2d": Level((2, 2), ("-",)),
    "3d+3d": Level((3, 3), ("+",)),
    "3d-2d": Level((3, 2), ("-",)),
    "2d*1d": Level((2, 1), ("*",)),
    "a+b+c": Level((1, 1, 1), ("+", "+")),
    "a*b+c": Level((1, 1, 1), ("*", "+")),
}

MIXES: Mapping[str, Mapping[str, float]] = {
    "quickstart": {"1d+1d": 2, "1d-1d": 2, "1d*1d": 2, "2d+1d": 2, "2d-1d": 1, "a+b+c": 1},
    "full": dict.fromkeys(LEVELS, 1.0),
}
"""Relative share of each level. `quickstart`: a 135M instruction model starts near 10 % at temperature 1."""

_TEST_SHARE_OF_LEVEL = 0.15  # small levels keep most of their few problems for training


@dataclass(frozen=True, slots=True)
class Problem:
    """One row before it has an id."""

    expression: str
    answer: int
    level: str


def arithmetic(seed: int, num_train: int, num_test: int, mix: Mapping[str, float]) -> tuple[list[Problem], ...]:
    """Train and test problems, disjoint, each in random order.

    A level too small for its share gives what it has, and the other levels share the rest.

    Raises:
        DataError: the levels hold fewer problems than asked for, or the mix is not one.
    """
    unknown = sorted(set(mix) - set(LEVELS))
    if unknown:
        raise DataError(f"unknown level {', '.join(unknown)}; levels: {', '.join(LEVELS)}")
    if not mix or min(mix.values()) <= 0:
        raise DataError(f"every level of a mix needs a share above 0, got {dict(mix)}")
    spaces = {level: LEVELS[level].operands() for level in mix}
    room = {level: int(len(space) * _TEST_SHARE_OF_LEVEL) for level, space in spaces.items()}
    test_counts = _shares(num_test, mix, room)
    room = {level: len(space) - test_counts[level] for level, space in spaces.items()}
    train_counts = _shares(num_train, mix, room)
    train: list[Problem] = []
    test: list[Problem] = []
    for level, space in spaces.items():
        # A generator of its own, so that adding a level leaves the problems of the others as they were.
        operands = random.Random(f"{seed}/{level}").sample(space, test_counts[level] + train_counts[level])
        kind = LEVELS[level]
        drawn = [Problem(kind.expression(numbers), kind.value(numbers), level) for numbers in operands]
        test += drawn[: test_counts[level]]
        train += drawn[test_counts[level] :]
    order = random.Random(seed)
    order.shuffle(train)
    order.shuffle(test)
    return train, test


def _shares(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, int]:
    """Split `total` by `weights`, at most `room` each; what a full level cannot take goes to the others."""
    if total > sum(room.values()):
        raise DataError(f"the levels {', '.join(weights)} hold {sum(room.values())} problems for this, {total} asked")
    counts = dict.fromkeys(weights, 0)
    while (left := total - sum(counts.values())) > 0:
        open_levels = [level for level in weights if counts[level] < room[level]]
        scale = left / sum(weights[level] for level in open_levels)
        for level in open_levels:
            wanted = max(1, int(weights[level] * scale))
            counts[level] += min(wanted, room[level] - counts[level], total - sum(counts.values()))
    return counts


def write_jsonl(path: Path, problems: Sequence[Problem], id_prefix: str) -> None:
    """Write the rows beside `path`, then rename: a reader sees the old file or the whole new one.

    Raises:
        OSError: the folder cannot be written; an old file is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            for index, problem in enumerate(problems):
                row = {
                    "id": f"{id_prefix}-{index}",
                    "problem": f"What is {problem.expression}? Reply with only the number.",
                    "answer": str(problem.answer),
                    "level": problem.level,
                }
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _parse_levels(text: str) -> dict[str, float]:
    """`1d+1d,2d+2d=3` as shares; a level without a number has share 1."""
    mix: dict[str, float] = {}
    for item in text.split(","):
        level, _, share = item.strip().partition("=")
        try:
            mix[level] = float(share or 1)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"a level is NAME or NAME=SHARE, got {item!r}") from exc
    return mix


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.prepare", description="Generate a graded data set.")
    parser.add_argument("kind", choices=["arithmetic"])
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=_parse_count, default=1500, help="training rows")
    parser.add_argument("--test", type=_parse_count, default=240, help="held-out rows")
    parser.add_argument("--mix", choices=sorted(MIXES), default="quickstart", help="named shares of the levels")
    parser.add_argument("--levels", type=_parse_levels, help="own shares instead, e.g. 1d+1d,2d+2d=3")
    options = parser.parse_args(arguments)
    try:
        train, test = arithmetic(options.seed, options.train, options.test, options.levels or MIXES[options.mix])
        write_jsonl(options.out / "train.jsonl", train, "arithmetic-train")
        write_jsonl(options.out / "test.jsonl", test, "arithmetic-test")
    except DataError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    except OSError as exc:
        sys.stderr.write(f"error: {options.out} cannot be written: {exc.strerror}\n")
        return 1
    sys.stdout.write(f"{options.out}: {len(train)} training and {len(test)} held-out rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
