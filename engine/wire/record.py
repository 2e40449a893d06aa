"""What a checkpoint says of itself: `adastream.json`, the last file of a checkpoint, which names all the others.

Invariants: readable JSON with a hash over its own content, so a flipped bit in it is noticed as one in any other file
is; keys are only added. The folder's layout is in learner/checkpoint.py, its one writer and reader.
"""

import msgspec
import xxhash

from engine.core.errors import WireError
from engine.wire.messages import Position


class Milestone(msgspec.Struct, frozen=True):
    """How far a run is: what the learner has taken in, up to the last finished optimizer step."""

    policy_version: int = 0
    last_group_id: int = -1
    """Newest group that was trained, or dropped at the gradient."""
    position: Position = Position()


class Fingerprint(msgspec.Struct, frozen=True):
    """What must be the same before a state can be loaded."""

    backend: str
    """Layout of the optimizer's state, e.g. `torch`."""
    architecture: str
    """Class of the model in transformers."""
    dtype: str
    """torch dtype name of the weights."""
    world_size: int
    """Ranks, each with a state file of its own."""
    parameters: dict[str, list[int]]
    """Shape of each parameter under its HF name, in the model's order; a tied head once."""
    lora_alpha: float = 0.0
    """Scales what adapters add; 0 = no adapters."""
    frozen: str = ""
    """xxh3_128 of the weights that are not in the state because they do not train, hex; empty = all do."""


class FileSum(msgspec.Struct, frozen=True):
    """One file of the checkpoint."""

    num_bytes: int
    xxh3: str
    """xxh3_128 of its bytes, hex."""


class CheckpointRecord(msgspec.Struct, frozen=True):
    """The content of `adastream.json`."""

    milestone: Milestone
    fingerprint: Fingerprint
    files: dict[str, FileSum]
    """Every other file, by its path inside the folder."""


class _Sealed(msgspec.Struct, frozen=True):
    xxh3: str
    record: msgspec.Raw


def encode_record(record: CheckpointRecord) -> bytes:
    """The file's bytes."""
    content = msgspec.json.encode(record)
    return msgspec.json.encode(_Sealed(xxhash.xxh3_128_hexdigest(content), msgspec.Raw(content)))


def decode_record(content: bytes) -> CheckpointRecord:
    """Read the file's bytes.

    Raises:
        WireError: cut short, changed, or of another shape; the text says which.
    """
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        if (found := xxhash.xxh3_128_hexdigest(bytes(sealed.record))) != sealed.xxh3:
            raise WireError(f"its content must have xxh3 {sealed.xxh3}, has {found}")
        return msgspec.json.decode(sealed.record, type=CheckpointRecord)
    except msgspec.MsgspecError as exc:
        raise WireError(f"is no record of a checkpoint: {exc}") from exc
