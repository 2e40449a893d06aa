"""One run from start to end, phase by phase.

Phases: starting (children boot, version 0 is verified) -> evaluating -> training -> draining -> evaluating -> saving.
Invariants: every wait of a phase has a deadline and says what it waited for; a failed task ends the run with its cause.
"""

import asyncio
import logging
from dataclasses import dataclass

from engine.evaluate import Accuracy
from engine.exchange import Exchange
from engine.launch import LEARNER, learner_command, worker_commands
from engine.summary import SummaryValue, Times, summarize
from engine.wire import Stop

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Coordinator:
    """Takes a run through its phases."""

    exchange: Exchange
    interrupted: str = ""
    """Name of the signal that asked the run to finish."""
    before: Accuracy | None = None
    after: Accuracy | None = None
    started_at: float = 0.0
    _setup_s: float = 0.0

    async def run(self) -> dict[str, SummaryValue]:
        """The whole run; returns its summary. Children still run when it returns or raises: the owner stops them."""
        exchange, loop = self.exchange, asyncio.get_running_loop()
        self.started_at = loop.time()
        reader = exchange.tasks.create_task(exchange.read())
        updater = exchange.tasks.create_task(exchange.updater.run())
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
        tally = exchange.tally
        times = Times(loop.time() - self.started_at, self._setup_s, tally.ended_at - tally.started_at)
        held = exchange.scheduler.held_tokens
        return summarize(tally, exchange.updater.history, self.before, self.after, times, held)

    def interrupt(self, signal_name: str) -> bool:
        """Finish training, save and end; False when the run is in no phase that can be cut short."""
        self.interrupted = signal_name
        self.exchange.notice()
        return self.exchange.stage in ("training", "draining", "saving")

    async def _start(self) -> None:
        exchange = self.exchange
        inputs, worker = exchange.inputs, exchange.inputs.config.worker
        log.info("%s", inputs.cores.describe())
        address = inputs.hub.address
        for command in worker_commands(inputs.config, inputs.folder, address, inputs.cores):
            await exchange.supervisor.start(command)
        await exchange.supervisor.start(learner_command(inputs.config, inputs.folder, address, inputs.cores))
        await exchange.until(
            lambda: exchange.updater.published >= 0 and len(exchange.fleet.live) >= worker.count,
            worker.boot_deadline_s,
            "workers and learner to start",
        )

    async def _evaluate(self, when: str) -> Accuracy | None:
        inputs = self.exchange.inputs
        if not inputs.test:
            return None
        self.exchange.stage = "evaluating"
        accuracy = await self.exchange.evaluator.measure(inputs.test)
        log.info("held-out accuracy %s training: %.3f", when, accuracy.sampled)
        inputs.folder.event(
            "evaluated", when=when, accuracy=accuracy.sampled, greedy=accuracy.greedy, by_level=accuracy.by_level
        )
        return accuracy

    async def _train(self) -> None:
        exchange, loop = self.exchange, asyncio.get_running_loop()
        config, tally, scheduler = exchange.inputs.config, exchange.tally, exchange.scheduler
        exchange.stage = "training"
        tally.started_at = loop.time()
        exchange.tasks.create_task(exchange.feed.run())
        exchange.tasks.create_task(scheduler.run())
        scheduler.on_published(exchange.updater.published)
        limit_s, idle_s = config.run.max_train_s, config.learner.idle_deadline_s
        dispatcher, max_steps = scheduler.dispatcher, config.run.max_steps
        if 0 < max_steps <= dispatcher.outbox.learner_version:
            log.warning("run.max_steps = %d was reached before this start: nothing is left to train", max_steps)
        while not (self.interrupted or scheduler.is_starved or 0 < max_steps <= dispatcher.outbox.learner_version):
            left_s = tally.started_at + limit_s - loop.time() if limit_s else float("inf")
            if left_s <= 0:
                break
            steps = tally.steps
            await exchange.until(
                lambda steps=steps: tally.steps > steps or bool(self.interrupted) or scheduler.is_starved,
                min(left_s, idle_s),
                "an optimizer step",
                is_fatal=left_s > idle_s,
            )

    async def _drain(self) -> None:
        exchange = self.exchange
        exchange.stage = "draining"
        exchange.tally.ended_at = asyncio.get_running_loop().time()
        await exchange.scheduler.stop()
        exchange.feed.stop()
        deadline_s = exchange.inputs.config.server.drain_deadline_s
        await exchange.until(lambda: exchange.scheduler.is_idle, deadline_s, "aborted samples and open verdicts")
        await exchange.until(
            lambda: exchange.updater.published >= exchange.scheduler.dispatcher.outbox.learner_version,
            deadline_s,
            "the last weight update",
        )

    async def _save(self) -> None:
        exchange = self.exchange
        exchange.stage = "saving"
        hub = exchange.inputs.hub
        exchange.supervisor.expect_exit(LEARNER, only_clean=True)  # a failure to save ends the run with its cause
        await exchange.tell_learner(Stop(reason="the run is over"))
        deadline_s = exchange.inputs.config.server.drain_deadline_s
        await exchange.until(lambda: exchange.has_saved, deadline_s, "the learner's last checkpoint")
        exchange.supervisor.expect_exit(LEARNER)
        for worker in list(exchange.fleet.workers):
            exchange.supervisor.expect_exit(worker)
            await hub.send(worker, Stop(reason="the run is over"))
