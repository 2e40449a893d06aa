"""One run from start to end: who is connected, which phase it is in, and where each message goes.

Phases: starting (children boot, version 0 is verified) -> evaluating -> training -> draining -> evaluating -> saving.
Invariants: one reader takes every event of the hub; no handler waits for a peer; every wait of a phase has a deadline;
a failed task ends the run with its cause.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from configs.root import Config
from engine import strategies
from engine.core.dispatcher import Dispatcher, Policy
from engine.core.errors import DeadlineError, RunError
from engine.core.staleness import Bound
from engine.cores import CorePlan
from engine.datasets import PromptRow
from engine.encoding import Encoder
from engine.evaluate import Accuracy, Evaluator
from engine.fleet import Fleet
from engine.launch import LEARNER, learner_command, worker_commands
from engine.prompt_feed import PromptFeed
from engine.run_folder import RunFolder
from engine.scheduler import Ports, Scheduler
from engine.summary import SummaryValue, Times, summarize
from engine.supervisor import Children, OnExit, Supervisor
from engine.tally import Tally
from engine.transport.base import Hub, PeerGone, PeerJoined, Received
from engine.verifiers import Grader
from engine.weight_update import WeightUpdater
from engine.wire import (
    Applied,
    Credit,
    Encoded,
    Finished,
    Heartbeat,
    SampleDone,
    SampleFailed,
    SampleKey,
    Staged,
    StepDone,
    Stop,
    WeightsPublished,
    WeightsReady,
)
from metrics.recorder import Recorder

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Inputs:
    """What a run is made of, opened by its owner."""

    config: Config
    folder: RunFolder
    hub: Hub
    grader: Grader
    recorder: Recorder
    train: Sequence[PromptRow]
    test: Sequence[PromptRow]
    cores: CorePlan
    children: Callable[[asyncio.TaskGroup, OnExit], Children] = Supervisor


@dataclass(slots=True)
class Coordinator:
    """Owns the tasks of a run."""

    inputs: Inputs
    tasks: asyncio.TaskGroup
    stage: str = "starting"
    interrupted: str = ""
    tally: Tally = field(default_factory=Tally)
    fleet: Fleet = field(default_factory=Fleet)
    before: Accuracy | None = None
    after: Accuracy | None = None
    supervisor: Children = field(init=False)
    updater: WeightUpdater = field(init=False)
    scheduler: Scheduler = field(init=False)
    _encoder: Encoder = field(init=False)
    _evaluator: Evaluator = field(init=False)
    _feed: PromptFeed = field(init=False)
    _progress: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: asyncio.Event = field(default_factory=asyncio.Event)
    _peer_stages: dict[str, str] = field(default_factory=dict[str, str])
    started_at: float = 0.0
    _stepped_at: float = 0.0
    _setup_s: float = 0.0

    def __post_init__(self) -> None:
        """Build the parts; nothing runs yet."""
        inputs, config = self.inputs, self.inputs.config
        self.supervisor = inputs.children(self.tasks, self._on_child_exit)
        self._encoder = Encoder(inputs.hub, self.fleet, config.model.chat_template)
        self._feed = PromptFeed(
            rows=inputs.train,
            encoder=self._encoder,
            seed=config.run.seed,
            max_epochs=config.data.max_epochs,
            max_prompt_tokens=config.model.max_context_tokens - config.sampling.max_tokens,
            changed=self._wake,
            on_skipped=self._on_skipped,
        )
        self.updater = WeightUpdater(
            inputs.hub, self.fleet, config.weights, inputs.recorder, self._on_published, self._on_fenced, self._wake
        )
        self._evaluator = Evaluator(
            inputs.hub,
            self.fleet,
            inputs.grader,
            self._encoder,
            config.evaluation,
            config.sampling,
            self.tasks,
            self._on_evaluation_tokens,
            config.run.seed,
        )
        ports = Ports(inputs.hub, self.fleet, self._feed, inputs.grader, inputs.recorder, inputs.folder, self.tasks)
        self.scheduler = Scheduler(
            config, ports, Dispatcher(_policy(config)), self.tally, LEARNER, self._on_step, self._progress.set
        )

    # --- phases -----------------------------------------------------------------------------------------------------

    async def run(self) -> dict[str, SummaryValue]:
        """The whole run; returns its summary. Children still run when it returns or raises: the owner stops them."""
        loop = asyncio.get_running_loop()
        self.started_at = loop.time()
        reader = self.tasks.create_task(self._read())
        updater = self.tasks.create_task(self.updater.run())
        await self._start()
        self._setup_s = loop.time() - self.started_at
        self.before = await self._evaluate("before")
        await self._train()
        await self._drain()
        if not self.interrupted:
            self.after = await self._evaluate("after")
        await self._save()
        for task in (reader, updater):
            task.cancel()
        times = Times(loop.time() - self.started_at, self._setup_s, self.tally.ended_at - self.tally.started_at)
        return summarize(self.tally, self.updater.history, self.before, self.after, times, self.scheduler.held_tokens)

    def interrupt(self, signal_name: str) -> bool:
        """Finish training, save and end; False when the run is in no phase that can be cut short."""
        self.interrupted = signal_name
        self._progress.set()
        return self.stage in ("training", "draining", "saving")

    async def _start(self) -> None:
        config, inputs = self.inputs.config, self.inputs
        log.info("%s", inputs.cores.describe())
        commands = worker_commands(config, inputs.folder, inputs.hub.address, inputs.cores)
        for command in [*commands, learner_command(config, inputs.folder, inputs.hub.address, inputs.cores)]:
            await self.supervisor.start(command)
        await self._until(
            lambda: self.updater.published >= 0 and len(self.fleet.live) >= config.worker.count,
            config.worker.boot_deadline_s,
            "workers and learner to start",
        )

    async def _evaluate(self, when: str) -> Accuracy | None:
        if not self.inputs.test:
            return None
        self.stage = "evaluating"
        accuracy = await self._evaluator.measure(self.inputs.test)
        log.info("held-out accuracy %s training: %.3f", when, accuracy.sampled)
        self.inputs.folder.event(
            "evaluated", when=when, accuracy=accuracy.sampled, greedy=accuracy.greedy, by_level=accuracy.by_level
        )
        return accuracy

    async def _train(self) -> None:
        config, loop = self.inputs.config, asyncio.get_running_loop()
        self.stage = "training"
        self.tally.started_at = loop.time()
        self.tasks.create_task(self._feed.run())
        self.tasks.create_task(self.scheduler.run())
        self.scheduler.on_published(self.updater.published)
        limit_s = config.run.max_train_s
        while not (self.interrupted or self._has_trained_enough()):
            steps = self.tally.steps
            left_s = self.tally.started_at + limit_s - loop.time() if limit_s else float("inf")
            if left_s <= 0:
                break
            await self._until(
                lambda steps=steps: self.tally.steps > steps or bool(self.interrupted) or self.scheduler.is_starved,
                min(left_s, config.learner.idle_deadline_s),
                "an optimizer step",
                is_fatal=left_s > config.learner.idle_deadline_s,
            )
            if self.scheduler.is_starved:
                break

    def _has_trained_enough(self) -> bool:
        limit = self.inputs.config.run.max_steps
        return bool(limit) and self.tally.steps >= limit

    async def _drain(self) -> None:
        self.stage = "draining"
        self.tally.ended_at = asyncio.get_running_loop().time()
        await self.scheduler.stop()
        self._feed.stop()
        deadline_s = self.inputs.config.server.drain_deadline_s
        await self._until(lambda: self.scheduler.is_idle, deadline_s, "aborted samples and open verdicts")
        await self._until(
            lambda: self.updater.published >= self.scheduler.dispatcher.learner_version,
            deadline_s,
            "the last weight update",
        )

    async def _save(self) -> None:
        self.stage = "saving"
        deadline_s = self.inputs.config.server.drain_deadline_s
        self.supervisor.expect_exit(LEARNER)
        await self.inputs.hub.send(LEARNER, Stop(reason="the run is over"))
        await self._until(self._finished.is_set, deadline_s, "the learner's last checkpoint")
        for worker in list(self.fleet.workers):
            self.supervisor.expect_exit(worker)
            await self.inputs.hub.send(worker, Stop(reason="the run is over"))

    async def _until(self, holds: Callable[[], bool], deadline_s: float, what: str, *, is_fatal: bool = True) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not holds():
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as exc:
            if is_fatal:
                stages = ", ".join(f"{peer}: {stage}" for peer, stage in sorted(self._peer_stages.items()))
                raise DeadlineError(f"waited {deadline_s:.0f} s for {what} while {self.stage} ({stages})") from exc

    # --- events -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Consumes hub events for ever; produces state changes; ends by cancellation."""
        while True:
            event = await self.inputs.hub.receive()
            if isinstance(event, PeerJoined):
                self._on_joined(event)
            elif isinstance(event, PeerGone):
                self._on_gone(event)
            else:
                self._on_message(event)
            self._progress.set()

    def _on_joined(self, event: PeerJoined) -> None:
        log.info("%s joined (pid %d)", event.peer, event.hello.pid)
        if event.hello.role == "worker":
            self.fleet.join(event.hello)
            self.updater.on_joined(event.peer)

    def _on_gone(self, event: PeerGone) -> None:
        if event.peer == LEARNER:
            if self.stage != "saving":
                # Its exit, with the cause, is the supervisor's to report; a silent but living learner ends here.
                self.supervisor.kill(LEARNER)
            return
        self._lose_worker(event.peer, event.reason)
        if self.stage != "saving":
            self.supervisor.kill(event.peer)

    def _on_message(self, event: Received) -> None:
        peer, message = event.peer, event.message
        match message:
            case SampleDone():
                if message.key.arm < 0:
                    self._evaluator.on_sample(message)
                else:
                    self.scheduler.on_sample(peer, message)
            case SampleFailed():
                log.warning("%s failed on a sample: %s", peer, message.error)
                if message.key.arm < 0:
                    self._evaluator.on_failed(message)
                else:
                    self.scheduler.on_sample_failed(peer, message)
            case Staged() | Applied():
                self.updater.on_answer(peer, message)
            case Encoded():
                self._encoder.on_encoded(message)
            case Heartbeat():
                self._peer_stages[peer] = message.stage
            case Credit() | StepDone() | WeightsReady() | Finished():
                self._on_learner_message(message)
            case _:
                raise RunError(f"{peer} sent {type(message).__name__}, which the engine does not take")

    def _on_learner_message(self, message: Credit | StepDone | WeightsReady | Finished) -> None:
        match message:
            case Credit():
                self.scheduler.on_credit(message.groups)
            case StepDone():
                self.scheduler.on_step_done(message)
            case WeightsReady():
                self.updater.on_manifest(message.manifest)
            case Finished():
                self.inputs.folder.event("saved", checkpoint=message.checkpoint)
                self._finished.set()

    async def _on_published(self, version: int) -> None:
        self.inputs.folder.event("published", t=self._now(), version=version)
        await self.inputs.hub.send(LEARNER, WeightsPublished(policy_version=version))
        self.scheduler.on_published(self.fleet.generation_version)
        self._wake()

    async def _on_fenced(self, worker: str, cause: str) -> None:
        log.error("worker %s is fenced: %s", worker, cause)
        self.inputs.folder.event("fenced", t=self._now(), worker=worker, cause=cause)
        await self.inputs.hub.drop(worker, cause)
        self._lose_worker(worker, cause)
        self.supervisor.kill(worker)

    async def _on_child_exit(self, name: str, cause: str) -> None:
        await self.inputs.hub.drop(name, cause)
        self.inputs.recorder.worker_restarted(name)
        self.inputs.folder.event("restarted", t=self._now(), worker=name, cause=cause)
        self._lose_worker(name, cause)

    def _lose_worker(self, name: str, cause: str) -> None:
        keys: list[SampleKey] = self.fleet.leave(name)
        if keys:
            log.warning("worker %s is gone (%s) with %d requests under way", name, cause, len(keys))
        self.updater.on_worker_lost(name)
        self._encoder.on_worker_lost(name)
        self._evaluator.on_lost([key for key in keys if key.arm < 0])
        self.scheduler.on_lost([key for key in keys if key.arm >= 0])
        self._wake()

    def _on_step(self, step: StepDone, reward: float | None) -> None:
        self._stepped_at = asyncio.get_running_loop().time()
        self.inputs.folder.event(
            "step",
            t=self._now(),
            step=self.tally.steps,
            version=step.policy_version,
            first_sample_reward=reward,
            reward_mean=self.tally.reward_mean,
            useful_groups=len(step.group_ids),
            groups_trained=self.tally.groups_trained,
            samples_launched=self.tally.samples_launched,
            samples_counted=self.tally.samples_counted,
            tokens_generated=self.tally.ledger.generated,
            **step.metrics,
        )

    def _on_evaluation_tokens(self, tokens: int) -> None:
        self.tally.ledger.evaluated += tokens
        self.inputs.recorder.tokens("evaluated", tokens)

    def seconds_since_step(self) -> float | None:
        """Since the last optimizer step; before the first, since training began; None before training."""
        last = self._stepped_at or self.tally.started_at
        return asyncio.get_running_loop().time() - last if last else None

    def _on_skipped(self, row: PromptRow) -> None:
        self.tally.prompts_skipped += 1
        self.inputs.recorder.prompts(skipped=1)
        self.inputs.folder.event("skipped", t=self._now(), prompt_id=row.prompt_id)

    def _wake(self) -> None:
        self.scheduler.wake()
        self._evaluator.wake()
        self._progress.set()

    def _now(self) -> float:
        """Seconds since training began (negative before)."""
        return round(asyncio.get_running_loop().time() - self.tally.started_at, 3) if self.tally.started_at else 0.0


def _policy(config: Config) -> Policy:
    strategy = config.strategy
    return Policy(
        strategy=strategies.build(strategy),
        bound=Bound(config.staleness.max, config.learner.groups_per_step),
        seed=config.run.seed,
        accounting=strategy.accounting,
        fixed_width=strategy.width,
        raise_by_deadline=strategy.raise_by_deadline,
        max_failures=config.worker.max_sample_failures,
    )
