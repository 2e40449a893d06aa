"""What people see while a run goes on: the live view, /healthz, gauges, and how late the event loop is.

Consumes: the coordinator's state, once a second. Produces: `Progress` for the view, gauges for the recorder.
Ends by cancellation.
"""

import asyncio
from dataclasses import dataclass, field

from engine.coordinator import Coordinator
from engine.verifiers import VerifierPool
from metrics.live import LiveView
from metrics.progress import Progress
from metrics.server import Health

PERIOD_S = 1.0


@dataclass(slots=True)
class StatusReporter:
    """Draws the run once a second."""

    coordinator: Coordinator
    grader: VerifierPool
    view: LiveView
    _rates: "_Rates" = field(default_factory=lambda: _Rates())

    async def run(self) -> None:
        """Draw for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += PERIOD_S
            await asyncio.sleep(max(0.0, due - loop.time()))
            recorder = self.coordinator.exchange.inputs.recorder
            recorder.loop_lag(max(0.0, loop.time() - due))
            recorder.verifier_queue(self.grader.statistics().queue_length)
            recorder.worker_up(len(self.coordinator.exchange.fleet.live))
            self.view.update(self._progress(loop.time()))

    def health(self) -> Health:
        """State for /healthz: stalled = no step for longer than the learner may wait for a group."""
        exchange = self.coordinator.exchange
        since = exchange.seconds_since_step()
        limit = exchange.inputs.config.learner.idle_deadline_s
        is_stalled = exchange.stage == "training" and since is not None and since > limit
        status = "starting" if exchange.stage == "starting" else "stalled" if is_stalled else "ok"
        return Health(status, max(0, exchange.updater.published), since)

    def _progress(self, now: float) -> Progress:
        coordinator, exchange = self.coordinator, self.coordinator.exchange
        tally, dispatcher = exchange.tally, exchange.scheduler.dispatcher
        ledger = tally.ledger
        self._rates.observe(now, ledger.generated + ledger.evaluated, tally.learner_tokens)
        return Progress(
            elapsed_s=now - coordinator.started_at,
            stage=exchange.stage,
            step=dispatcher.outbox.learner_version,
            steps_total=exchange.inputs.config.run.max_steps,
            first_sample_reward=tally.reward_mean,
            useful_groups_per_min=tally.useful_groups_per_min(now) if tally.started_at else 0.0,
            arms={
                "sampling": len(dispatcher.arms),
                "waiting": len(dispatcher.outbox.ready),
                "training": dispatcher.outbox.num_shipped,
            },
            samples_counted=tally.samples_counted,
            budget_spent=tally.samples_launched,
            tokens={
                "trained": ledger.trained,
                "counted": ledger.counted,
                "aborted": ledger.aborted,
                "failed": ledger.failed,
                "evaluated": ledger.evaluated,
            },
            staleness_mean=tally.staleness_mean,
            staleness_max=tally.max_staleness,
            generation_tokens_per_s=self._rates.generation,
            learner_tokens_per_s=self._rates.learning,
            weight_updates=max(0, exchange.updater.published),
            accuracy_before=coordinator.before.sampled if coordinator.before else None,
        )


@dataclass(slots=True)
class _Rates:
    """Tokens a second over the last half minute."""

    generation: float = 0.0
    learning: float = 0.0
    _points: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])

    def observe(self, now: float, generated: int, learned: int) -> None:
        """One reading of both totals."""
        self._points.append((now, generated, learned))
        while now - self._points[0][0] > 30.0:
            self._points.pop(0)
        then, past_generated, past_learned = self._points[0]
        if now > then:
            self.generation = (generated - past_generated) / (now - then)
            self.learning = (learned - past_learned) / (now - then)
