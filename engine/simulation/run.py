"""One simulated run of a configuration: its laws, its learner's speed, the driver, the report."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from configs.root import Config
from engine.core.dispatcher import Dispatcher
from engine.core.prior import Prior
from engine.policy import make_policy
from engine.profiles import load_law
from engine.selection import make_selection
from engine.simulation.books import Books, Weigher
from engine.simulation.driver import Driver, Speed
from engine.simulation.law import Laws
from engine.simulation.pace import measure_step_s
from engine.simulation.queue import Queue
from engine.simulation.report import Report, make_report

FEW_RATES = 32
"""Distinct rates of a profile that are reported one by one, at most."""


def simulate(config: Config, step_s: float | None = None) -> Report:
    """Play the run that `config` describes.

    Args:
        config: Everything but the learner's step time.
        step_s: Virtual seconds of a step; None = by `sim.learner_ratio`.

    Raises:
        ConfigError: a strategy that cannot be built.
        DataError: an unusable profile file.
        RunError: a run that stands still.
    """
    sim = config.sim
    prior = load_law(sim.pass_rate, "sim.pass_rate")
    policy = replace(make_policy(config), seed=sim.seed, fixed_width=sim.width or config.strategy.width)
    speed = Speed(sim.workers * sim.slots, sim.tokens_per_s, sim.latency_s, 0.0, sim.update_s)
    laws, first_visits = Laws(sim, prior), sim.model_copy(update={"epochs": 1})
    books = Books(sim.prompts * sim.epochs, policy.rule, weighers=_weighers(config, prior))
    with _without_garbage_collection():
        if step_s is None:
            step_s = measure_step_s(
                policy, speed, lambda seed: Laws(first_visits.model_copy(update={"seed": seed}), prior)
            )
        fails_after = laws.fails_after if sim.failure_rate else None
        speed = replace(speed, step_s=step_s)
        dispatcher, selection = Dispatcher(policy), replace(make_selection(config), seed=sim.seed)
        queue = iter(Queue(laws, selection, dispatcher, books))
        driver = Driver(dispatcher, speed, laws.draw, queue, books, fails_after, selection)
        started_at = time.perf_counter()
        driver.run()
        wall_s = time.perf_counter() - started_at
    return make_report(config.strategy.name, books, driver, laws, wall_s)


def _weighers(config: Config, prior: Prior) -> dict[float, Weigher]:
    """One for each pass rate, where they were given as numbers or are few."""
    is_few = len(prior.pieces) <= FEW_RATES and all(piece.low == piece.high for piece in prior.pieces)
    if isinstance(config.sim.pass_rate, str) and not is_few:
        return {}
    return {piece.low: Weigher() for piece in prior.pieces}


@contextmanager
def _without_garbage_collection() -> Generator[None]:
    """A run makes no reference cycles, and walking millions of live objects for none costs a third of the time."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
