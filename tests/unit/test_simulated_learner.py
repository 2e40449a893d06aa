"""The simulated learner over the in-memory transport and a virtual clock, its engine played by the test."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from configs import Config
from configs.processes import Simulated
from configs.training import Learner
from engine.core.errors import DeadlineError, RunError
from engine.transport.base import PeerGone, PeerJoined, Received
from engine.transport.memory import MemoryHub, MemoryLink
from engine.wire import (
    PROTOCOL_VERSION,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Span,
    StepDone,
    Stop,
    TrainGroup,
    TrainSample,
    WeightsPublished,
    WeightsReady,
)
from learner.resume import CheckpointFolder
from learner.simulated import new_stream
from tests.support.virtual_loop import run

STEP_S = 7.0
CONFIG = Config(
    learner=Learner(kind="simulated", groups_per_step=2, idle_deadline_s=50.0), simulated=Simulated(step_s=STEP_S)
)
DOCUMENTED = {
    "loss", "entropy", "kl_behaviour", "clip_share", "grad_norm", "lr", "ratio_max", "tokens_trained",
    "tokens_packed", "step_s", "wait_s", "max_staleness", "mean_staleness",
}  # fmt: skip


def group(group_id: int, oldest: int, max_staleness: int = 1, train_version: int | None = None) -> TrainGroup:
    """Trained at the version of its tokens unless something else is said."""
    samples = [
        TrainSample(
            index=index,
            token_ids=np.arange(5, dtype=np.int32),
            logprobs=np.zeros(5, dtype=np.float32),
            spans=[Span(oldest, 0, 5)],
            reward=float(index),
            advantage=index - 0.5,
        )
        for index in range(2)
    ]
    return TrainGroup(
        group_id=group_id,
        prompt_id="p",
        prompt_token_ids=np.arange(3, dtype=np.int32),
        samples=samples,
        train_version=oldest if train_version is None else train_version,
        max_staleness=max_staleness,
    )


class Engine:
    """The other end."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub

    async def next(self) -> Message:
        """The learner's next message that is no heartbeat."""
        while True:
            match await self.hub.receive():
                case Received(message=message) if not isinstance(message, Heartbeat):
                    return message
                case PeerGone(reason=reason):
                    pytest.fail(f"the learner went away: {reason}")
                case PeerJoined() | Received():
                    continue

    async def send(self, message: Message) -> None:
        await self.hub.send("learner", message)


def converse(script, folder: Path) -> None:
    """Run `script(engine)` beside a learner, and let both end."""

    async def both() -> None:
        hub = await MemoryHub.bind()
        hello = Hello(protocol=PROTOCOL_VERSION, role="learner", name="learner", life="a", pid=1)
        link = await MemoryLink.connect(hub, hello)
        async with asyncio.timeout(1000.0), asyncio.TaskGroup() as tasks:
            learner = tasks.create_task(new_stream(link, CONFIG, CheckpointFolder(folder)).run())
            await script(Engine(hub))
            await learner
        await link.close()
        await hub.close()

    run(both())


async def publish(engine: Engine, version: int) -> None:
    ready = await engine.next()
    assert isinstance(ready, WeightsReady)
    assert (ready.manifest.policy_version, ready.manifest.mover, ready.manifest.tensors) == (version, "none", [])
    await engine.send(WeightsPublished(policy_version=version))


async def stop(engine: Engine) -> None:
    await engine.send(Stop(reason="enough"))
    while not isinstance(message := await engine.next(), Finished):
        continue
    assert Path(message.checkpoint).name.startswith("step-")


def test_a_step_takes_its_groups_and_its_time(tmp_path):
    async def script(engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        await publish(engine, 0)
        for version in (1, 2):
            assert await engine.next() == Credit(groups=2)
            began_at = loop.time()
            for group_id in (10 * version, 10 * version + 1):
                await engine.send(group(group_id, oldest=version - 1))
            done = await engine.next()
            assert isinstance(done, StepDone)
            assert (done.policy_version, done.group_ids, done.dropped_group_ids) == (
                version, [10 * version, 10 * version + 1], [],
            )  # fmt: skip
            assert loop.time() - began_at == pytest.approx(STEP_S, abs=0.1)
            assert set(done.metrics) == DOCUMENTED
            assert done.metrics["step_s"] == pytest.approx(STEP_S)
            assert done.metrics["tokens_trained"] == 20.0
            assert done.metrics["tokens_packed"] == 32.0
            await publish(engine, version)
        await stop(engine)

    converse(script, tmp_path)


def test_a_group_over_its_bound_at_the_gradient_is_dropped_and_leaves_its_place_empty(tmp_path):
    async def script(engine: Engine) -> None:
        await publish(engine, 0)
        assert await engine.next() == Credit(groups=2)
        await engine.send(group(1, oldest=0))
        await engine.send(group(2, oldest=0))
        assert isinstance(await engine.next(), StepDone)
        await publish(engine, 1)
        assert await engine.next() == Credit(groups=2)
        await engine.send(group(3, oldest=0, max_staleness=0, train_version=1))
        await engine.send(group(4, oldest=0, max_staleness=1, train_version=1))
        done = await engine.next()
        assert isinstance(done, StepDone)
        assert (done.group_ids, done.dropped_group_ids) == ([4], [3])
        assert done.metrics["max_staleness"] == 1.0
        assert done.metrics["mean_staleness"] == pytest.approx(1.0)
        await publish(engine, 2)
        await stop(engine)

    converse(script, tmp_path)


def test_a_group_with_tokens_of_unknown_age_ends_the_learner(tmp_path):
    async def script(engine: Engine) -> None:
        await publish(engine, 0)
        assert await engine.next() == Credit(groups=2)
        unknown = group(1, oldest=0)
        unknown.samples[1].spans[:] = [Span(0, 0, 4)]
        await engine.send(unknown)

    with pytest.raises(ExceptionGroup) as caught:
        converse(script, tmp_path)
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert "group 1 (prompt p), sample 1: version spans must cover its 5 tokens" in str(error)


def test_a_stop_before_anything_was_published_is_answered(tmp_path):
    converse(stop, tmp_path)


def test_a_silent_engine_ends_the_learner_with_the_name_of_the_wait(tmp_path):
    async def script(engine: Engine) -> None:
        await publish(engine, 0)

    with pytest.raises(ExceptionGroup) as caught:
        converse(script, tmp_path)
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlineError)
    assert "waited 50 s for groups of step 1" in str(error)
