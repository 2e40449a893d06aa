"""One way to spend the samples: its exact cost without expiry, the split of the GPUs, and a simulated run.

A run is played at a smaller scale: slots and B are divided alike, so that requests a step, ages and expiry stay as they
are and only the noise grows; a rate is then multiplied back. A group's rate comes from the slots' busy share and the
tokens of a useful group, so the run's start and end do not enter.
"""

from dataclasses import dataclass

from configs.load import ConfigError
from configs.root import Config
from configs.sampling import Staleness
from configs.simulation import Simulation
from configs.strategy import Futility
from configs.strategy import Strategy as StrategyConfig
from configs.training import Learner
from engine import strategies
from engine.core.law import exact_law, implied_weight
from engine.core.past import EMPTY
from engine.core.prior import Prior
from engine.core.unbiased import GivesUp, never
from engine.futility_table import Cost, measure, solve
from engine.planning.question import Question
from engine.policy import advantage_rule
from engine.simulation import Report, simulate

NO_EXPIRY = 1_000_000
"""A bound that no sample reaches."""
HARD_RATE, MEDIUM_RATE = 0.1, 0.5
_SLOTS = 64
"""Of a simulated run, where B allows it."""
_GROUPS_PER_STEP = (4, 16)
"""Least and most of a simulated run: the step must stay small beside the run, and not become a single group."""
_MIN_PROMPTS = 20
_COSTLY = 1e9
"""Samples a group that stand for no group at all."""


@dataclass(frozen=True, slots=True)
class Split:
    """Who does what."""

    workers: int
    """GPUs that generate, one worker each."""
    generating: float
    """GPUs' worth of generation: `workers`, or a share of the only GPU."""
    learning: float
    """GPUs' worth of learning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one option costs."""

    label: str
    strategy: StrategyConfig
    max_staleness: int
    split: Split
    samples_per_useful_group: float
    """Exact, without expiry; infinite where no group is ever made."""
    success_share: float
    """Exact probability that a visit makes a useful group, without expiry."""
    report: Report
    useful_groups_per_min: float
    """Simulated, over all GPUs."""
    waste_share: float
    """Simulated: tokens that never counted, of all generated."""
    dropped_share: float
    """Simulated: groups that would have broken the bound at their gradient, of these and the useful ones."""
    lost_share: float
    """Simulated: visits with a signal that ended without a fresh sample of one class, of these and useful groups."""
    hard_weight: float
    """Exact w(0.1) / w(0.5) of a visit."""


@dataclass(frozen=True, slots=True)
class Exact:
    """What is known of an option without playing it."""

    cost: Cost
    """Counted samples of a visit and probability of a useful group, p drawn from the prior."""
    gives_up: GivesUp


def exact(question: Question, own: StrategyConfig, prior: Prior) -> Exact:
    """The exact cost without expiry.

    Raises:
        ConfigError: futility that cannot be solved.
    """
    strategy = strategies.build(own, _config(question, own))
    if own.futility != "optimal":
        return Exact(measure(strategy, prior, None), never)
    try:
        solution = solve(strategy, prior)
    except ValueError as exc:
        raise ConfigError(f"pass rate {question.pass_rate}: {exc}") from exc
    return Exact(solution.cost, lambda counts: solution.table.stops(counts, EMPTY))


def hard_weight(question: Question, own: StrategyConfig, gives_up: GivesUp) -> float:
    """Implied prompt weight w(0.1) over w(0.5), with the strategy's own advantages (engine/core/law.py)."""
    config = _config(question, own)
    strategy, rule = strategies.build(own, config), advantage_rule(config.advantage, own.name)
    hard, medium = (
        implied_weight(exact_law(strategy, rate, strategy.n_max, gives_up), rule) for rate in (HARD_RATE, MEDIUM_RATE)
    )
    return hard / medium


