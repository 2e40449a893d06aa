"""The async shell around the dispatcher: requests out, samples and verdicts in, groups to the learner.

Consumes: samples, failures, lost workers, credits, steps, published versions (methods `on_...`, called by the
coordinator's one reader). Waits for: `_changed`, set by every one of them. Produces: `Generate`, `Abort`, `TrainGroup`.
Ends when `stop()` was called.

Bounds: requests under way <= slots of the live workers; launching pauses while as many samples as slots wait for their
verdict (a slow verifier slows generation, it never piles up samples); groups shipped <= credits; groups waiting <=
`Bound.max_waiting` and what the open arms still seal.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.root import Config
from engine.core.arm import Arm, Sample
from engine.core.decisions import Launch, Retirement
from engine.core.dispatcher import Dispatcher
from engine.core.errors import PeerLost
from engine.core.group import Group
from engine.core.overlong import overlong_penalty
from engine.core.whitening import Whitening
from engine.core.width import Pace
from engine.fleet import Fleet
from engine.prompt_feed import PromptFeed
from engine.run_folder import RunFolder
from engine.settlement import Settlement
from engine.shipping import token_ids, train_group
from engine.tally import Tally
from engine.transport.base import Hub
from engine.verifiers import Grader
from engine.wire import (
    Abort,
    Generate,
    Position,
    SampleDone,
    SampleFailed,
    SampleKey,
    SamplingParams,
    StepDone,
    Verdict,
)
from metrics.recorder import Recorder

_SMOOTHING = 0.9
"""Weight of the past in moving means of latency and version interval."""


@dataclass(slots=True)
class Ports:
    """What the scheduler talks to."""

    hub: Hub
    fleet: Fleet
    feed: PromptFeed
    grader: Grader
    recorder: Recorder
    folder: RunFolder
    tasks: asyncio.TaskGroup


@dataclass(slots=True)
class Scheduler:
    """Keeps every slot busy with the sample that is needed most."""

    config: Config
    ports: Ports
    dispatcher: Dispatcher
    tally: Tally
    learner: str = "learner"
    on_step: Callable[[StepDone, float | None], None] = lambda _step, _reward: None
    on_change: Callable[[], None] = lambda: None
    credit: int = 0
    books: Settlement = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False
    _launched_at: dict[SampleKey, float] = field(default_factory=dict[SampleKey, float])
    _num_scoring: int = 0
    _scoring_tokens: int = 0
    _published_at: float = 0.0
    _whitening: Whitening | None = None
    """Of the step that began to ship last."""

    def __post_init__(self) -> None:
        """Open the books."""
        self.books = Settlement(self.tally, self.ports.recorder)

    def wake(self) -> None:
        """Something changed that may allow a launch or a shipment."""
        self._changed.set()
        self.on_change()

    async def run(self) -> None:
        """Launch and ship until stopped."""
        while not self._stopped:
            # Unblocked by wake(): any event, or stop(). The coordinator owns the deadline on progress.
            await self._changed.wait()
            self._changed.clear()
            await self._ship()
            await self._launch()
            self._show()

    async def stop(self) -> None:
        """Launch nothing more and abort what is under way; samples that still come are counted as aborted."""
        self._stopped = True
        self.wake()
        keys = [key for key in self._launched_at if self.ports.fleet.where(key)]
        await self._abort(keys)

    @property
    def is_starved(self) -> bool:
        """Whether nothing is left to sample: every epoch is over and every arm retired."""
        return self.ports.feed.is_empty and not self.dispatcher.has_work

    @property
    def is_idle(self) -> bool:
        """Whether no request and no verdict is under way."""
        return not self._launched_at and not self._num_scoring

    @property
    def held_tokens(self) -> int:
        """Tokens whose fate is open: live arms, samples being scored, groups not trained yet."""
        arms = sum(_open_tokens(arm) for arm in self.dispatcher.arms.values())
        return arms + self.books.held_tokens + self._scoring_tokens

    # --- events -------------------------------------------------------------------------------------------------

    def on_sample(self, worker: str, message: SampleDone) -> None:
        """A worker answered a request of ours."""
        key = message.key
        num_tokens = len(message.token_ids)
        self.ports.fleet.release(key)
        launched_at = self._launched_at.pop(key, None)
        self.books.arrived(worker, num_tokens)
        self.dispatcher.outbox.spend(num_tokens)
        is_awaited = self.dispatcher.is_open(key.arm, key.index, key.retry) and launched_at is not None
        if self._stopped or message.finish_reason == "abort" or not is_awaited:
            self.books.aborted(num_tokens)
            if is_awaited and not self._stopped:
                self._failed(key)
        else:
            self._num_scoring += 1
            self._scoring_tokens += num_tokens
            self.ports.tasks.create_task(self._grade(message, launched_at or 0.0))
        self.wake()

    def on_sample_failed(self, worker: str, message: SampleFailed) -> None:
        """A worker could not answer: never a wrong answer."""
        self.ports.fleet.release(message.key)
        self._launched_at.pop(message.key, None)
        self.books.arrived(worker, message.tokens_lost)
        self.dispatcher.outbox.spend(message.tokens_lost)
        self.books.failed(message.tokens_lost)
        self._failed(message.key)
        self.wake()

    def on_lost(self, keys: list[SampleKey]) -> None:
        """Requests of a worker that is gone: asked for again in their launch slots, with the same seeds."""
        for key in keys:
            self._launched_at.pop(key, None)
            self._failed(key)
        self.wake()

    def on_credit(self, groups: int) -> None:
        """The learner takes so many more groups."""
        self.credit += groups
        self.wake()

    def on_published(self, version: int) -> None:
        """Every live worker samples from `version`."""
        now = asyncio.get_running_loop().time()
        is_newer = version > self.dispatcher.generation_version
        self.dispatcher.generation_version = version
        if self._published_at and is_newer:
            pace = self.dispatcher.pace
            self.dispatcher.pace = Pace(pace.latency_s, _mean(pace.version_s, now - self._published_at))
        self._published_at = now
        self.wake()

    def on_step_done(self, step: StepDone) -> None:
        """The learner took an optimizer step."""
        self.dispatcher.outbox.step_done(step.policy_version, len(step.group_ids) + len(step.dropped_group_ids))
        for group_id in step.group_ids:
            self.books.trained(group_id, step.policy_version - 1)
        for group_id in step.dropped_group_ids:
            self.books.dropped(group_id)
        reward = self.tally.step(asyncio.get_running_loop().time(), len(step.group_ids))
        self.ports.recorder.step(step.policy_version, step.metrics)
        self.tally.max_staleness = max(self.tally.max_staleness, int(step.metrics.get("max_staleness", 0)))
        self.tally.staleness_mean = step.metrics.get("mean_staleness", 0.0)
        self.tally.learner_busy_s += step.metrics.get("step_s", 0.0)
        self.tally.learner_tokens += int(step.metrics.get("tokens_packed", 0))
        self.on_step(step, reward)
        self.wake()

    # --- launching and shipping -----------------------------------------------------------------------------------

    async def _launch(self) -> None:
        fleet = self.ports.fleet
        while not self._stopped and fleet.num_free > 0 and self._num_scoring <= fleet.num_slots:
            launch = self.dispatcher.next_launch()
            if launch is not None:
                await self._generate(launch)
            elif not self._open_arm():
                return
            else:
                await asyncio.sleep(0)  # a strategy may give any number of prompts no budget: others get their turn

    def _open_arm(self) -> bool:
        """Let another arm ask for samples: one that was parked, else that of a new prompt."""
        dispatcher, feed = self.dispatcher, self.ports.feed
        if not dispatcher.may_launch:
            return False
        if dispatcher.resume(is_last=feed.is_empty):
            return True
        prompt = feed.take()
        if prompt is not None:
            dispatcher.admit(prompt)
            return True
        return feed.is_empty and dispatcher.close_window()

    async def _generate(self, launch: Launch) -> None:
        arm, sampling = launch.arm, self.config.sampling
        key = SampleKey(arm.arm_id, launch.index, launch.retry)
        worker = self.ports.fleet.assign(key)
        if worker is None:
            raise AssertionError("a launch was made without a free slot")
        self._launched_at[key] = asyncio.get_running_loop().time()
        self.tally.samples_launched += 1
        temperature = 0.0 if launch.is_greedy else sampling.temperature
        params = SamplingParams(sampling.max_tokens, temperature, sampling.top_p, launch.seed)
        message = Generate(key=key, prompt_token_ids=token_ids(arm), params=params)
        try:
            await self.ports.hub.send(worker, message)
        except PeerLost:
            # The worker's loss is an event of its own: it hands this key back.
            return

    async def _ship(self) -> None:
        while self.credit > 0 and self._wants_groups and (found := self.dispatcher.outbox.next_group()) is not None:
            if isinstance(found, Group):
                self.books.dropped(found.group_id)
                continue
            group, trained_at = found
            self.credit -= 1
            self._note_whitening(group, trained_at)
            self.books.shipped(group)
            bound, position = self.dispatcher.policy.bound, self._position_at_the_end_of_a_step()
            try:
                await self.ports.hub.send(self.learner, train_group(group, trained_at, bound.max_staleness, position))
            except PeerLost:
                # The learner's exit ends the run, with its cause.
                return

    def _note_whitening(self, group: Group, trained_at: int) -> None:
        """One event a step: what its advantages were whitened with."""
        whitening = group.whitening
        if whitening is not None and whitening is not self._whitening:
            self._whitening = whitening
            mean, std, num_samples = whitening.mean, whitening.std, whitening.num_samples
            self.ports.folder.event("whitened", version=trained_at, mean=mean, std=std, samples=num_samples)

    @property
    def _wants_groups(self) -> bool:
        """Whether the next group belongs to a step of this run: no group is shipped for a step after the last one."""
        dispatcher, last = self.dispatcher, self.config.run.max_steps
        next_step = dispatcher.policy.bound.trained_at(dispatcher.outbox.learner_version, dispatcher.outbox.num_shipped)
        return not self._stopped and (not last or next_step < last)

    def _position_at_the_end_of_a_step(self) -> Position | None:
        """For the last group of a step, which has just left: where a run stands that has trained it."""
        dispatcher = self.dispatcher
        if dispatcher.outbox.num_shipped % dispatcher.policy.bound.groups_per_step:
            return None
        return self.ports.feed.position(dispatcher.open_turns(), dispatcher.num_arms)

    async def _abort(self, keys: list[SampleKey]) -> None:
        by_worker: dict[str, list[SampleKey]] = {}
        for key in keys:
            worker = self.ports.fleet.where(key)
            if worker is not None:
                by_worker.setdefault(worker, []).append(key)
        for worker, theirs in by_worker.items():
            try:
                await self.ports.hub.send(worker, Abort(keys=theirs))
            except PeerLost:
                continue

    # --- scoring ----------------------------------------------------------------------------------------------------

    async def _grade(self, message: SampleDone, launched_at: float) -> None:
        key, num_tokens = message.key, len(message.token_ids)
        arm = self.dispatcher.arms.get(key.arm)
        verdict: Verdict = "crashed"
        if arm is not None:
            verdict = await self.ports.grader.grade(message.text, arm.prompt.answer)
        self._num_scoring -= 1
        self._scoring_tokens -= num_tokens
        if self._stopped or not self.dispatcher.is_open(key.arm, key.index, key.retry):
            self.books.aborted(num_tokens)
        elif verdict in ("timeout", "crashed"):
            self.books.failed(num_tokens)
            self._failed(key)
        else:
            await self._scored(message, verdict, launched_at)
        self.wake()

    async def _scored(self, message: SampleDone, verdict: Verdict, launched_at: float) -> None:
        pace = self.dispatcher.pace
        latency = asyncio.get_running_loop().time() - launched_at
        self.dispatcher.pace = Pace(_mean(pace.latency_s, latency), pace.version_s)
        is_right = verdict == "correct"
        version = min((span.version for span in message.spans), default=self.dispatcher.generation_version)
        num_tokens = len(message.token_ids)
        sample = Sample(message.key.index, self._reward(is_right, num_tokens), is_right, version, num_tokens, message)
        if sample.index == self.dispatcher.arms[message.key.arm].first_index:
            # The policy's pass rate: without what shaping takes off.
            self.tally.first_sample(float(is_right))
            self.ports.recorder.first_sample_reward(float(is_right))
        retirement = self.dispatcher.score(message.key.arm, sample)
        if retirement is not None:
            await self._retired(retirement)

    def _reward(self, is_right: bool, num_tokens: int) -> float:
        shaping = self.config.reward
        max_tokens = self.config.sampling.max_tokens
        penalty = overlong_penalty(num_tokens, max_tokens, shaping.overlong_tokens, shaping.overlong_factor)
        return float(is_right) + penalty

    def _failed(self, key: SampleKey) -> None:
        if self._stopped or not self.dispatcher.is_open(key.arm, key.index, key.retry):
            return
        self.tally.samples_failed += 1
        retirement = self.dispatcher.fail(key.arm, key.index)
        if retirement is not None:
            self.ports.tasks.create_task(self._retired(retirement))

    async def _retired(self, retirement: Retirement) -> None:
        arm = retirement.arm
        open_keys = [SampleKey(arm.arm_id, index, retry) for index, retry in arm.in_flight.items()]
        self.books.retired(retirement)
        if retirement.outcome == "dropped_failed":
            self.ports.feed.quarantined.add(arm.prompt.prompt_id)
        else:
            right, version = arm.num_right, self.dispatcher.outbox.learner_version
            self.ports.feed.selection.observe(arm.prompt.prompt_id, right, len(arm.counted) - right, version)
            if retirement.outcome == "deferred":
                self.ports.feed.put_back(arm.prompt)
        self.ports.folder.arm(retirement, self.dispatcher.outbox.learner_version)
        self.wake()
        await self._abort(open_keys)

    def _show(self) -> None:
        dispatcher, fleet = self.dispatcher, self.ports.fleet
        self.ports.recorder.set_arms(len(dispatcher.arms), len(dispatcher.outbox.ready), dispatcher.outbox.num_shipped)
        self.ports.recorder.in_flight(fleet.num_in_flight, fleet.num_slots)


def _open_tokens(arm: Arm) -> int:
    return arm.num_tokens + sum(s.num_tokens for s in arm.uncounted())


def _mean(past: float, value: float) -> float:
    return value if not past else _SMOOTHING * past + (1 - _SMOOTHING) * value
