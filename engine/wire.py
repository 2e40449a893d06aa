"""Every message between processes, once, with a protocol version.

Invariants: a message is one msgpack header (a tagged struct) plus raw array frames; nothing is pickled; an unknown
tag, a wrong type or another protocol version is a `WireError`. Arrays are numpy, int32 for token ids and float32 for
logprobs (nats). Only this file knows msgspec.

Directions: worker -> engine `Hello, Encoded, SampleDone, SampleFailed, Staged, Applied, Heartbeat`;
engine -> worker `Welcome, Encode, Generate, Abort, StageWeights, ApplyWeights, Stop`;
learner -> engine `Hello, Credit, WeightsReady, StepDone, Heartbeat, Finished`;
engine -> learner `Welcome, TrainGroup, WeightsPublished, Stop`. `Ack`, `Closed` and `Refused` belong to the
transport.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import WireError

PROTOCOL_VERSION = 1

Int32s: TypeAlias = NDArray[np.int32]
Float32s: TypeAlias = NDArray[np.float32]
Frames: TypeAlias = list[bytes | memoryview]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a response were sampled from weights `version`."""

    version: int
    start: int
    end: int


class SampleKey(msgspec.Struct, frozen=True, array_like=True):
    """One launch: arm number, launch index in the arm, and which try of that launch this is."""

    arm: int
    index: int
    retry: int = 0


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of everything on the wire."""


class Hello(Message):
    """First message of every peer, and again after every reconnection."""

    protocol: int
    role: Literal["worker", "learner"]
    name: str
    life: str
    """Random id of this process life: a restarted peer has another one."""
    pid: int
    slots: int = 0
    """Requests a worker runs at once; 0 for a learner."""
    policy_version: int = 0
    """Version of the weights held."""
    max_context_tokens: int = 0
    """Longest prompt plus response a worker takes."""


class Welcome(Message):
    """The engine accepts the peer."""

    policy_version: int
    life: str = ""
    """Random id of this engine life: a peer that reconnects to another one has lost its engine."""
    window: int = 0
    """Unacknowledged messages a direction, for both sides; 0 = the transport's default."""
    silence_deadline_s: float = 0.0
    """The engine calls a peer lost that is silent this long, so the peer shows life more often; 0 = never."""


class Refused(Message):
    """The engine does not accept the peer; the peer exits with this reason."""

    reason: str


class Ack(Message):
    """Every message up to and including `seq` arrived (transport only)."""

    seq: int


class Closed(Message):
    """The sender closes its end: nothing follows (transport only)."""

    reason: str


class Heartbeat(Message):
    """Sent every few seconds by workers and learner."""

    in_flight: int = 0
    tokens_generated: int = 0
    """Tokens since this life began (workers)."""
    stage: str = ""
    """What the peer is doing now, for people who wonder what a run waits for."""


class Encode(Message):
    """Turn prompt texts into token ids (chat template applied where `chat_template`)."""

    request: int
    prompts: list[str]
    chat_template: bool


class Encoded(Message):
    """Token ids of an `Encode`, in its order."""

    request: int
    token_ids: list[Int32s]


class SamplingParams(msgspec.Struct, frozen=True):
    """How one sample is drawn; temperature 0 = greedy."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    """63-bit seed; the same launch asked again has the same seed."""


class Generate(Message):
    """Draw one sample."""

    key: SampleKey
    prompt_token_ids: Int32s
    params: SamplingParams


class Abort(Message):
    """Stop these requests; each answers with a `SampleDone` of finish_reason "abort"."""

    keys: list[SampleKey]


class SampleDone(Message):
    """A response with what the sampler knew about it."""

    key: SampleKey
    token_ids: Int32s
    """Response tokens [T], the end token included."""
    logprobs: Float32s
    """Behaviour logprobs [T], nats, of the distribution that was really sampled."""
    spans: list[Span]
    """Cover [0, T) without gaps; empty for an empty response."""
    text: str
    """Decoded response without special tokens."""
    finish_reason: Literal["stop", "length", "abort"]
    generation_s: float


class SampleFailed(Message):
    """The worker could not draw this sample; it is asked for again, never scored."""

    key: SampleKey
    error: str
    tokens_lost: int = 0


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of an update: where its bytes lie and what they must be."""

    name: str
    """HF parameter name; a tied head is sent too, as `lm_head.weight`."""
    shape: list[int]
    dtype: str
    """torch dtype name, e.g. `bfloat16`."""
    offset: int
    """First byte in the mover's segment."""
    num_bytes: int
    xxh3: str
    """xxh3_64 of the bytes, hex."""
    is_finite: bool


