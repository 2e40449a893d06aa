"""Numeric grader: the last number of the response against the reference answer.

Rule: a number is digits, with thousands commas or not, an optional decimal part and exponent (`1,234.5`, `.5`, `2e3`);
`a/b` without spaces is one number. A sign counts only where it touches the digits and follows neither a digit, a
letter nor a closing bracket: `10-3` ends in 3, `x = -3` in -3. Values are compared exactly as fractions, so 72, 72.0
and 144/2 are equal. Units, currency and percent signs are ignored. Linear in the length of the text.
"""

import re
from fractions import Fraction
from functools import lru_cache

from engine.wire import Verdict

MAX_CHARACTERS = 8192
"""Only the end of a response is read: that is where its answer is."""
_MAX_NUMBER_CHARACTERS = 256
"""Longer digit strings are no answer, and exact arithmetic on them would take long."""

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][+-]?\d{1,2}(?!\d))?"
_NUMBER = re.compile(rf"(?:(?<![\w.)\]}}])[-+−])?(?P<top>{_PLAIN})(?:/(?P<bottom>{_PLAIN}))?", re.ASCII)


def last_number(text: str) -> Fraction | None:
    """Value of the last number in `text`; None when there is none, it divides by zero or is absurdly long."""
    match = max(_NUMBER.finditer(text), key=re.Match.start, default=None)
    if match is None or len(match[0]) > _MAX_NUMBER_CHARACTERS:
        return None
    value = _value(match["top"])
    if match["bottom"] is not None:
        bottom = _value(match["bottom"])
        if not bottom:
            return None
        value /= bottom
    return -value if match[0][0] in "-−" else value


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


@lru_cache(maxsize=4096)
def _reference(answer: str) -> Fraction:
    value = last_number(answer)
    if value is None:
        raise ValueError(f"reference answer must contain a number, got {answer[:80]!r}")
    return value


def grade(text: str, answer: str) -> Verdict:
    """Verdict on `text`.

    Raises:
        ValueError: `answer` holds no number, so nothing can be judged.
    """
    reference = _reference(answer)
    value = last_number(text[-MAX_CHARACTERS:])
    if value is None:
        return "unparsed"
    return "correct" if value == reference else "wrong"
