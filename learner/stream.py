"""The learner's side of the wire: take groups, check the bound at the gradient, report steps, publish weights.

Invariants:
- A sample older than its group's bound at the gradient is never trained: its group is dropped and named, and leaves its
  place in the step empty. A group in its stead would shift every place that the engine has counted.
- A credit is given for every group that may come, so at most one step's groups are on the way.
- Version v + 1 is laid out only after version v is published, so two segments are enough.
- A group counts for a step only when that step's `StepDone` names it; groups of an unfinished step count for none.
- Every group is trained at the version that it names.
- A group without samples takes its place in the step like any other; a step of nothing else is taken and published too.
- A checkpoint's milestone counts the groups of finished steps only; a resumed learner is at the checkpoint's version
  from its first message on.

Consumes `TrainGroup`, `WeightsPublished`, `Stop`; waits for groups, publications and the trainer; unblocked by the
engine; produces `Resumed`, `Credit`, `StepDone`, `WeightsReady`, `Heartbeat`, `Finished`; ends with `Stop`, a lost
engine or a passed deadline. No torch here: the work itself is behind `Trainer`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.errors import DeadlineError, RunError, WireError, first_cause
from engine.transport.base import Link
from engine.wire import (
    Credit,
    Finished,
    Heartbeat,
    Manifest,
    Message,
    Milestone,
    Resumed,
    StepDone,
    Stop,
    TrainGroup,
    WeightsPublished,
    WeightsReady,
)
from learner.milestone import Loaded, finish, settle

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What a learner does between messages. Methods are never called at the same time."""

    async def open(self) -> Loaded | None:
        """Load the model, and the checkpoint if the run is to be resumed; once, first.

        Returns:
            None when the run was not asked to resume.
        """
        ...

    async def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add the gradient of `groups` to the step that is being filled."""
        ...

    async def step(self) -> dict[str, float]:
        """Take the optimizer step (none without response tokens); the metrics of `StepDone` that the trainer knows."""
        ...

    async def lay_out(self, policy_version: int) -> Manifest:
        """Put the weights where workers find them."""
        ...

    async def save(self, milestone: Milestone) -> str:
        """Write a checkpoint; its path."""
        ...


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a learner consumes groups."""

    groups_per_step: int
    """B."""
    idle_deadline_s: float
    """Longest wait for a group or a publication."""
    save_every_steps: int = 0
    """A checkpoint every so many steps; 0 = only when told to stop."""
    heartbeat_s: float = 3.0
    """Between two heartbeats."""
    overlaps_updates: bool = True
    """Go on with the next step's gradient while the workers load the last step's weights."""

    @property
    def fewest_groups(self) -> int:
        """Groups that a gradient waits for.

        A quarter step: every backward pass writes one gradient of the whole model, so single groups cost more than
        they save, and after the last group arrived at most a quarter of the work is left.
        """
        return max(1, self.groups_per_step // 4)


@dataclass(slots=True)
class _Step:
    """One optimizer step being filled."""

    group_ids: list[int] = field(default_factory=list)
    dropped_ids: list[int] = field(default_factory=list)
    compute_s: float = 0.0
    wait_s: float = 0.0
    tokens: int = 0
    staleness_sum: int = 0
    max_staleness: int = 0
    milestone: Milestone = field(default_factory=Milestone)
    """With the groups taken so far; counts once the step is finished."""

    @property
    def num_places(self) -> int:
        """Places taken, those of dropped groups included."""
        return len(self.group_ids) + len(self.dropped_ids)


def group_staleness(group: TrainGroup, policy_version: int) -> int:
    """Largest staleness of any token of `group` at the gradient of `policy_version`; 0 for a group without tokens."""
    return max((policy_version - span.version for sample in group.samples for span in sample.spans), default=0)


class LearnerStream:
    """Runs one learner over one link; see the module's text."""

    def __init__(self, link: Link, trainer: Trainer, settings: StreamSettings) -> None:
        self._link = link
        self._trainer = trainer
        self._settings = settings
        self._groups: deque[TrainGroup] = deque()  # bounded by the credits given
        self._published = -1
        self._stop: Stop | None = None
        self._arrived = asyncio.Event()
        self._stage = "starting"
        self._milestone = Milestone()
        self._saved: tuple[Milestone, str] | None = None
        self._publication_wait_s = 0.0

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, those before a resume included."""
        return self._milestone.policy_version

    async def run(self) -> str:
        """Until the engine says stop.

        Returns:
            The last checkpoint's path, empty if none was asked for.

        Raises:
            PeerLost: the engine is gone.
            DeadlineError: nothing came for `idle_deadline_s`; the text names the wait.
            RunError: a group is for another version, or the trainer cannot train it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._receive()), tasks.create_task(self._beat())]
                checkpoint = await self._work()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        return checkpoint

    async def _work(self) -> str:
        self._stage = "loading the model"
        loaded = await self._trainer.open()
        if loaded is not None:
            self._milestone = loaded.milestone
            await self._link.send(
                Resumed(
                    checkpoint=loaded.checkpoint,
                    policy_version=self.policy_version,
                    last_group_id=self._milestone.last_group_id,
                    position=self._milestone.position,
                )
            )
        first = self.policy_version
        self._published = first - 1  # nobody reads an older one
        await self._publish()
        await self._wait(lambda: self._published >= first, "the publication of the first weights")
        while self._stop is None:
            step = await self._fill()
            if step is None:
                break
            await self._finish(step)
        return await self._end()

    async def _fill(self) -> _Step | None:
        """Gather one step's gradient; None when the engine said stop meanwhile."""
        settings = self._settings
        step = _Step(wait_s=self._publication_wait_s, milestone=self._milestone)
        await self._give(settings.groups_per_step)
        while (missing := settings.groups_per_step - step.num_places) > 0:
            enough = min(missing, settings.fewest_groups)
            self._stage = f"waiting for groups of step {self.policy_version + 1}"
            started_at = _now()
            await self._wait(
                lambda enough=enough: len(self._groups) >= enough,
                f"groups of step {self.policy_version + 1} ({step.num_places} of {settings.groups_per_step} came)",
            )
            step.wait_s += _now() - started_at
            if self._stop is not None:
                return None
            taken = [self._groups.popleft() for _ in range(min(missing, len(self._groups)))]
            await self._accumulate(step, taken)
        return step

    async def _accumulate(self, step: _Step, taken: Sequence[TrainGroup]) -> None:
        fresh: list[TrainGroup] = []
        for group in taken:
            self._check_version(group)
            staleness = group_staleness(group, self.policy_version)
            if staleness > group.max_staleness:
                logger.warning(
                    "group %s dropped: staleness %s at the gradient of version %s is over the bound %s",
                    group.group_id, staleness, self.policy_version, group.max_staleness,
                )  # fmt: skip
                step.dropped_ids.append(group.group_id)
            else:
                fresh.append(group)
        step.milestone = settle(step.milestone, taken)
        if not fresh:
            return
        self._stage = f"computing the gradient of step {self.policy_version + 1}"
        started_at = _now()
        await self._trainer.accumulate(fresh)
        step.compute_s += _now() - started_at
        for group in fresh:
            step.group_ids.append(group.group_id)
            self._count(step, group)

    def _check_version(self, group: TrainGroup) -> None:
        if group.train_version != self.policy_version:
            raise RunError(
                f"group {group.group_id} must be for the gradient of version {self.policy_version}, at which the "
                f"learner is, it is for version {group.train_version}"
            )

    def _count(self, step: _Step, group: TrainGroup) -> None:
        step.max_staleness = max(step.max_staleness, group_staleness(group, self.policy_version))
        for sample in group.samples:
            for span in sample.spans:
                step.tokens += span.end - span.start
                step.staleness_sum += (span.end - span.start) * (self.policy_version - span.version)

    async def _finish(self, step: _Step) -> None:
        """Optimizer step, report, publication."""
        self._stage = f"taking step {self.policy_version + 1}"
        started_at = _now()
        metrics = await self._trainer.step()
        step.compute_s += _now() - started_at
        self._milestone = finish(step.milestone)
        metrics |= {
            "step_s": step.compute_s,
            "wait_s": step.wait_s,
            "max_staleness": float(step.max_staleness),
            "mean_staleness": step.staleness_sum / max(1, step.tokens),
        }
        await self._link.send(
            StepDone(
                policy_version=self.policy_version,
                group_ids=step.group_ids,
                dropped_group_ids=step.dropped_ids,
                metrics=metrics,
            )
        )
        await self._publish()
        every = self._settings.save_every_steps
        if every and self.policy_version % every == 0 and self._stop is None:
            await self._save()

    async def _save(self) -> str:
        """The checkpoint of this milestone; the path of the one that is there, if it was saved before."""
        if self._saved is None or self._saved[0] != self._milestone:
            self._stage = f"saving the checkpoint of version {self.policy_version}"
            self._saved = self._milestone, await self._trainer.save(self._milestone)
        return self._saved[1]

    async def _publish(self) -> None:
        # Version v overwrites the segment of v - 2, which workers may read until v - 1 is published.
        earlier = self.policy_version - 1
        started_at = _now()
        self._stage = f"waiting for the publication of version {earlier}"
        await self._wait(lambda: self._published >= earlier, f"the publication of version {earlier}")
        self._publication_wait_s = _now() - started_at
        if self._stop is not None:
            return
        self._stage = f"laying out version {self.policy_version}"
        started_at = _now()
        manifest = await self._trainer.lay_out(self.policy_version)
        await self._link.send(WeightsReady(manifest=manifest, stage_s=_now() - started_at))
        if not self._settings.overlaps_updates:
            version = self.policy_version
            self._stage = f"waiting for the publication of version {version}"
            await self._wait(lambda: self._published >= version, f"the publication of version {version}")
            self._publication_wait_s = _now() - started_at

    async def _end(self) -> str:
        stop = self._stop
        checkpoint = ""
        if stop is not None and stop.save:
            checkpoint = await self._save()
        logger.info("stopped at version %s: %s", self.policy_version, stop.reason if stop else "")
        await self._link.send(Finished(checkpoint=checkpoint))
        return checkpoint

    async def _give(self, credits: int) -> None:
        if credits > 0:
            await self._link.send(Credit(groups=credits))

    async def _receive(self) -> None:
        while True:
            self._take(await self._link.receive())
            self._arrived.set()

    def _take(self, message: Message) -> None:
        match message:
            case TrainGroup():
                self._groups.append(message)
            case WeightsPublished(policy_version=version):
                self._published = max(self._published, version)
            case Stop():
                self._stop = message
            case _:
                raise WireError(f"a learner takes no {type(message).__name__}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            await self._link.send(Heartbeat(in_flight=len(self._groups), stage=self._stage))

    async def _wait(self, holds: Callable[[], bool], what: str) -> None:
        """Until `holds()` or the engine said stop; anything that arrives restarts the deadline.

        Raises:
            DeadlineError: nothing arrived for `idle_deadline_s`.
        """
        try:
            while not holds() and self._stop is None:
                self._arrived.clear()
                async with asyncio.timeout(self._settings.idle_deadline_s):
                    await self._arrived.wait()
        except TimeoutError as exc:
            raise DeadlineError(f"the learner waited {self._settings.idle_deadline_s:g} s for {what}") from exc


def _now() -> float:
    return asyncio.get_running_loop().time()