class Canary(msgspec.Struct, frozen=True):
    """A fixed sequence and the learner's logprobs of its tokens."""

    token_ids: Int32s
    """[T] token ids."""
    logprobs: Float32s
    """[T-1] learner's logprob of token t+1 given tokens 0..t, temperature 1, nats."""


class Manifest(msgspec.Struct, frozen=True):
    """A whole set of weights, verified before, while and after it is applied."""

    policy_version: int
    mover: Literal["shm", "none"]
    """`none`: simulated weights, no tensors."""
    location: str
    """Name of the shared-memory segment."""
    num_bytes: int
    tensors: list[TensorSpec]
    canaries: list[Canary]


class WeightsReady(Message):
    """The learner finished an optimizer step (or start-up, version 0) and laid out the weights."""

    manifest: Manifest
    stage_s: float = 0.0


class StageWeights(Message):
    """Phase one: open, check names, shapes, dtypes, finiteness and hashes; answer `Staged`."""

    manifest: Manifest


class Staged(Message):
    """Answer to `StageWeights`."""

    policy_version: int
    error: str = ""
    """Empty = every check passed."""
    stage_s: float = 0.0


class ApplyWeights(Message):
    """Phase two: pause, load, finish as `policy_version`, resume, canary; answer `Applied`."""

    policy_version: int
    load: bool = True
    """False = only run the canary on the weights held (lag-0 noise, version 0)."""
    canary_limit_nats: float = float("inf")
    """Largest logprob difference allowed."""


class Applied(Message):
    """Answer to `ApplyWeights`. Samples with tokens of a version are sent only after its canary passed."""

    policy_version: int
    error: str = ""
    """Empty = loaded and the canary passed."""
    pause_s: float = 0.0
    """Generation stood still."""
    load_s: float = 0.0
    update_s: float = 0.0
    """From the request to the passed canary."""
    canary_max_nats: float = 0.0


class WeightsPublished(Message):
    """Every live worker runs `policy_version`; the learner may reuse older segments."""

    policy_version: int


class Credit(Message):
    """The learner takes this many more groups."""

    groups: int


class TrainSample(msgspec.Struct, frozen=True):
    """One kept sample."""

    index: int
    """Launch index in its arm."""
    token_ids: Int32s
    logprobs: Float32s
    spans: list[Span]
    reward: float
    advantage: float
    """Constant over the response's tokens."""


class TrainGroup(Message):
    """One group for the optimizer step that starts from `train_version`."""

    group_id: int
    prompt_id: str
    prompt_token_ids: Int32s
    samples: list[TrainSample]
    train_version: int
    """Learner version at whose gradient this group is used."""
    max_staleness: int
    """The bound, checked again there."""


class StepDone(Message):
    """An optimizer step was taken: the learner's version is now `policy_version`."""

    policy_version: int
    group_ids: list[int]
    dropped_group_ids: list[int]
    """Groups that would have broken the bound at the gradient (counted, never trained)."""
    metrics: dict[str, float]
    """loss, entropy, kl_behaviour, clip_share, grad_norm, lr, ratio_max, tokens_trained (response tokens),
    tokens_packed (prompt and response tokens computed), step_s (compute), wait_s, max_staleness, mean_staleness."""


class Finished(Message):
    """The learner saved its last checkpoint and exits."""

    checkpoint: str


class Stop(Message):
    """Finish cleanly: a worker aborts and exits, a learner saves a checkpoint, answers `Finished` and exits."""

    reason: str
    save: bool = True


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
