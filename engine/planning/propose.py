"""From a question to a plan: which K, N_max, width, split and η, what the alternatives cost, and why.

The rules are ours and are printed with every plan:
- N_max for a K: the smallest of 4, 8, 16, 32 and 64 K that makes at least 0.9 times the useful groups a visit that 64 K
  makes. Below it hard prompts lose their groups, above it they take most of the samples.
- K: the smallest from 2 on whose GPU time a kept sample (generation and training, exact, without expiry) is at most
  10 % above the cheapest's. Cost hardly decides between K, and a smaller K puts more different prompts into a step and
  ends visits sooner. Not 1: the pool's mean is then as biased as it gets (0.40 for p = 0.2; 0.27 at 2/2).
- Split: the slower side is as fast as it can be; then one worker more or less, if the simulated rate is better by 1 %.
- η: the smallest of 1, 2, 4 and 8 whose tokens a useful group are at most 10 % above those without expiry, simulated
  with the same prompts; where no group is simulated there is nothing to compare, and it is 8.
- Width: by need. It wastes nothing, and slots are filled by more arms.
No rule knows which K, η or exit makes a model learn fastest: that is measured in a run.
"""

from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.strategy import Strategy as StrategyConfig
from engine.core.prior import Prior
from engine.futility_table import MAX_BUDGET, Cost
from engine.planning.question import Memory, Question, estimate_memory
from engine.planning.rules_of_thumb import RulesOfThumb, median, rules_of_thumb
from engine.planning.trial import NO_EXPIRY, Option, Outcome, exact, gpu_seconds, play
from engine.profiles import load_law

KS = (1, 2, 4, 8)
MULTIPLES = (4, 8, 16, 32, 64)
STALENESS = (1, 2, 4, 8)
KEPT_GROUPS = 0.9
TOLERANCE = 1.1
_BETTER = 1.01
_FUTILITY_N_MAX = 256
"""Above it solving the table takes seconds: the row is left out."""


@dataclass(frozen=True, slots=True)
class Size:
    """One K with its N_max."""

    k: int
    n_max: int
    cost: Cost
    """Exact, without expiry."""
    gpu_s_per_kept: float
    """GPU seconds of generation and training a kept sample."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The proposal and everything it was compared with."""

    question: Question
    p_mean: float
    p_median: float
    sizes: tuple[Size, ...]
    size: Size
    chosen: Outcome
    etas: tuple[Outcome, ...]
    """The chosen size at each η that was tried; the last one has no expiry."""
    alternatives: tuple[Outcome, ...]
    rules: RulesOfThumb
    memory: Memory

    @property
    def overrides(self) -> list[str]:
        """What `engine.serve` takes."""
        own, chosen = self.chosen.strategy, self.chosen
        return [
            f"strategy.name={own.name}",
            f"strategy.k_pos={own.k_pos}",
            f"strategy.k_neg={own.k_neg}",
            f"strategy.n_max={own.n_max}",
            f"strategy.group_size={own.group_size}",
            f"strategy.width={own.width}",
            f"strategy.futility={own.futility}",
            f"staleness.max={chosen.max_staleness}",
            f"learner.groups_per_step={self.question.groups_per_step}",
            f"worker.count={chosen.split.workers}",
            f"worker.slots={self.question.slots}",
        ]


