"""One simulated run of a configuration: its laws, its learner's speed, the driver, the report."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from configs.root import Config
from engine.core.dispatcher import Dispatcher
from engine.core.policy import Policy
from engine.core.prior import Prior
from engine.core.rng import derive
from engine.core.staleness import Bound
from engine.policy import make_policy
from engine.profiles import load_law
from engine.simulation.books import Books, Weigher
from engine.simulation.driver import Driver, Speed
from engine.simulation.law import Laws
from engine.simulation.report import Report, make_report

WARM_UP_PROMPTS = 2000
"""Visits from which the generators' rate is measured: 2 % of standard error at the published tiers."""
WARM_UP_SLOTS = 64
_WARM_UP_STREAM = 0x7761726D
_NO_STEP = 1 << 60
"""Groups per step of a learner that never steps."""


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
    prior = load_law(sim.pass_rate)
    policy = replace(make_policy(config), seed=sim.seed, fixed_width=sim.width or config.strategy.width)
    slots = sim.workers * sim.slots
    if step_s is None:
        step_s = policy.bound.groups_per_step / (sim.learner_ratio * groups_per_s(config, policy, prior, slots))
    laws = Laws(sim, prior)
    books = Books(sim.prompts, weighers=_weighers(config, prior))
    driver = _driver(policy, laws, books, Speed(slots, sim.tokens_per_s, sim.latency_s, step_s, sim.update_s))
    with _without_garbage_collection():
        started_at = time.perf_counter()
        driver.run()
        wall_s = time.perf_counter() - started_at
    return make_report(config.strategy.name, books, driver, laws, wall_s)


def groups_per_s(config: Config, policy: Policy, prior: Prior, slots: int) -> float:
    """Groups for the learner that `slots` full slots finish a second where nothing expires; infinite if none.

    Measured: slot-seconds of `WARM_UP_PROMPTS` other visits under the same laws, over their groups. One number
    for one configuration and seed, whatever η, B and slots are.
    """
    sim = config.sim.model_copy(update={"seed": derive(config.sim.seed, _WARM_UP_STREAM)})
    books = Books(WARM_UP_PROMPTS)
    speed = Speed(WARM_UP_SLOTS, sim.tokens_per_s, sim.latency_s)
    policy = replace(policy, seed=sim.seed, bound=Bound(0, _NO_STEP))
    with _without_garbage_collection():
        _driver(policy, Laws(sim, prior), books, speed).run()
    if not books.trained_groups:
        return float("inf")
    tokens, samples = books.tokens_counted + books.tokens_wasted, books.counted + books.wasted
    return slots * books.trained_groups / (tokens / sim.tokens_per_s + samples * sim.latency_s)


def _driver(policy: Policy, laws: Laws, books: Books, speed: Speed) -> Driver:
    fails_after = laws.fails_after if laws.config.failure_rate else None
    return Driver(Dispatcher(policy), speed, laws.draw, laws.prompts(), books, fails_after)


def _weighers(config: Config, prior: Prior) -> dict[float, Weigher]:
    """One for each pass rate, where they were given as numbers."""
    if isinstance(config.sim.pass_rate, str):
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
