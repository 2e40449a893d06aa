"""The killable verifier child: grades one request at a time, from stdin to stdout.

Invariants: requests and replies are the frames of `engine.wire` and come in turn; the first reply, unasked, says that
the self-test passed. Whatever a grader prints goes to stderr, never between the frames. The process leads its own
session (so one signal kills it with all it may start) and dies with its parent. No core dumps; a grader that asks for
it runs under a memory limit. An own alarm, below the parent's deadline, ends most slow verdicts without a kill; the
parent kills what does not listen (a single big-integer power never returns to the interpreter).

Run as `python -m workers.verifier --grader NAME --alarm-s SECONDS` by engine/verifiers.py.
Ends when: stdin ends (exit 0), memory ran out (exit 3), or the self-test failed (exit 4).
"""

import argparse
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import BinaryIO, Final

from engine.core.errors import WireError
from engine.wire import GRADE_LENGTH_BYTES, GradeReply, GradeRequest, decode_grade, encode_grade, grade_length
from workers.graders import GRADERS, Grade, load_grader, self_test

log = logging.getLogger(__name__)

EXIT_NO_MEMORY: Final = 3
EXIT_SELF_TEST: Final = 4
_PR_SET_PDEATHSIG: Final = 1


class _AlarmRang(BaseException):
    """The time for one verdict is over. Not an Exception: graders' libraries catch those."""


def _on_alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _AlarmRang


def confine(memory_bytes: int, parent: int) -> None:
    """Die with `parent`, leave no core dump, and stay under `memory_bytes` of address space (0 = no limit)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def judge(grade: Grade, request: GradeRequest, alarm_s: float) -> GradeReply:
    """Grade one request under the alarm.

    Raises:
        MemoryError: the state of the process is not to be trusted any more.
    """
    began_at = time.perf_counter()
    error = ""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, alarm_s)
            verdict = grade(request.text, request.answer)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _AlarmRang:
        verdict, error = "timeout", f"no verdict within {alarm_s:.3g} s"
    except MemoryError:
        raise
    except Exception as exc:  # noqa: BLE001  (the per-sample boundary: one bad text must not end the process)
        verdict, error = "crashed", f"{type(exc).__name__}: {exc}"[:500]
    return GradeReply(verdict=verdict, work_s=time.perf_counter() - began_at, error=error)


def serve(requests: BinaryIO, replies: BinaryIO, grade: Grade, alarm_s: float) -> None:
    """Answer requests until their end.

    Raises:
        WireError: the parent sent no frame of ours.
    """
    while head := requests.read(GRADE_LENGTH_BYTES):
        length = grade_length(head)
        body = requests.read(length)
        if len(body) < length:
            raise WireError(f"stdin ended {length - len(body)} bytes inside a request")
        replies.write(encode_grade(judge(grade, decode_grade(body, GradeRequest), alarm_s)))
        replies.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Confine, prove, say ready, serve; returns the exit code."""
    parser = argparse.ArgumentParser(prog="workers.verifier", description="Grade responses from stdin to stdout.")
    parser.add_argument("--grader", required=True, choices=sorted(GRADERS))
    parser.add_argument("--alarm-s", type=float, required=True, help="longest work on one verdict, seconds")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process to die with")
    options = parser.parse_args(argv)
    began_at = time.perf_counter()
    logging.basicConfig(format="verifier %(process)d %(levelname)s %(message)s")
    confine(GRADERS[options.grader].memory_bytes, options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGALRM, _on_alarm)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    grade = load_grader(options.grader)
    if error := self_test(options.grader, grade):
        log.error("grader %s: %s", options.grader, error)
        return EXIT_SELF_TEST
    with contextlib.suppress(BrokenPipeError), replies:  # a parent that is gone needs no replies
        replies.write(encode_grade(GradeReply(verdict="correct", work_s=time.perf_counter() - began_at)))
        replies.flush()
        try:
            serve(sys.stdin.buffer, replies, grade, options.alarm_s)
        except MemoryError:
            log.warning("grader %s ran out of memory", options.grader)
            return EXIT_NO_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
