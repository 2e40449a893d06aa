"""One simulated run of a configuration: its laws, its learner's speed, the driver, the report."""

import gc
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from configs.root import Config
from engine.core.arm import Prompt
from engine.core.dispatcher import Dispatcher
from engine.core.prior import Prior
from engine.policy import make_policy
from engine.profiles import load_law
from engine.simulation.books import Books, Weigher
from engine.simulation.driver import Driver, Speed
from engine.simulation.law import Laws
from engine.simulation.pace import measure_step_s
from engine.simulation.report import Report, make_report


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
    speed = Speed(sim.workers * sim.slots, sim.tokens_per_s, sim.latency_s, 0.0, sim.update_s)
    laws = Laws(sim, prior)
    books = Books(sim.prompts, policy.rule, weighers=_weighers(config, prior))
    with _without_garbage_collection():
        if step_s is None:
            step_s = measure_step_s(policy, speed, lambda seed: Laws(sim.model_copy(update={"seed": seed}), prior))
        fails_after = laws.fails_after if sim.failure_rate else None
        speed = replace(speed, step_s=step_s)
        driver = Driver(Dispatcher(policy), speed, laws.draw, _queue(laws, books), books, fails_after)
        started_at = time.perf_counter()
        driver.run()
        wall_s = time.perf_counter() - started_at
    return make_report(config.strategy.name, books, driver, laws, wall_s)


def _queue(laws: Laws, books: Books) -> Iterator[Prompt]:
    """The prompts that are reported, and others behind them while they are needed.

    Whitened groups wait for the rest of their step: there others are needed until the last group is taken.
    """
    prompts = laws.prompts()
    yield from islice(prompts, books.num_prompts)
    while not (books.is_done if books.rule.whiten else books.has_enough):
        yield next(prompts)


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
