"""The verifier child alone: its frames, its limits, its exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.errors import WireError
from engine.wire import (
    GRADE_LENGTH_BYTES,
    MAX_GRADE_BYTES,
    GradeReply,
    GradeRequest,
    decode_grade,
    encode_grade,
    grade_length,
)

ROOT = Path(__file__).resolve().parents[2]


def _run(stdin: bytes, grader: str = "numeric", alarm_s: float = 5.0) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "workers.verifier", "--grader", grader, "--alarm-s", str(alarm_s)]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, timeout=60, check=False)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60, check=False,
    )  # fmt: skip


def _replies(stdout: bytes) -> list[GradeReply]:
    replies = []
    while stdout:
        end = GRADE_LENGTH_BYTES + grade_length(stdout[:GRADE_LENGTH_BYTES])
        replies.append(decode_grade(stdout[GRADE_LENGTH_BYTES:end], GradeReply))
        stdout = stdout[end:]
    return replies


def test_it_says_ready_answers_in_turn_and_ends_with_its_input():
    requests = [GradeRequest("it is 7", "7"), GradeRequest("8", "7"), GradeRequest("", "7"), GradeRequest("7", "x")]
    result = _run(b"".join(encode_grade(request) for request in requests))
    assert result.returncode == 0
    ready, *verdicts = _replies(result.stdout)
    assert ready.verdict == "correct"
    assert [reply.verdict for reply in verdicts] == ["correct", "wrong", "unparsed", "crashed"]
    assert "reference answer must contain a number" in verdicts[-1].error


def test_a_truncated_request_is_an_error():
    result = _run(encode_grade(GradeRequest("7", "7"))[:-1])
    assert result.returncode == 1
    assert b"stdin ended 1 bytes inside a request" in result.stderr


def test_the_alarm_ends_a_slow_verdict():
    tower = encode_grade(GradeRequest("\\boxed{9^{9^{9}}}", "1"))
    right = encode_grade(GradeRequest("\\boxed{7}", "7"))
    result = _run(tower + right, grader="math", alarm_s=0.3)
    _, slow, after = _replies(result.stdout)
    assert (slow.verdict, after.verdict) == ("timeout", "correct")
    assert 0.3 <= slow.work_s < 3.0
    assert "no verdict within 0.3 s" in slow.error


def test_what_a_grader_prints_never_reaches_the_frames():
    result = _python(
        "import sys, workers.graders.numeric as numeric, workers.verifier as verifier\n"
        "judge = numeric.grade\n"
        "def talking(text, answer):\n"
        "    sys.stdout.write('noise'); sys.stdout.flush()\n"
        "    return judge(text, answer)\n"
        "numeric.grade = talking\n"
        "sys.exit(verifier.main(['--grader', 'numeric', '--alarm-s', '1']))\n"
    )
    assert result.returncode == 0
    assert "noise" in result.stderr
    assert "noise" not in result.stdout


def test_memory_over_the_limit_is_an_error_of_the_process_and_no_verdict():
    result = _python(
        "import io, os, workers.verifier as verifier\n"
        "from engine.wire import GradeRequest\n"
        "verifier.confine(1 << 30, os.getppid())\n"
        "verifier.judge(lambda text, answer: len(bytearray(2 << 30)), GradeRequest('', ''), 5.0)\n"
    )
    assert result.returncode == 1
    assert "MemoryError" in result.stderr


def test_a_child_whose_parent_is_gone_before_it_begins_ends_at_once():
    result = _python(f"from workers.verifier import confine\nconfine(0, {os.getpid()} + 1)\nraise RuntimeError('on')")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_failed_self_test_has_its_own_exit_code():
    result = _python(
        "import sys, workers.graders.numeric as numeric, workers.verifier as verifier\n"
        "numeric.grade = lambda text, answer: 'wrong'\n"
        "sys.exit(verifier.main(['--grader', 'numeric', '--alarm-s', '1']))\n"
    )
    assert result.returncode == 4
    assert "self-test must say correct, wrong; got wrong, wrong" in result.stderr
    assert result.stdout == ""


def test_light_graders_do_not_pay_for_the_heavy_one():
    result = _python(
        "import sys; from workers.graders import load_grader; import workers.verifier\n"
        "load_grader('numeric'); load_grader('exact')\n"
        "sys.exit(any(name.split('.')[0] in ('sympy', 'math_verify', 'torch') for name in sys.modules))\n"
    )
    assert result.returncode == 0


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x93\xa5maybe\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa0"])
def test_bytes_that_are_no_reply_are_a_wire_error(body):
    with pytest.raises(WireError, match="not a GradeReply"):
        decode_grade(body, GradeReply)


def test_an_absurd_length_is_a_wire_error_on_both_ends():
    with pytest.raises(WireError, match="must be <="):
        grade_length(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="must be <="):
        encode_grade(GradeRequest("x" * MAX_GRADE_BYTES, ""))
