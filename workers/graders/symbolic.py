r"""Symbolic grader: math-verify on the end of the response against the reference answer.

Rules: only the last MAX_CHARACTERS count, and of them what follows the last `</think>`. A reference without maths
delimiters is read as LaTeX. Where a response has several boxes, both all of them together (a set of answers) and the
last one alone (the final answer) may match. Nothing extracted = unparsed.

math-verify's own alarms are off: they count whole seconds for every pair of extractions and report a time-out as
"wrong". The process around this grader has one alarm for the whole verdict, and a killer outside. The exception of
that alarm must not derive from `Exception`, which this library catches at many places.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from engine.wire import Verdict

MAX_CHARACTERS = 8192
"""Only the end of a response is read: that is where its answer is, and parsing is slow in long text."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)


def _parse(text: str) -> list[Any]:
    """Candidates in `text`; empty when there is none or the parser gives up, which says the same: no mathematics."""
    try:
        return parse(text, parsing_timeout=0, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise  # our failure, not the response's
    except Exception:  # noqa: BLE001  (the parser raises whatever its parts raise on malformed text)
        return []


def _equal(reference: Any, candidate: Any) -> bool:  # noqa: ANN401  (sympy objects or text, as the parser made them)
    try:
        # Gold goes first: the comparison is not symmetric.
        return verify(reference, candidate, timeout_seconds=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  (sympy raises all kinds of errors for pairs that cannot be compared)
        return False


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[Any, ...]:
    wrapped = answer if any(mark in answer for mark in _DELIMITERS) else f"${answer}$"
    parsed = _parse(wrapped) or _parse(answer)
    if not parsed:
        raise ValueError(f"reference answer must be a mathematical expression, got {answer[:80]!r}")
    return tuple(parsed)


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}` of `text`; None without one or with unbalanced braces."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth = 1
    for place in range(start, len(text)):
        if text[place - 1] == "\\":
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def grade(text: str, answer: str) -> Verdict:
    """Verdict on `text`. Can take arbitrarily long on hostile input (towers of powers): run it under a deadline.

    Raises:
        ValueError: `answer` cannot be read, so nothing can be judged.
    """
    reference = _reference(answer)
    end = text[-MAX_CHARACTERS:].rsplit("</think>", 1)[-1]
    candidates = _parse(end)
    box = last_box(end)
    if box is not None and (not candidates or len(_BOX.findall(end)) > 1):
        candidates = candidates + _parse(f"\\boxed{{{box}}}")
    if not candidates:
        return "unparsed"
    is_right = any(_equal(gold, candidate) for gold in reference for candidate in candidates)
    return "correct" if is_right else "wrong"
