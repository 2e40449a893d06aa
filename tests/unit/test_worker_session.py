"""The worker's session: what it answers, in which order, and what it never sends."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.core.errors import PeerLost, RunError, WeightUpdateError
from engine.wire import (
    Abort,
    Applied,
    ApplyWeights,
    Encode,
    Encoded,
    Generate,
    Heartbeat,
    Int32s,
    Manifest,
    Message,
    SampleDone,
    SampleFailed,
    SampleKey,
    SamplingParams,
    Span,
    Staged,
    StageWeights,
    Stop,
)
from workers.generation import Load, Session

DEADLINE_S = 5.0
MANIFEST = Manifest(policy_version=1, mover="none", location="", num_bytes=0, tensors=[], canaries=[])


@dataclass
class FakeLink:
    """The engine's end of a link, in the test's hands."""

    to_worker: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)
    from_worker: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    async def receive(self) -> Message:
        message = await self.to_worker.get()
        if message is None:
            raise PeerLost("the engine is gone")
        return message

    async def send(self, message: Message, deadline_s: float = 30.0) -> None:
        if not isinstance(message, Heartbeat):
            self.from_worker.put_nowait(message)

    async def close(self) -> None: ...


@dataclass
class ScriptedBackend:
    """Answers when the test says so."""

    pending: dict[SampleKey, asyncio.Future[SampleDone]] = field(default_factory=dict)
    unknown_aborts: list[SampleKey] = field(default_factory=list)
    stage_error: str = ""
    apply_error: str = ""
    canary_nats: asyncio.Queue[float] = field(default_factory=asyncio.Queue)

    async def encode(self, prompts: list[str], chat_template: bool) -> list[Int32s]:
        return [np.arange(len(prompt) + chat_template, dtype=np.int32) for prompt in prompts]

    async def generate(self, request: Generate) -> SampleDone:
        if request.params.max_tokens == 0:
            raise ValueError("max_tokens must be above 0")
        future = self.pending[request.key] = asyncio.get_running_loop().create_future()
        return await future

    async def abort(self, keys: list[SampleKey]) -> None:
        for key in keys:
            if key in self.pending:
                self.pending[key].set_result(sample(key, 0, reason="abort"))
            else:
                self.unknown_aborts.append(key)

    async def stage(self, manifest: Manifest) -> None:
        if self.stage_error:
            raise WeightUpdateError(self.stage_error)

    async def apply(self, manifest: Manifest, load: bool) -> Load:
        if self.apply_error:
            raise WeightUpdateError(self.apply_error)
        return Load(pause_s=0.25, load_s=0.125, canary_max_nats=await self.canary_nats.get())


@dataclass
class Talk:
    """A running session with both of its ends."""

    link: FakeLink
    backend: ScriptedBackend
    session: Session
    ended: asyncio.Task[str]

    def tell(self, *messages: Message) -> None:
        for message in messages:
            self.link.to_worker.put_nowait(message)

    async def hear(self) -> Message:
        async with asyncio.timeout(DEADLINE_S):
            return await self.link.from_worker.get()

    async def settle(self) -> None:
        """Let everything that can run do so."""
        for _ in range(20):
            await asyncio.sleep(0)

    def finish(self, index: int, version: int) -> None:
        self.backend.pending[key(index)].set_result(sample(key(index), version))


def key(index: int) -> SampleKey:
    return SampleKey(0, index)


def generate(index: int, max_tokens: int = 4) -> Generate:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, top_p=1.0, seed=index)
    return Generate(key=key(index), prompt_token_ids=np.zeros(3, np.int32), params=params)


def sample(which: SampleKey, version: int, reason: str = "stop") -> SampleDone:
    return SampleDone(
        key=which, token_ids=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32), spans=[Span(version, 0, 2)],
        text="", finish_reason=reason, generation_s=0.0,
    )  # fmt: skip


def converse(play: Callable[[Talk], Coroutine[None, None, None]], link: FakeLink | None = None) -> str:
    """Run a session, play the engine, stop it; returns why it ended."""

    async def run() -> str:
        wire, backend = link or FakeLink(), ScriptedBackend()
        session = Session(wire, backend)
        talk = Talk(wire, backend, session, asyncio.ensure_future(session.run()))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await play(talk)
                talk.tell(Stop(reason="the test is over"))
                return await talk.ended
        finally:
            talk.ended.cancel()
            await asyncio.wait([talk.ended])

    return asyncio.run(run())


def test_a_sample_is_sent_when_it_is_done() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1), generate(2))
        await talk.settle()
        talk.finish(2, version=0)
        answer = await talk.hear()
        assert isinstance(answer, SampleDone)
        assert answer.key == key(2)
        talk.finish(1, version=0)
        assert (await talk.hear()).key == key(1)  # type: ignore[attr-defined]

    assert converse(play) == "the test is over"


def test_a_request_that_fails_is_answered_and_the_others_go_on() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1), generate(2, max_tokens=0))
        failed = await talk.hear()
        assert isinstance(failed, SampleFailed)
        assert failed.key == key(2)
        assert "max_tokens must be above 0" in failed.error
        talk.finish(1, version=0)
        assert isinstance(await talk.hear(), SampleDone)

    converse(play)


def test_an_abort_finds_the_request_that_came_just_before_it() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1), Abort(keys=[key(1)]))
        answer = await talk.hear()
        assert isinstance(answer, SampleDone)
        assert answer.finish_reason == "abort"
        assert talk.backend.unknown_aborts == []

    converse(play)


def test_prompts_are_encoded_in_their_order() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(Encode(request=7, prompts=["a", "abc"], chat_template=True))
        answer = await talk.hear()
        assert isinstance(answer, Encoded)
        assert answer.request == 7
        assert [len(ids) for ids in answer.token_ids] == [2, 4]

    converse(play)


def test_stop_aborts_what_runs_and_sends_its_tokens() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1))
        await talk.settle()
        talk.tell(Stop(reason="enough"))
        assert await talk.ended == "enough"
        answer = await talk.hear()
        assert isinstance(answer, SampleDone)
        assert answer.finish_reason == "abort"

    converse(play)


async def stage_and_load(talk: Talk, limit: float = 0.5) -> None:
    talk.tell(StageWeights(manifest=MANIFEST))
    staged = await talk.hear()
    assert isinstance(staged, Staged)
    assert staged.error == ""
    talk.tell(ApplyWeights(policy_version=1, canary_limit_nats=limit))
    await talk.settle()


def test_samples_of_new_weights_wait_for_the_canary_and_follow_the_answer() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1), generate(2))
        await stage_and_load(talk)
        talk.finish(1, version=1)
        talk.finish(2, version=0)
        answer = await talk.hear()
        assert isinstance(answer, SampleDone)
        assert answer.key == key(2)
        await talk.settle()
        assert talk.link.from_worker.empty()
        talk.backend.canary_nats.put_nowait(0.1)
        applied = await talk.hear()
        assert isinstance(applied, Applied)
        assert (applied.error, applied.pause_s, applied.load_s, applied.canary_max_nats) == ("", 0.25, 0.125, 0.1)
        held = await talk.hear()
        assert isinstance(held, SampleDone)
        assert held.key == key(1)

    converse(play)


@pytest.mark.parametrize("nats", [0.6, math.nan, math.inf])
def test_samples_of_weights_that_failed_the_canary_are_never_sent(nats: float) -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1), generate(2))
        await stage_and_load(talk)
        talk.finish(1, version=1)
        await talk.settle()
        talk.backend.canary_nats.put_nowait(nats)
        applied = await talk.hear()
        assert isinstance(applied, Applied)
        assert "within 0.5 nats" in applied.error
        talk.finish(2, version=1)
        for _ in range(2):
            failed = await talk.hear()
            assert isinstance(failed, SampleFailed)
            assert failed.tokens_lost == 2

    converse(play)


def test_weights_that_do_not_load_are_reported() -> None:
    async def play(talk: Talk) -> None:
        talk.backend.apply_error = "half-way"
        await stage_and_load(talk)
        applied = await talk.hear()
        assert isinstance(applied, Applied)
        assert applied.error == "half-way"

    converse(play)


def test_weights_that_were_refused_cannot_be_applied() -> None:
    async def play(talk: Talk) -> None:
        talk.backend.stage_error = "nan in lm_head.weight"
        talk.tell(StageWeights(manifest=MANIFEST), ApplyWeights(policy_version=1))
        staged, applied = await talk.hear(), await talk.hear()
        assert isinstance(staged, Staged)
        assert staged.error == "nan in lm_head.weight"
        assert isinstance(applied, Applied)
        assert "must be staged first" in applied.error

    converse(play)


def test_a_session_ends_with_the_engine() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1))
        talk.link.to_worker.put_nowait(None)
        await talk.ended

    with pytest.raises(PeerLost, match="the engine is gone"):
        converse(play)


def test_a_session_ends_with_its_backend() -> None:
    async def play(talk: Talk) -> None:
        talk.tell(generate(1), generate(2))
        await talk.settle()
        talk.backend.pending[key(1)].set_exception(RunError("out of memory"))
        await talk.ended

    with pytest.raises(RunError, match="out of memory"):
        converse(play)
