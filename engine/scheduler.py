"""The async shell around the dispatcher: requests out, samples and verdicts in, groups to the learner.

Consumes: samples, failures, lost workers, credits, steps, published versions (methods `on_...`, called by the
coordinator's one reader). Waits for: `_changed`, set by every one of them. Produces: `Generate`, `Abort`, `TrainGroup`.
Ends when `stop()` was called.

Bounds: requests under way <= slots of the live workers; launching pauses while as many samples as slots wait for their
verdict (a slow verifier slows generation, it never piles up samples); groups shipped <= credits; groups waiting <= one
step's worth and what the open arms still seal.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from configs.root import Config
from engine.core.arm import Arm, Sample
from engine.core.dispatcher import Dispatcher, Launch, Retirement
from engine.core.errors import PeerLost
from engine.core.group import Group
from engine.core.width import Pace
from engine.fleet import Fleet
from engine.prompt_feed import PromptFeed
from engine.run_folder import RunFolder
from engine.tally import Tally
from engine.transport.base import Hub
from engine.verifiers import Grader
from engine.wire import (
    Abort,
    Generate,
    Int32s,
    SampleDone,
    SampleFailed,
    SampleKey,
    SamplingParams,
    StepDone,
    TrainGroup,
    TrainSample,
    Verdict,
)
from metrics.catalogue import tier_of
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
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False
    _launched_at: dict[SampleKey, float] = field(default_factory=dict[SampleKey, float])
    _num_scoring: int = 0
    _scoring_tokens: int = 0
    _groups: dict[int, Group] = field(default_factory=dict[int, Group])
    _published_at: float = 0.0

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
        return self.ports.feed.is_empty and not self.dispatcher.arms

    @property
    def is_idle(self) -> bool:
        """Whether no request and no verdict is under way."""
        return not self._launched_at and not self._num_scoring

    @property
    def held_tokens(self) -> int:
        """Tokens whose fate is open: live arms, samples being scored, groups not trained yet."""
        arms = sum(_pool_tokens(arm) for arm in self.dispatcher.arms.values())
        groups = sum(_pool_tokens(group.arm) for group in self._groups.values())
        return arms + groups + self._scoring_tokens

    # --- events -------------------------------------------------------------------------------------------------

    def on_sample(self, worker: str, message: SampleDone) -> None:
        """A worker answered a request of ours."""
        key = message.key
        num_tokens = len(message.token_ids)
        self.ports.fleet.release(key)
        launched_at = self._launched_at.pop(key, None)
        self.ports.recorder.generated(worker, num_tokens, 1)
        self.tally.ledger.generated += num_tokens
        is_awaited = self.dispatcher.is_open(key.arm, key.index, key.retry) and launched_at is not None
        if self._stopped or message.finish_reason == "abort" or not is_awaited:
            self._abort_tokens(num_tokens)
            if is_awaited and not self._stopped:
                self._failed(key)
        else:
            self._num_scoring += 1
            self._scoring_tokens += num_tokens
            self.ports.tasks.create_task(self._grade(message, launched_at or 0.0))
        self.wake()

    def on_sample_failed(self, message: SampleFailed) -> None:
        """A worker could not answer: never a wrong answer."""
        self.ports.fleet.release(message.key)
        self._launched_at.pop(message.key, None)
        self.tally.ledger.generated += message.tokens_lost
        self._fail_tokens(message.tokens_lost)
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
        self.dispatcher.generation_version = version
        if self._published_at and version:
            pace = self.dispatcher.pace
            self.dispatcher.pace = Pace(pace.latency_s, _mean(pace.version_s, now - self._published_at))
        self._published_at = now
        self.wake()

    def on_step_done(self, step: StepDone) -> None:
        """The learner took an optimizer step."""
        groups = [self._groups.pop(group_id) for group_id in step.group_ids]
        dropped = [self._groups.pop(group_id) for group_id in step.dropped_group_ids]
        self.dispatcher.step_done(step.policy_version, len(groups) + len(dropped))
        for group in groups:
            self._trained(group, step.policy_version - 1)
        for group in dropped:
            self._dropped(group)
        reward = self.tally.step(asyncio.get_running_loop().time(), len(groups))
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
            if launch is None:
                prompt = self.ports.feed.take() if self.dispatcher.may_launch else None
                if prompt is None:
                    return
                self.dispatcher.admit(prompt)
                continue
            await self._generate(launch)

    async def _generate(self, launch: Launch) -> None:
        arm, sampling = launch.arm, self.config.sampling
        key = SampleKey(arm.arm_id, launch.index, launch.retry)
        worker = self.ports.fleet.assign(key)
        if worker is None:
            raise AssertionError("a launch was made without a free slot")
        self._launched_at[key] = asyncio.get_running_loop().time()
        self.tally.samples_launched += 1
        params = SamplingParams(sampling.max_tokens, sampling.temperature, sampling.top_p, launch.seed)
        message = Generate(key=key, prompt_token_ids=_token_ids(arm), params=params)
        try:
            await self.ports.hub.send(worker, message)
        except PeerLost:
            # The worker's loss is an event of its own: it hands this key back.
            return

    async def _ship(self) -> None:
        while self.credit > 0 and (found := self.dispatcher.next_group()) is not None:
            if isinstance(found, Group):
                self._dropped(self._groups.pop(found.group_id))
                continue
            group, trained_at = found
            self.credit -= 1
            self.ports.recorder.group("shipped")
            await self.ports.hub.send(self.learner, self._train_group(group, trained_at))

    def _train_group(self, group: Group, trained_at: int) -> TrainGroup:
        samples: list[TrainSample] = []
        for sample in group.kept:
            response = _response(sample)
            samples.append(
                TrainSample(
                    index=sample.index,
                    token_ids=response.token_ids,
                    logprobs=response.logprobs,
                    spans=response.spans,
                    reward=sample.reward,
                    advantage=group.advantage(sample),
                )
            )
        return TrainGroup(
            group_id=group.group_id,
            prompt_id=group.arm.prompt.prompt_id,
            prompt_token_ids=_token_ids(group.arm),
            samples=samples,
            train_version=trained_at,
            max_staleness=self.dispatcher.policy.bound.max_staleness,
        )

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
            self._abort_tokens(num_tokens)
        elif verdict in ("timeout", "crashed"):
            self._fail_tokens(num_tokens)
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
        sample = Sample(message.key.index, float(is_right), is_right, version, len(message.token_ids), message)
        if sample.index == 0:
            self.tally.first_sample(sample.reward)
            self.ports.recorder.first_sample_reward(sample.reward)
        retirement = self.dispatcher.score(message.key.arm, sample)
        if retirement is not None:
            await self._retired(retirement)

    def _failed(self, key: SampleKey) -> None:
        if self._stopped or not self.dispatcher.is_open(key.arm, key.index, key.retry):
            return
        self.tally.samples_failed += 1
        retirement = self.dispatcher.fail(key.arm, key.index)
        if retirement is not None:
            self.ports.tasks.create_task(self._retired(retirement))

    async def _retired(self, retirement: Retirement) -> None:
        arm, recorder = retirement.arm, self.ports.recorder
        open_keys = [SampleKey(arm.arm_id, index, retry) for index, retry in arm.in_flight.items()]
        num_right = sum(s.is_right for s in arm.counted)
        self.tally.samples_counted += len(arm.counted)
        self.tally.expired_samples += retirement.num_expired
        tokens = sum(s.num_tokens for s in arm.counted)
        recorder.arm_retired(retirement.reason, tier_of(num_right, len(arm.counted)), len(arm.counted), tokens)
        recorder.group(retirement.outcome)
        for sample in arm.uncounted():
            self._abort_tokens(sample.num_tokens)
        if retirement.group is not None:
            self._groups[retirement.group.group_id] = retirement.group
        else:
            self._no_group(retirement)
        self.ports.folder.arm(retirement, self.dispatcher.learner_version)
        self.wake()
        await self._abort(open_keys)

    def _no_group(self, retirement: Retirement) -> None:
        self._count_tokens(sum(s.num_tokens for s in retirement.arm.counted))
        self.tally.groups_zero_signal += retirement.outcome == "zero_signal"
        self.tally.groups_dropped += retirement.outcome in ("dropped_expired", "dropped_failed")
        if retirement.outcome == "dropped_failed":
            self.tally.prompts_quarantined += 1
            self.ports.feed.quarantined.add(retirement.arm.prompt.prompt_id)
            self.ports.recorder.prompts(quarantined=1)

    def _trained(self, group: Group, version: int) -> None:
        kept = sum(s.num_tokens for s in group.kept)
        self.tally.ledger.trained += kept
        self.ports.recorder.tokens("trained", kept)
        self._count_tokens(sum(s.num_tokens for s in group.arm.counted) - kept)
        self.ports.recorder.group("trained")
        for sample in group.kept:
            self.ports.recorder.staleness(version - sample.min_version, 1)

    def _dropped(self, group: Group) -> None:
        self._count_tokens(sum(s.num_tokens for s in group.arm.counted))
        self.tally.groups_dropped += 1
        self.ports.recorder.group("dropped_expired")

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _count_tokens(self, tokens: int) -> None:
        self.tally.ledger.counted += tokens
        self.ports.recorder.tokens("counted", tokens)

    def _abort_tokens(self, tokens: int) -> None:
        self.tally.samples_aborted += 1
        self.tally.ledger.aborted += tokens
        self.ports.recorder.tokens("aborted", tokens)

    def _fail_tokens(self, tokens: int) -> None:
        self.tally.ledger.failed += tokens
        self.ports.recorder.tokens("failed", tokens)

    def _show(self) -> None:
        dispatcher, fleet = self.dispatcher, self.ports.fleet
        self.ports.recorder.set_arms(len(dispatcher.arms), len(dispatcher.ready), dispatcher.num_shipped)
        self.ports.recorder.in_flight(fleet.num_in_flight, fleet.num_slots)


def _response(sample: Sample) -> SampleDone:
    if not isinstance(sample.response, SampleDone):
        raise TypeError(f"a sample's response must be a SampleDone, got {type(sample.response).__name__}")
    return sample.response


def _token_ids(arm: Arm) -> Int32s:
    return cast("Int32s", arm.prompt.token_ids)  # opaque to the core; PromptFeed put it there


def _pool_tokens(arm: Arm) -> int:
    waiting = 0 if arm.retired else sum(s.num_tokens for s in arm.uncounted())
    return sum(s.num_tokens for s in arm.counted) + waiting


def _mean(past: float, value: float) -> float:
    return value if not past else _SMOOTHING * past + (1 - _SMOOTHING) * value
