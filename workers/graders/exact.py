"""Exact grader: the response without surrounding white space equals the reference answer; an empty one is unparsed."""

from engine.wire import Verdict


def grade(text: str, answer: str) -> Verdict:
    """Verdict on `text`."""
    stripped = text.strip()
    if not stripped:
        return "unparsed"
    return "correct" if stripped == answer.strip() else "wrong"
