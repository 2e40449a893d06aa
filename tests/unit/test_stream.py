"""The learner's stream over the in-memory transport, with a trainer that only records what it is asked."""

import asyncio

import numpy as np
import pytest

from engine.core.errors import DeadlineError, PeerLost, RunError
from engine.transport.base import PeerJoined, Received
from engine.transport.memory import MemoryHub, MemoryLink
from engine.wire import (
    PROTOCOL_VERSION,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Manifest,
    Milestone,
    Position,
    Resumed,
    Span,
    StepDone,
    Stop,
    TrainGroup,
    TrainSample,
    WeightsPublished,
    WeightsReady,
)
from learner.milestone import Loaded
from learner.stream import LearnerStream, StreamSettings

HELLO = Hello(protocol=PROTOCOL_VERSION, role="learner", name="learner", life="a", pid=1)


class RecordingTrainer:
    def __init__(self, loaded=None):
        self.loaded = loaded
        self.done = []
        self.trained_at = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.accumulated = asyncio.Queue()

    async def open(self):
        self.done.append("open")
        return self.loaded

    async def accumulate(self, groups):
        await self.gate.wait()
        self.trained_at |= {group.group_id: group.train_version for group in groups}
        self.done.append([group.group_id for group in groups])
        self.accumulated.put_nowait(self.done[-1])

    async def step(self):
        self.done.append("step")
        return {"loss": 0.5}

    async def lay_out(self, policy_version):
        self.done.append(f"lay out {policy_version}")
        return Manifest(policy_version, "none", "", 0, [], [])

    async def save(self, milestone):
        self.saved = milestone
        self.done.append(f"save {milestone.policy_version}")
        return f"step-{milestone.policy_version}"


class Engine:
    """The other end, played by the test."""

    def __init__(self, hub):
        self.hub = hub

    async def next(self, kind):
        """The next message of the learner that is no heartbeat; it must be a `kind`."""
        async with asyncio.timeout(5):
            while True:
                event = await self.hub.receive()
                if isinstance(event, PeerJoined) or (
                    isinstance(event, Received) and isinstance(event.message, Heartbeat)
                ):
                    continue
                assert isinstance(event, Received), event
                assert isinstance(event.message, kind), event.message
                return event.message

    async def send(self, message):
        await self.hub.send("learner", message)


def group(group_id, version=0, max_staleness=2, train_version=None):
    """A group of tokens of `version`, trained at that one unless something else is said."""
    tokens = np.arange(3, dtype=np.int32)
    sample = TrainSample(0, tokens, -np.ones(3, np.float32), [Span(version, 0, 3)], 1.0, 0.5)
    return TrainGroup(
        group_id=group_id, prompt_id="p", prompt_token_ids=tokens, samples=[sample],
        train_version=version if train_version is None else train_version, max_staleness=max_staleness,
    )  # fmt: skip


class Play:
    """A running stream and the engine's end of it."""

    def __init__(self, settings, loaded=None):
        self.settings = settings
        self.trainer = RecordingTrainer(loaded)

    async def __aenter__(self):
        self.hub = await MemoryHub.bind()
        self.link = await MemoryLink.connect(self.hub, HELLO)
        self.engine = Engine(self.hub)
        self.stream = LearnerStream(self.link, self.trainer, self.settings)
        self.run = asyncio.create_task(self.stream.run())
        return self

    async def start(self):
        assert (await self.engine.next(WeightsReady)).manifest.policy_version == 0
        await self.engine.send(WeightsPublished(policy_version=0))
        return await self.engine.next(Credit)

    async def __aexit__(self, *_):
        if not self.run.done():
            self.run.cancel()
        await asyncio.wait([self.run])
        await self.link.close()
        await self.hub.close()


def settings(groups_per_step=2, idle_deadline_s=5.0, save_every_steps=0):
    return StreamSettings(groups_per_step, idle_deadline_s, save_every_steps)


async def test_no_group_is_asked_for_before_the_initial_weights_are_published():
    async with Play(settings()) as play:
        await play.engine.next(WeightsReady)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await play.engine.next(Credit)
        await play.engine.send(WeightsPublished(policy_version=0))
        assert (await play.engine.next(Credit)).groups == 2


async def test_a_full_step_is_taken_reported_and_published_in_this_order():
    async with Play(settings()) as play:
        await play.start()
        for group_id in (7, 8):
            await play.engine.send(group(group_id))
        done = await play.engine.next(StepDone)
        ready = await play.engine.next(WeightsReady)
        credit = await play.engine.next(Credit)
    assert (done.policy_version, done.group_ids, done.dropped_group_ids) == (1, [7, 8], [])
    assert done.metrics["loss"] == 0.5
    assert {"step_s", "wait_s", "max_staleness", "mean_staleness"} <= done.metrics.keys()
    assert ready.manifest.policy_version == 1
    assert credit.groups == 2


