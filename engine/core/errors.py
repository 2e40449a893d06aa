"""The error tree.

AdastreamError
├── WireError           a peer sent bytes that are no message of this protocol (fatal for that peer)
├── PeerLost            a peer is gone: connection, process or deadline (worker: restarted; learner: fatal)
├── DataError           a data row or file cannot be used (fatal at load)
├── WeightUpdateError   an update failed its checks on a worker (worker fenced and restarted)
├── StalenessError      a sample over the bound reached a gradient (fatal: a broken invariant)
├── DeadlineError       a wait passed its deadline; the text names the wait and its owner (fatal)
├── Interrupted         a person or a scheduler asked the process to end at once
└── RunError            the run cannot go on; the text names the cause (fatal)
"""

from typing import cast


class AdastreamError(Exception):
    """Base of every error of ours."""


class WireError(AdastreamError):
    """Bytes that are no message of this protocol."""


class PeerLost(AdastreamError):
    """A worker, verifier or learner is gone."""


class DataError(AdastreamError):
    """A data file or row cannot be used; the text names file and line."""


class WeightUpdateError(AdastreamError):
    """A weight update failed its checks."""


class StalenessError(AdastreamError):
    """A sample over the bound reached a gradient."""


class DeadlineError(AdastreamError):
    """A wait passed its deadline."""


class RunError(AdastreamError):
    """The run cannot go on."""


class Interrupted(AdastreamError):
    """The process was told to end at once; the text names the signal."""


def first_cause(error: BaseException) -> BaseException:
    """The first exception inside nested groups: what the user sees."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def first_line(error: BaseException) -> str:
    """What a library says in its first line: some go on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
