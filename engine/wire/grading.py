"""What the engine and a verifier process say over the process's pipes: length-prefixed msgpack records."""

from typing import Literal, TypeAlias, TypeVar

import msgspec

from engine.core.errors import WireError

Verdict: TypeAlias = Literal["correct", "wrong", "unparsed", "timeout", "crashed"]
"""What a verifier says of a response. `unparsed` (no answer in it) is a wrong answer; the last two are no answer at
all of the verifier and never become a reward."""


class GradeRequest(msgspec.Struct, frozen=True, array_like=True):
    """Engine to verifier process, over its stdin: judge one response."""

    text: str
    answer: str
    """The data's reference answer."""


class GradeReply(msgspec.Struct, frozen=True, array_like=True):
    """Verifier process to engine, over its stdout; the first one, unasked, says that the self-test passed."""

    verdict: Verdict
    work_s: float
    error: str = ""
    """Why there is no verdict (crashed)."""


GRADE_LENGTH_BYTES = 4
"""A frame on the verifier's pipes is its body's length (unsigned, little-endian) and the msgpack body."""
MAX_GRADE_BYTES = 1 << 26
"""A longer announced body is no frame of ours."""


def encode_grade(record: GradeRequest | GradeReply) -> bytes:
    """Length and body of `record`.

    Raises:
        WireError: the body is longer than MAX_GRADE_BYTES.
    """
    body = msgspec.msgpack.encode(record)
    if len(body) > MAX_GRADE_BYTES:
        raise WireError(f"a grade frame must be <= {MAX_GRADE_BYTES} bytes, got {len(body)}")
    return len(body).to_bytes(GRADE_LENGTH_BYTES, "little") + body


_GradeT = TypeVar("_GradeT", GradeRequest, GradeReply)


def decode_grade(body: bytes | memoryview, kind: type[_GradeT]) -> _GradeT:
    """The record of a frame's body. Raises WireError when it is none of that kind."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as exc:
        raise WireError(f"not a {kind.__name__}: {exc}") from exc


def grade_length(head: bytes | memoryview) -> int:
    """Body length announced by a frame's first GRADE_LENGTH_BYTES. Raises WireError over MAX_GRADE_BYTES."""
    length = int.from_bytes(head, "little")
    if length > MAX_GRADE_BYTES:
        raise WireError(f"a grade frame must be <= {MAX_GRADE_BYTES} bytes, got {length}")
    return length
