"""The parts of a run and where every event goes: messages of peers, ends of children, callbacks of the parts.

Invariants: one reader takes every event of the hub; no handler waits for a peer; every event ends by waking whoever may
act on it. The phases of the run are the coordinator's.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from configs.root import Config
from engine.core.dispatcher import Dispatcher
from engine.core.errors import DeadlineError, PeerLost, RunError
from engine.core.past import Past
from engine.cores import CorePlan
from engine.datasets import PromptRow
from engine.encoding import Encoder
from engine.evaluate import Evaluator
from engine.fleet import Fleet
from engine.launch import LEARNER
from engine.policy import make_policy
from engine.prompt_feed import PromptFeed
from engine.run_folder import RunFolder
from engine.scheduler import Ports, Scheduler
from engine.selection import make_selection
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
    Message,
    Position,
    Resumed,
    SampleDone,
    SampleFailed,
    SampleKey,
    Staged,
    StepDone,
    WeightsPublished,
    WeightsReady,
)
from metrics.recorder import Recorder

log = logging.getLogger(__name__)

EXIT_GRACE_S = 10.0
"""A learner that closed its connection has this long to say why, and to exit; its ranks may take 5 s of it."""
Stage = Literal["starting", "evaluating", "training", "draining", "saving"]


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
class Exchange:
    """Parts of one run, and their events."""

    inputs: Inputs
    tasks: asyncio.TaskGroup
    stage: Stage = "starting"
    """Phase of the run, set by the coordinator."""
    tally: Tally = field(default_factory=Tally)
    fleet: Fleet = field(default_factory=Fleet)
    supervisor: Children = field(init=False)
    updater: WeightUpdater = field(init=False)
    scheduler: Scheduler = field(init=False)
    evaluator: Evaluator = field(init=False)
    feed: PromptFeed = field(init=False)
    has_saved: bool = False
    """Whether the learner said that its last checkpoint is written."""
    resumed: Resumed | None = None
    """Where the learner goes on from, if it was asked to."""
    _encoder: Encoder = field(init=False)
    _progress: asyncio.Event = field(default_factory=asyncio.Event)
    _peer_stages: dict[str, str] = field(default_factory=dict[str, str])
    _stepped_at: float = 0.0

    def __post_init__(self) -> None:
        """Build the parts; nothing runs yet."""
        inputs, config = self.inputs, self.inputs.config
        self.supervisor = inputs.children(self.tasks, self._on_child_exit)
        self._encoder = Encoder(inputs.hub, self.fleet, config.model.chat_template)
        self.feed = PromptFeed(
            rows=inputs.train,
            encoder=self._encoder,
            seed=config.run.seed,
            max_epochs=config.data.max_epochs,
            max_prompt_tokens=config.model.max_context_tokens - config.sampling.max_tokens,
            changed=self._wake,
            on_skipped=self._on_skipped,
            selection=make_selection(config),
            past_of=self._past_of,
            version=lambda: self.scheduler.dispatcher.outbox.learner_version,
            on_passed_over=self._on_passed_over,
        )
        self.updater = WeightUpdater(
            inputs.hub, self.fleet, config.weights, inputs.recorder, self._on_published, self._on_fenced, self._wake
        )
        self.evaluator = Evaluator(
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
        ports = Ports(inputs.hub, self.fleet, self.feed, inputs.grader, inputs.recorder, inputs.folder, self.tasks)
        self.scheduler = Scheduler(
            config, ports, Dispatcher(make_policy(config)), self.tally, LEARNER, self._on_step, self._progress.set
        )

    def notice(self) -> None:
        """Something changed that a phase may wait for."""
        self._progress.set()

    async def until(self, holds: Callable[[], bool], deadline_s: float, what: str, *, is_fatal: bool = True) -> None:
        """Wait until `holds()`, tested after every event.

        Raises:
            DeadlineError: it did not within `deadline_s`; not fatal = return then.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while not holds():
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as exc:
            if is_fatal:
                stages = ", ".join(f"{peer}: {stage}" for peer, stage in sorted(self._peer_stages.items()))
                raise DeadlineError(f"waited {deadline_s:.0f} s for {what} while {self.stage} ({stages})") from exc

    async def tell_learner(self, message: Message) -> None:
        """Send to the learner, unless it is gone: its exit, with the cause, is the supervisor's to report."""
        with contextlib.suppress(PeerLost):
            await self.inputs.hub.send(LEARNER, message)

    async def read(self) -> None:
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
                log.error("the learner is gone: %s", event.reason)
                # Its exit, with the cause, is the supervisor's to report; a silent but living learner ends here.
                asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.supervisor.kill, LEARNER)
            return
        self._lose_worker(event.peer, event.reason)
        if self.stage != "saving":
            self.supervisor.kill(event.peer)

    def _on_message(self, event: Received) -> None:
        peer, message = event.peer, event.message
        match message:
            case SampleDone():
                if message.key.arm < 0:
                    self.evaluator.on_sample(message)
                else:
                    self.scheduler.on_sample(peer, message)
            case SampleFailed():
                log.warning("%s failed on a sample: %s", peer, message.error)
                if message.key.arm < 0:
                    self.evaluator.on_failed(message)
                else:
                    self.scheduler.on_sample_failed(peer, message)
            case Staged() | Applied():
                self.updater.on_answer(peer, message)
            case Encoded():
                self._encoder.on_encoded(message)
            case Heartbeat():
                self._peer_stages[peer] = message.stage
            case Resumed() | Credit() | StepDone() | WeightsReady() | Finished():
                self._on_learner_message(message)
            case _:
                raise RunError(f"{peer} sent {type(message).__name__}, which the engine does not take")

    def _on_learner_message(self, message: Resumed | Credit | StepDone | WeightsReady | Finished) -> None:
        match message:
            case Resumed():
                self._on_resumed(message)
            case Credit():
                self.scheduler.on_credit(message.groups)
            case StepDone():
                self.scheduler.on_step_done(message)
            case WeightsReady():
                self.updater.on_manifest(message.manifest)
            case Finished():
                self.inputs.folder.event("saved", checkpoint=message.checkpoint)
                self.has_saved = True

    def _on_resumed(self, message: Resumed) -> None:
        """The learner loaded a checkpoint, or found none: nothing was launched yet."""
        if self.stage != "starting" or self.resumed is not None:
            raise RunError(f"the learner resumed from {message.checkpoint} while {self.stage}")
        self.resumed = message
        folder, version, position = self.inputs.folder, message.policy_version, message.position
        # Numbers of arms that ran after the checkpoint are in the folder's rows already.
        first_arm = max(position.num_arms, folder.next_arm)
        self.scheduler.dispatcher.begin_at(version, message.last_group_id + 1, first_arm)
        if not message.checkpoint:
            log.info("run.resume: no whole checkpoint under %s, so the run starts anew", folder.path)
            return
        if not self.feed.begin_at(position):
            log.warning("other prompts or another run.seed than in %s: their order starts anew", message.checkpoint)
            position = Position()
        self.tally.resumed_at = version
        log.info(
            "resumed at version %d, position %d, from %s; %d earlier prompts were in flight and are sampled again",
            version, position.next_turn, message.checkpoint, len(position.open_turns),
        )  # fmt: skip
        log.info(
            "not resumed: what earlier visits found of each prompt, quarantined prompts, and the selector's memory"
        )
        folder.event(
            "resumed", t=self._now(), version=version, checkpoint=message.checkpoint, position=position.next_turn,
            in_flight=len(position.open_turns), first_group=message.last_group_id + 1, first_arm=first_arm,
        )  # fmt: skip

    async def _on_published(self, version: int) -> None:
        self.inputs.folder.event("published", t=self._now(), version=version)
        await self.tell_learner(WeightsPublished(policy_version=version))
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
        self.evaluator.on_lost([key for key in keys if key.arm < 0])
        self.scheduler.on_lost([key for key in keys if key.arm >= 0])
        self._wake()

    def _on_step(self, step: StepDone, reward: float | None) -> None:
        self._stepped_at = asyncio.get_running_loop().time()
        self.inputs.folder.event(
            "step",
            t=self._now(),
            step=step.policy_version,
            version=step.policy_version,
            first_sample_reward=reward,
            reward_mean=self.tally.reward_mean,
            useful_groups=self.tally.step_useful_groups,
            groups_trained=self.tally.groups_trained,
            vacant_places=self.tally.vacant_places,
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

    def _past_of(self, prompt_id: str) -> Past:
        dispatcher = self.scheduler.dispatcher
        return dispatcher.history.past(prompt_id, dispatcher.generation_version)

    def _on_passed_over(self, turns: int) -> None:
        self.tally.prompts_passed_over += turns
        self.inputs.recorder.prompts(passed_over=turns)

    def _on_skipped(self, row: PromptRow) -> None:
        self.tally.prompts_skipped += 1
        self.inputs.recorder.prompts(skipped=1)
        self.inputs.folder.event("skipped", t=self._now(), prompt_id=row.prompt_id)

    def _wake(self) -> None:
        self.scheduler.wake()
        self.evaluator.wake()
        self._progress.set()

    def _now(self) -> float:
        """Seconds since training began (negative before)."""
        return round(asyncio.get_running_loop().time() - self.tally.started_at, 3) if self.tally.started_at else 0.0