async def test_gradients_are_computed_while_the_step_still_fills():
    async with Play(settings(groups_per_step=8)) as play:
        await play.start()
        for group_id in range(3):
            await play.engine.send(group(group_id))
        async with asyncio.timeout(5):
            assert await play.trainer.accumulated.get() in ([0, 1], [0, 1, 2])


async def test_a_group_over_the_bound_at_the_gradient_is_dropped_and_named_and_leaves_its_place_empty():
    async with Play(settings()) as play:
        await play.start()
        for group_id in (0, 1):
            await play.engine.send(group(group_id))
        await play.engine.next(StepDone)
        await play.engine.next(WeightsReady)
        await play.engine.next(Credit)
        await play.engine.send(group(2, version=0, max_staleness=0, train_version=1))
        await play.engine.send(group(3, version=0, max_staleness=1, train_version=1))
        done = await play.engine.next(StepDone)
    assert (done.group_ids, done.dropped_group_ids) == ([3], [2])
    assert (done.metrics["max_staleness"], done.metrics["mean_staleness"]) == (1.0, 1.0)
    assert play.trainer.trained_at == {0: 0, 1: 0, 3: 1}


async def test_a_step_whose_groups_were_all_dropped_is_taken_and_published():
    async with Play(settings()) as play:
        await play.start()
        for group_id in (0, 1):
            await play.engine.send(group(group_id, max_staleness=-1))
        done = await play.engine.next(StepDone)
        assert (done.policy_version, done.group_ids, done.dropped_group_ids) == (1, [], [0, 1])
        assert (await play.engine.next(WeightsReady)).manifest.policy_version == 1
    assert play.trainer.trained_at == {}


@pytest.mark.parametrize("train_version", [0, 2])
async def test_a_group_for_another_version_than_the_learners_ends_the_run(train_version):
    async with Play(settings(groups_per_step=1), Loaded("step-1", Milestone(1, 3, Position()))) as play:
        await play.engine.next(Resumed)
        await play.engine.next(WeightsReady)
        await play.engine.send(WeightsPublished(policy_version=1))
        await play.engine.next(Credit)
        await play.engine.send(group(7, train_version=train_version))
        with pytest.raises(RunError, match=rf"group 7 must be for .* version 1, .* is for version {train_version}"):
            await play.run
    assert play.trainer.trained_at == {}


async def test_a_drop_excuses_no_group_of_another_version():
    async with Play(settings()) as play:
        await play.start()
        await play.engine.send(group(0, max_staleness=-1))
        await play.engine.send(group(1, train_version=1))
        with pytest.raises(RunError, match=r"group 1 must be for .* version 0, .* is for version 1"):
            await play.run


async def test_the_next_version_is_laid_out_only_after_the_last_one_is_published():
    async with Play(settings(groups_per_step=1)) as play:
        await play.start()
        await play.engine.send(group(0))
        await play.engine.next(StepDone)
        await play.engine.next(WeightsReady)
        await play.engine.next(Credit)
        await play.engine.send(group(1, version=1))
        assert (await play.engine.next(StepDone)).policy_version == 2
        assert "lay out 2" not in play.trainer.done
        await play.engine.send(WeightsPublished(policy_version=1))
        assert (await play.engine.next(WeightsReady)).manifest.policy_version == 2
        await play.engine.next(Credit)


async def test_without_overlap_the_next_step_waits_for_the_publication():
    async with Play(StreamSettings(1, 5.0, overlaps_updates=False)) as play:
        await play.start()
        await play.engine.send(group(0))
        await play.engine.next(StepDone)
        assert (await play.engine.next(WeightsReady)).manifest.policy_version == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await play.engine.next(Credit)
        await play.engine.send(WeightsPublished(policy_version=1))
        assert (await play.engine.next(Credit)).groups == 1


async def test_stop_while_waiting_for_groups_saves_and_finishes():
    async with Play(settings()) as play:
        await play.start()
        await play.engine.send(group(0))
        await play.engine.send(Stop(reason="enough"))
        assert (await play.engine.next(Finished)).checkpoint == "step-0"
        assert await play.run == "step-0"
    assert "step" not in play.trainer.done


async def test_stop_during_a_gradient_finishes_after_it_without_taking_the_step():
    async with Play(settings()) as play:
        await play.start()
        play.trainer.gate.clear()
        await play.engine.send(group(0))
        await play.engine.send(Stop(reason="enough", save=False))
        play.trainer.gate.set()
        assert (await play.engine.next(Finished)).checkpoint == ""
        assert await play.run == ""


async def test_stop_before_the_first_publication_is_obeyed():
    async with Play(settings()) as play:
        await play.engine.next(WeightsReady)
        await play.engine.send(Stop(reason="failed elsewhere", save=False))
        await play.engine.next(Finished)