def balanced_split(question: Question, samples_per_group: float, kept: int) -> Split:
    """The split of the GPUs whose slower side is fastest.

    With w GPUs generating and the rest learning, w·G/(samples x response tokens) groups a second are made and
    (gpus - w)·L/(trained tokens) are trained. A single GPU does both in turns, each its share of the time.

    Args:
        question: Speeds G and L, lengths.
        samples_per_group: Of a useful group.
        kept: Samples that are trained of it.
    """
    generation_s, learning_s = gpu_seconds(question, samples_per_group, kept)
    if question.gpus == 1:
        share = generation_s / (generation_s + learning_s)
        return Split(1, share, 1.0 - share)
    workers = max(range(1, question.gpus), key=lambda w: min(w / generation_s, (question.gpus - w) / learning_s))
    return split_of(question, workers)


def split_of(question: Question, workers: int) -> Split:
    """So many GPUs generate, the others learn."""
    return Split(workers, float(workers), float(question.gpus - workers))


def gpu_seconds(question: Question, samples_per_group: float, kept: int) -> tuple[float, float]:
    """Seconds of one GPU to generate a useful group, and to train it."""
    generated = samples_per_group * question.response_tokens
    return generated / question.generation_tokens_per_s, question.trained_tokens(kept) / question.learner_tokens_per_s


@dataclass(frozen=True, slots=True)
class Option:
    """A strategy, and optionally a split of its own."""

    label: str
    strategy: StrategyConfig
    workers: int = 0
    """0 = the balanced split."""


def play(question: Question, prior: Prior, option: Option, max_staleness: int) -> Outcome:
    """Exact cost, split and a simulated run of an option.

    Raises:
        ConfigError, DataError, RunError: as `simulate`.
    """
    own = option.strategy
    known = exact(question, own, prior)
    kept = own.group_size or own.n_max
    split = (
        split_of(question, option.workers)
        if option.workers
        else balanced_split(question, min(known.cost.per_useful, _COSTLY), kept)
    )
    report = _simulated(question, own, split, known.cost, max_staleness)
    tokens_per_s = split.generating * question.generation_tokens_per_s * report.worker_busy_ratio
    tokens = report.tokens_per_useful_group
    return Outcome(
        label=option.label,
        strategy=own,
        max_staleness=max_staleness,
        split=split,
        samples_per_useful_group=known.cost.per_useful,
        success_share=known.cost.useful,
        report=report,
        useful_groups_per_min=60.0 * tokens_per_s / tokens if tokens else 0.0,
        waste_share=_share(report.tokens_wasted, report.tokens_generated),
        dropped_share=_share(report.groups_dropped, report.groups_dropped + report.useful_groups),
        lost_share=_share(report.visits_lost, report.visits_lost + report.useful_groups),
        hard_weight=hard_weight(question, own, known.gives_up),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _simulated(question: Question, own: StrategyConfig, split: Split, cost: Cost, max_staleness: int) -> Report:
    batch, slots = _scaled(question, split)
    scale = batch / question.groups_per_step
    sim = Simulation(
        pass_rate=question.pass_rate,
        prompts=max(_MIN_PROMPTS, round(question.samples / cost.samples)),
        slots=slots,
        seed=question.seed,
        tokens_mean=question.response_tokens,
        tokens_per_s=scale * split.generating * question.generation_tokens_per_s / slots,
    )
    parts = {"sim": sim, "staleness": Staleness(max=max_staleness), "learner": Learner(groups_per_step=batch)}
    trained = question.groups_per_step * question.trained_tokens(own.group_size or own.n_max)
    step_s = trained / (split.learning * question.learner_tokens_per_s)
    return simulate(_config(question, own).model_copy(update=parts), step_s=step_s)


def _scaled(question: Question, split: Split) -> tuple[int, int]:
    """B and slots of the simulated run."""
    least, most = _GROUPS_PER_STEP
    slots = split.workers * question.slots
    batch = min(question.groups_per_step, max(least, min(most, round(_SLOTS * question.groups_per_step / slots))))
    return batch, max(1, round(slots * batch / question.groups_per_step))


def _config(question: Question, own: StrategyConfig) -> Config:
    return Config(strategy=own, futility=Futility(prior=question.pass_rate))
