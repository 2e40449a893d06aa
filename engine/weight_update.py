"""Verified weight updates: stage on every worker, then pause, load and canary, then publish the version.

Invariants:
- A version is published only when every live worker runs it and passed its canary, and one worker at least is live.
- A worker that refuses to stage, fails its canary, or misses a deadline is fenced (its owner restarts it); the others
  go on. A worker that joins later is brought to the current version before it is live.
- One update at a time; the learner lays out the next version only after `WeightsPublished`.

Consumes: manifests of the learner and workers that join. Waits for: answers of workers, each with a deadline.
Produces: `on_published(version)`, `on_fenced(worker, cause)`, `on_live()`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from configs.training import Weights
from engine.core.errors import DeadlineError, PeerLost, WeightUpdateError
from engine.fleet import Fleet
from engine.transport.base import Hub
from engine.wire import Applied, ApplyWeights, Manifest, Staged, StageWeights
from metrics.recorder import Recorder

log = logging.getLogger(__name__)

_Answer = Staged | Applied
_T = TypeVar("_T", Staged, Applied)


@dataclass(slots=True)
class UpdateLog:
    """What updates cost, for the summary; seconds."""

    pause_s: list[float] = field(default_factory=list[float])
    load_s: list[float] = field(default_factory=list[float])
    update_s: list[float] = field(default_factory=list[float])
    """From the manifest's arrival to the publication."""
    canary_max_nats: float = 0.0
    noise_nats: float = 0.0
    """Largest lag-0 difference: the run's first version on the worker against the learner."""
    num_fenced: int = 0


@dataclass(slots=True)
class WeightUpdater:
    """Brings every worker to the learner's newest version."""

    hub: Hub
    fleet: Fleet
    config: Weights
    recorder: Recorder
    on_published: Callable[[int], Awaitable[None]]
    on_fenced: Callable[[str, str], Awaitable[None]]
    on_live: Callable[[], None]
    """Workers may have become live: there may be free slots."""
    manifest: Manifest | None = None
    published: int = -1
    history: UpdateLog = field(default_factory=UpdateLog)
    _arrived_at: float = 0.0
    _joined: deque[str] = field(default_factory=deque[str])
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: dict[tuple[str, type[_Answer]], asyncio.Future[_Answer]] = field(
        default_factory=dict[tuple[str, type[_Answer]], "asyncio.Future[_Answer]"]
    )

    def on_manifest(self, manifest: Manifest) -> None:
        """The learner laid out new weights."""
        self.manifest = manifest
        self._arrived_at = asyncio.get_running_loop().time()
        self._work.set()

    def on_joined(self, worker: str) -> None:
        """A worker connected and needs the current version."""
        self._joined.append(worker)
        self._work.set()

    def on_answer(self, worker: str, answer: _Answer) -> None:
        """A worker answered; answers nobody waits for are old and ignored."""
        future = self._answers.get((worker, type(answer)))
        if future is not None and not future.done():
            future.set_result(answer)

    def on_worker_lost(self, worker: str) -> None:
        """The worker is gone: whoever waits for it stops waiting."""
        for (name, _), future in self._answers.items():
            if name == worker and not future.done():
                future.set_exception(PeerLost(f"worker {worker} is gone"))

    async def run(self) -> None:
        """Update for ever; ends by cancellation."""
        while True:
            # Unblocked by on_manifest() and on_joined(); with nothing to do there is no deadline to miss.
            await self._work.wait()
            self._work.clear()
            manifest = self.manifest
            if manifest is None:
                continue
            self._joined.clear()
            behind = [
                worker.name
                for worker in self.fleet.workers.values()
                if worker.state == "syncing" or worker.policy_version != manifest.policy_version
            ]
            await self._update(behind, manifest)
            self.on_live()
            if self.published != manifest.policy_version and self.fleet.live:
                self.published = manifest.policy_version
                self.history.update_s.append(asyncio.get_running_loop().time() - self._arrived_at)
                await self.on_published(manifest.policy_version)

    async def _update(self, workers: list[str], manifest: Manifest) -> None:
        staged = await self._all(workers, lambda worker: self._stage(worker, manifest))
        await self._all(staged, lambda worker: self._apply(worker, manifest))

    async def _all(self, workers: list[str], phase: Callable[[str], Awaitable[None]]) -> list[str]:
        """Run a phase on every worker side by side; returns those that passed."""
        passed: list[str] = []

        async def one(worker: str) -> None:
            try:
                await phase(worker)
            except PeerLost as exc:
                log.warning("weight update: worker %s was lost: %s", worker, exc)
            except (WeightUpdateError, DeadlineError) as exc:
                self.history.num_fenced += 1
                self.recorder.weight_update("failed", 0.0, 0.0, 0.0, 0.0, 0.0)
                await self.on_fenced(worker, str(exc))
            else:
                passed.append(worker)

        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(one(worker))
        return passed

    async def _stage(self, worker: str, manifest: Manifest) -> None:
        answer = await self._ask(worker, StageWeights(manifest=manifest), Staged, self.config.stage_deadline_s)
        if answer.error:
            raise WeightUpdateError(f"worker {worker} refused version {manifest.policy_version}: {answer.error}")

    async def _apply(self, worker: str, manifest: Manifest) -> None:
        version = manifest.policy_version
        state = self.fleet.workers.get(worker)
        if state is None:
            raise PeerLost(f"worker {worker} left between staging and applying")
        is_held = version == 0 and state.policy_version == 0
        message = ApplyWeights(
            policy_version=version,
            load=not is_held,
            canary_limit_nats=float("inf") if is_held else self._limit(),
        )
        answer = await self._ask(worker, message, Applied, self.config.apply_deadline_s)
        if answer.error:
            raise WeightUpdateError(f"worker {worker} failed on version {version}: {answer.error}")
        if is_held or self.published < 0:
            self.history.noise_nats = max(self.history.noise_nats, answer.canary_max_nats)
            log.info("lag-0 noise between engine and learner: %.4f nats", answer.canary_max_nats)
        if not is_held:
            self._record(answer)
        self.fleet.activate(worker, version)

    def _limit(self) -> float:
        """Largest canary difference of weights that were loaded, nats.

        The first version of a resumed run is loaded before any noise was measured: its limit is what a noise as large
        as the floor would give.
        """
        config = self.config
        noise = config.canary_floor_nats if self.published < 0 else self.history.noise_nats
        return max(config.canary_floor_nats, config.canary_noise_factor * noise)

    def _record(self, answer: Applied) -> None:
        history = self.history
        history.pause_s.append(answer.pause_s)
        history.load_s.append(answer.load_s)
        history.canary_max_nats = max(history.canary_max_nats, answer.canary_max_nats)
        elapsed = asyncio.get_running_loop().time() - self._arrived_at
        stage_s = max(0.0, elapsed - answer.update_s)
        self.recorder.weight_update("ok", stage_s, answer.pause_s, answer.load_s, elapsed, answer.canary_max_nats)

    async def _ask(self, worker: str, message: StageWeights | ApplyWeights, kind: type[_T], deadline_s: float) -> _T:
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._answers[worker, kind] = future
        try:
            await self.hub.send(worker, message)
            async with asyncio.timeout(deadline_s):
                answer = await future
        except TimeoutError as exc:
            what = type(message).__name__
            raise DeadlineError(f"worker {worker} did not answer {what} within {deadline_s:g} s") from exc
        finally:
            del self._answers[worker, kind]
        if not isinstance(answer, kind):
            raise WeightUpdateError(f"worker {worker} answered {type(answer).__name__} to {type(message).__name__}")
        return answer