async def test_a_wait_past_its_deadline_names_what_did_not_come():
    async with Play(settings(idle_deadline_s=0.05)) as play:
        await play.start()
        with pytest.raises(DeadlineError, match=r"groups of step 1 \(0 of 2 came\)"):
            await play.run


async def test_a_lost_engine_ends_the_learner():
    async with Play(settings()) as play:
        await play.start()
        await play.hub.close()
        with pytest.raises(PeerLost):
            await play.run


async def test_a_checkpoint_is_saved_every_so_many_steps():
    async with Play(settings(groups_per_step=1, save_every_steps=2)) as play:
        await play.start()
        for number in range(2):
            await play.engine.send(group(number, version=number))
            await play.engine.next(StepDone)
            await play.engine.next(WeightsReady)
            await play.engine.send(WeightsPublished(policy_version=number + 1))
            await play.engine.next(Credit)
    assert [entry for entry in play.trainer.done if str(entry).startswith("save")] == ["save 2"]


async def test_a_checkpoint_that_is_there_is_not_written_again_at_the_end():
    async with Play(settings(groups_per_step=1, save_every_steps=1)) as play:
        await play.start()
        await play.engine.send(group(0))
        await play.engine.next(StepDone)
        await play.engine.next(WeightsReady)
        await play.engine.next(Credit)
        await play.engine.send(Stop(reason="over"))
        assert (await play.engine.next(Finished)).checkpoint == "step-1"
    assert [entry for entry in play.trainer.done if str(entry).startswith("save")] == ["save 1"]


def empty_group(group_id, version=0):
    return TrainGroup(
        group_id=group_id, prompt_id="p", prompt_token_ids=np.arange(3, dtype=np.int32), samples=[],
        train_version=version, max_staleness=0,
    )  # fmt: skip


async def test_a_group_without_samples_takes_its_place_in_the_step():
    async with Play(settings()) as play:
        await play.start()
        await play.engine.send(empty_group(0))
        await play.engine.send(group(1))
        done = await play.engine.next(StepDone)
    assert (done.group_ids, done.dropped_group_ids) == ([0, 1], [])
    assert (done.metrics["max_staleness"], done.metrics["mean_staleness"]) == (0.0, 0.0)


async def test_a_step_of_groups_without_samples_is_taken_and_published_at_any_age():
    async with Play(settings()) as play:
        await play.start()
        for version in (1, 2):
            for group_id in (2 * version, 2 * version + 1):
                await play.engine.send(empty_group(group_id, version - 1))
            done = await play.engine.next(StepDone)
            assert (done.policy_version, len(done.group_ids), done.dropped_group_ids) == (version, 2, [])
            assert (await play.engine.next(WeightsReady)).manifest.policy_version == version
            await play.engine.send(WeightsPublished(policy_version=version))
            assert (await play.engine.next(Credit)).groups == 2


async def test_a_resumed_learner_is_at_the_checkpoints_version_from_its_first_message_on():
    position = Position(10, [4], [], 6, "ab")
    async with Play(settings(), Loaded("step-7", Milestone(7, 13, position))) as play:
        engine = play.engine
        resumed = await engine.next(Resumed)
        assert resumed == Resumed(checkpoint="step-7", policy_version=7, last_group_id=13, position=position)
        assert (await engine.next(WeightsReady)).manifest.policy_version == 7
        await engine.send(WeightsPublished(policy_version=7))
        assert (await engine.next(Credit)).groups == 2
        await engine.send(group(14, version=7))
        await engine.send(group(15, version=5, max_staleness=2, train_version=7))
        done = await engine.next(StepDone)
        assert (done.policy_version, done.group_ids, done.metrics["max_staleness"]) == (8, [14, 15], 2.0)
        assert (await engine.next(WeightsReady)).manifest.policy_version == 8


async def test_a_checkpoint_counts_the_groups_of_finished_steps_only_and_dropped_ones_too():
    async with Play(settings(groups_per_step=3)) as play:
        await play.start()
        for group_id, turn, max_staleness in ((1, 30, -1), (2, 31, 2), (3, 32, 2)):
            message = group(group_id, max_staleness=max_staleness)
            message.turn = turn
            await play.engine.send(message)
        done = await play.engine.next(StepDone)
        assert (done.group_ids, done.dropped_group_ids) == ([2, 3], [1])
        await play.engine.next(WeightsReady)
        await play.engine.send(WeightsPublished(policy_version=1))
        await play.engine.next(Credit)
        await play.engine.send(group(4, version=1))
        while await play.trainer.accumulated.get() != [4]:
            pass
        await play.engine.send(Stop(reason="over"))
        await play.engine.next(Finished)
    assert play.trainer.saved == Milestone(1, 3, Position(0, [], [30, 31, 32]))
