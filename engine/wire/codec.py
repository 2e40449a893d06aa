"""Messages to frames and back: one msgpack header and the raw bytes of each array, never pickle.

An unknown tag, a wrong type, a missing frame or a foreign array is a `WireError`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import WireError
from engine.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Applied,
    ApplyWeights,
    Closed,
    Credit,
    Encode,
    Encoded,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Resumed,
    SampleDone,
    SampleFailed,
    Staged,
    StageWeights,
    StepDone,
    Stop,
    TrainGroup,
    WeightsPublished,
    WeightsReady,
    Welcome,
)

Frames: TypeAlias = list[bytes | memoryview]


class Envelope(msgspec.Struct, array_like=True):
    """What precedes the arrays: per-direction sequence number (0 = unnumbered) and the message."""

    seq: int
    body: (
        Hello
        | Welcome
        | Refused
        | Ack
        | Closed
        | Heartbeat
        | Encode
        | Encoded
        | Generate
        | Abort
        | SampleDone
        | SampleFailed
        | Resumed
        | WeightsReady
        | StageWeights
        | Staged
        | ApplyWeights
        | Applied
        | WeightsPublished
        | Credit
        | TrainGroup
        | StepDone
        | Finished
        | Stop
    )


def encode(message: Message, seq: int = 0) -> Frames:
    """Header frame and raw array frames of `message`; arrays are not copied, so they must not change afterwards."""
    frames: Frames = [b""]

    def hook(value: object) -> object:
        if isinstance(value, np.ndarray):
            array: NDArray[Any] = np.ascontiguousarray(cast("NDArray[Any]", value))
            if array.dtype.str not in ("<i4", "<f4") or array.ndim != 1:
                raise WireError(f"an array must be one-dimensional <i4 or <f4, got {array.shape} {array.dtype.str!r}")
            frames.append(array.data.cast("B") if array.size else b"")
            return [len(frames) - 1, array.dtype.str, array.shape[0]]
        raise WireError(f"cannot send a {type(value).__name__}")

    frames[0] = msgspec.msgpack.encode([seq, message], enc_hook=hook)
    return frames


def decode(frames: Sequence[bytes | memoryview]) -> tuple[int, Message]:
    """Sequence number and message of received frames; arrays are read-only views of the frames.

    Raises:
        WireError: unknown tag, wrong type, missing frame, or bytes that are not an array of the announced length.
    """

    def hook(_kind: type, value: object) -> object:
        frame, dtype, length = cast("tuple[int, str, int]", value)
        if dtype not in ("<i4", "<f4"):
            raise WireError(f"array dtype must be <i4 or <f4, got {dtype!r}")
        array: NDArray[Any] = np.frombuffer(frames[frame], dtype=dtype)
        if array.shape != (length,):
            raise WireError(f"array frame {frame} must hold {length} values, got {array.shape[0]}")
        return array

    try:
        envelope = msgspec.msgpack.decode(frames[0], type=Envelope, dec_hook=hook)
    except (msgspec.MsgspecError, IndexError, ValueError, TypeError) as exc:
        raise WireError(f"not a message of protocol {PROTOCOL_VERSION}: {exc}") from exc
    return envelope.seq, envelope.body