def propose(question: Question) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: an input out of range, or prompts that can never make a group with both classes.
        DataError: a law of pass rates that cannot be read.
    """
    question.check()
    prior = load_law(question.pass_rate, "--pass-rate")
    p_median = median(prior)
    rules = rules_of_thumb(p_median, question.groups_per_step)
    sizes = tuple(_size(question, prior, k) for k in KS)
    size = _choose(sizes)
    etas = _try_staleness(question, prior, Option("proposal", balance(size.k, size.n_max)))
    max_staleness = etas[-2].max_staleness
    chosen, neighbours = tune_split(question, prior, etas[-2])
    options = _alternatives(size, sizes, rules)
    return Plan(
        question=question,
        p_mean=prior.next_right(),
        p_median=p_median,
        sizes=sizes,
        size=size,
        chosen=chosen,
        etas=tuple(etas),
        alternatives=(*neighbours, *(play(question, prior, option, max_staleness) for option in options)),
        rules=rules,
        memory=estimate_memory(question),
    )


def balance(k: int, n_max: int, width: int = 0, futility: bool = False) -> StrategyConfig:
    """`balance` with K of each class."""
    return StrategyConfig(
        name="balance",
        k_pos=k,
        k_neg=k,
        n_max=n_max,
        group_size=2 * k,
        width=width,
        futility="optimal" if futility else "none",
    )


def _size(question: Question, prior: Prior, k: int) -> Size:
    costs = {factor * k: exact(question, balance(k, factor * k), prior).cost for factor in MULTIPLES}
    most = costs[MULTIPLES[-1] * k].useful
    if most == 0.0:
        raise ConfigError(
            f"--pass-rate {question.pass_rate}: no prompt can be both right and wrong, so no group has a signal;"
            " some pass rate must lie inside (0, 1)"
        )
    n_max = next(n for n, cost in costs.items() if cost.useful >= KEPT_GROUPS * most)
    return Size(k, n_max, costs[n_max], sum(gpu_seconds(question, costs[n_max].per_useful, 2 * k)) / (2 * k))


def _choose(sizes: tuple[Size, ...]) -> Size:
    allowed = [size for size in sizes if size.k >= 2]
    cheapest = min(size.gpu_s_per_kept for size in allowed)
    return next(size for size in allowed if size.gpu_s_per_kept <= TOLERANCE * cheapest)


def _try_staleness(question: Question, prior: Prior, option: Option) -> list[Outcome]:
    """Runs at rising η up to the first that is good enough, then the run without expiry."""
    free = play(question, prior, option, NO_EXPIRY)
    limit = TOLERANCE * (free.report.tokens_per_useful_group or 0.0)
    tried: list[Outcome] = []
    for max_staleness in STALENESS:
        tried.append(play(question, prior, option, max_staleness))
        tokens = tried[-1].report.tokens_per_useful_group
        if tokens is not None and tokens <= limit:
            break
    return [*tried, free]


def tune_split(question: Question, prior: Prior, start: Outcome) -> tuple[Outcome, list[Outcome]]:
    """The proposal (the start or a neighbour of its split, whichever simulates better), and the others."""
    found = [start]
    for workers in (start.split.workers - 1, start.split.workers + 1):
        if 1 <= workers < question.gpus:
            option = Option(f"{workers} workers", start.strategy, workers)
            found.append(play(question, prior, option, start.max_staleness))
    best = max(found[1:], key=lambda outcome: outcome.useful_groups_per_min, default=start)
    # Not below: without any group both rates are 0.
    if best.useful_groups_per_min <= _BETTER * start.useful_groups_per_min:
        return start, found[1:]
    others = [replace(start, label=f"{start.split.workers} workers"), *found[1:]]
    return replace(best, label=start.label), [outcome for outcome in others if outcome.label != best.label]


def _alternatives(size: Size, sizes: tuple[Size, ...], rules: RulesOfThumb) -> list[Option]:
    k, n_max = size.k, size.n_max
    options = [Option(f"K = {other.k}", balance(other.k, other.n_max)) for other in sizes if other is not size]
    if n_max // 2 >= 2 * k:
        options.append(Option("half the N_max", balance(k, n_max // 2)))
    if 2 * n_max <= MAX_BUDGET:
        options.append(Option("twice the N_max", balance(k, 2 * n_max)))
    options.append(Option("width 8", balance(k, n_max, width=8)))
    if n_max <= _FUTILITY_N_MAX:
        options.append(Option("giving up (optimal)", balance(k, n_max, futility=True)))
    options.append(
        Option(
            "rounds 8 x 4 (paper)",
            StrategyConfig(name="rounds", exit="balance", k_pos=2, k_neg=2, n_max=32, group_size=4),
        )
    )
    options.append(Option(f"dapo, n = {2 * k}", StrategyConfig(name="dapo", n_max=2 * k, group_size=2 * k)))
    if rules.n_max <= MAX_BUDGET:
        options.append(Option("the seed's K and N_max", balance(rules.k_init, rules.n_max)))
    return options
