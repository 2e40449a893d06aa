"""Every message between processes, once. Additive changes only within a protocol version.

Directions: worker -> engine `Hello, Encoded, SampleDone, SampleFailed, Staged, Applied, Heartbeat`;
engine -> worker `Welcome, Encode, Generate, Abort, StageWeights, ApplyWeights, Stop`;
learner -> engine `Hello, Resumed, Credit, WeightsReady, StepDone, Heartbeat, Finished`;
engine -> learner `Welcome, TrainGroup, WeightsPublished, Stop`. `Ack`, `Closed` and `Refused` belong to the
transport. Arrays are numpy, int32 for token ids and float32 for logprobs (nats).
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 1

Int32s: TypeAlias = NDArray[np.int32]
Float32s: TypeAlias = NDArray[np.float32]

NO_FLOATS: Float32s = np.empty(0, dtype=np.float32)
"""What an optional array is where it says nothing; such a field is not sent."""


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
    """Phase two: pause, let the staged weights draw as `policy_version`, resume, canary; answer `Applied`."""

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
    """From asking generation to stop, the step under way included, until it goes on."""
    load_s: float = 0.0
    """What replacing the weights took of it."""
    update_s: float = 0.0
    """From the request to the passed canary."""
    canary_max_nats: float = 0.0


class WeightsPublished(Message):
    """Every live worker runs `policy_version`; the learner may reuse older segments."""

    policy_version: int


class Credit(Message):
    """The learner takes this many more groups."""

    groups: int


class TrainSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kept sample of T response tokens.

    The two arrays at the end hold one value a token, or are empty. The engine leaves them empty: every token of a
    single-turn text response was drawn by the policy and shares its response's advantage. They are for senders whose
    responses also hold tokens that nobody drew (a tool's output), or whose credit differs from token to token.
    """

    index: int
    """Launch index in its arm."""
    token_ids: Int32s
    logprobs: Float32s
    spans: list[Span]
    reward: float
    advantage: float
    """Of every token, where `token_advantages` is empty; else not used."""
    token_advantages: Float32s = NO_FLOATS
    """[T], finite; empty = `advantage` for every token."""
    token_weights: Float32s = NO_FLOATS
    """[T], finite and >= 0: factor of each token's loss, which the step's divisor counts too; 0 = masked: later tokens
    see it, but it has no loss, no place in the divisor and none in the metrics. Empty = 1 for every token."""


class Position(msgspec.Struct, frozen=True):
    """Where the visit order of prompts stands (turns are numbered 0, 1, 2, ... over all epochs).

    Settled turns, whose prompts are not sampled again after a resume: those below `next_turn` but for `open_turns`, and
    `done_turns` above it. A turn is settled when its group was trained or dropped, or its visit ended without a group.
    """

    next_turn: int = 0
    open_turns: list[int] = []
    """Below `next_turn` and not settled: arms that were open, groups that waited."""
    done_turns: list[int] = []
    """From `next_turn` on, and settled."""
    num_arms: int = 0
    """Arms numbered so far."""
    order: str = ""
    """Hash of what the order depends on: seed and prompt ids; empty = unknown."""


class Resumed(Message):
    """The learner goes on from a checkpoint; before its first `WeightsReady`, only when it was asked to resume."""

    checkpoint: str
    """Its folder; empty = none was found, the run starts anew."""
    policy_version: int = 0
    last_group_id: int = -1
    """Newest group that was trained, or dropped at the gradient."""
    position: Position = Position()


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
    turn: int = -1
    """Of its prompt in the visit order; -1 = unknown."""
    position: Position | None = None
    """Of the run, once this group and those shipped before it are trained; on the last group of a step."""


class StepDone(Message):
    """An optimizer step was taken: the learner's version is now `policy_version`."""

    policy_version: int
    group_ids: list[int]
    dropped_group_ids: list[int]
    """Groups that would have broken the bound at the gradient (counted, never trained)."""
    metrics: dict[str, float]
    """loss, entropy, kl_behaviour (k1) and kl_behaviour_k3, kl_reference, clip_share, mask_share, grad_norm, lr,
    ratio_max, tokens_trained (response tokens, without masked ones), tokens_packed (prompt and response tokens
    computed), step_s (compute), wait_s, max_staleness, mean_staleness; by staleness `lag/0/...`, `lag/1/`, `lag/2/`,
    `lag/3-4/` and `lag/5+/` with tokens and, where there are any, ratio_p01, ratio_p50, ratio_p99, clip_share,
    ess_share, kl_k1, kl_k3; of the tokens at staleness 0 mismatch_nats (mean |log ratio|) and mismatch_share (ratio
    outside 0.9 to 1.1), both before the update's first optimizer step; skipped (mini-batches without an optimizer step)
    and not_finite (those of them whose gradient was not). A step that trained nothing has no means."""


class Finished(Message):
    """The learner saved its last checkpoint and exits."""

    checkpoint: str


class Stop(Message):
    """Finish cleanly: a worker aborts and exits, a learner saves a checkpoint, answers `Finished` and exits."""

    reason: str
    save: bool = True
