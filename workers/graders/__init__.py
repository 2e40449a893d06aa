"""Graders: one file each, with a pure function `grade(text, answer) -> Verdict`; found here by their config name.

A grader is imported only where its name is asked for, so that the light ones never pay for the heavy ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TypeAlias

from engine.wire import Verdict

Grade: TypeAlias = Callable[[str, str], Verdict]
"""(response text, reference answer) -> verdict; raises ValueError where the reference itself cannot be read."""


@dataclass(frozen=True, slots=True)
class GraderEntry:
    """Where a grader lies, and how it proves that it works before it judges anything."""

    module: str
    answer: str
    """Reference of the two self-test cases."""
    right: str
    wrong: str
    memory_bytes: int = 0
    """Address-space limit of its process; 0 = none."""


GRADERS = MappingProxyType(
    {
        "numeric": GraderEntry("workers.graders.numeric", "1,234", "so it is 1234.0.", "so it is 12"),
        "exact": GraderEntry("workers.graders.exact", "right", " right\n", "wrong"),
        "math": GraderEntry("workers.graders.symbolic", "\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{2}", 2 << 30),
    }
)
"""By `verifier.name`."""


def load_grader(name: str) -> Grade:
    """The grade function registered as `name`.

    Raises:
        KeyError: no such grader.
        ImportError: its library is missing.
    """
    grade: Grade = import_module(GRADERS[name].module).grade
    return grade


def self_test(name: str, grade: Grade) -> str:
    """Empty when `grade` judges the two known cases of `name` rightly, else what it said."""
    entry = GRADERS[name]
    verdicts = grade(entry.right, entry.answer), grade(entry.wrong, entry.answer)
    return "" if verdicts == ("correct", "wrong") else f"self-test must say correct, wrong; got {', '.join(verdicts)}"
