"""The exact law of where an arm stops, by dynamic programming over (right, wrong), and what follows from it. Pure.

Holds for strategies that read counts and nothing else, without expiry or a token budget: every counted sample is fresh,
labels are independent with one pass rate p. What a draining arm counts beyond its stopping sample is not in it. `again`
counts as `continue`, and dice are those of seed 0 (engine/core/unbiased.py).
The simulator, the planner and the tests read costs, success, bias and weights from here instead of sampling them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.advantage import AdvantageRule, Pool
from engine.core.kept import kept_law
from engine.core.past import EMPTY, Past
from engine.core.strategy import Strategy, Verdict
from engine.core.unbiased import GivesUp, State, never, unbiased_table, visited


@dataclass(frozen=True, slots=True)
class Stop:
    """One state where arms stop."""

    right: int
    wrong: int
    verdict: Verdict
    """`solved`, `exhausted` or `futile`."""
    probability: float

    @property
    def total(self) -> int:
        """Counted samples, T."""
        return self.right + self.wrong


@dataclass(frozen=True, slots=True)
class Law:
    """Law of the stopping state of one strategy, at one budget and one pass rate."""

    strategy: Strategy
    budget: int
    pass_rate: float
    stops: tuple[Stop, ...]
    """By ascending total; the probabilities sum to 1."""
    gives_up: GivesUp = never

    def mean(self, value: Callable[[Stop], float]) -> float:
        """Expected value of a function of the stopping state."""
        return math.fsum(stop.probability * value(stop) for stop in self.stops)

    @property
    def expected_samples(self) -> float:
        """E[T]: counted samples of a visit."""
        return self.mean(lambda stop: stop.total)

    @property
    def solved_rate(self) -> float:
        """P(the exit holds)."""
        return self.mean(lambda stop: stop.verdict == "solved")

    @property
    def zero_signal_rate(self) -> float:
        """P(the counts carry no gradient): no spread, or no right sample where right ones only are kept."""
        return self.mean(lambda stop: not self.has_signal(stop))

    @property
    def group_rate(self) -> float:
        """P(a group with signal is made); futile arms make none."""
        return self.mean(lambda stop: stop.verdict != "futile" and self.has_signal(stop))

    @property
    def pool_mean(self) -> float:
        """E[X/T]: the mean of the pool's mean, biased where labels decide T."""
        return self.mean(lambda stop: stop.right / stop.total)

    def has_signal(self, stop: Stop) -> bool:
        """Whether these counts alone can carry a gradient, for 0/1 rewards.

        engine/core/group.py decides it for arms; it also knows greedy responses and rewards of other prompts.
        """
        return stop.right > 0 and (stop.wrong > 0 or self.strategy.selection == "right")


def exact_law(strategy: Strategy, pass_rate: float, budget: int, gives_up: GivesUp = never) -> Law:
    """The law of the stopping state.

    Args:
        strategy: Reads counts only.
        pass_rate: p in [0, 1].
        budget: Samples that the visit may count, >= 1.
        gives_up: Futility rule, asked where the strategy says `continue`.

    Raises:
        ValueError: p outside [0, 1], or as `visited`.
    """
    if not 0.0 <= pass_rate <= 1.0:
        raise ValueError(f"pass_rate must be in [0, 1], got {pass_rate}")
    mass: dict[State, float] = {(0, 0): 1.0}
    stops: list[Stop] = []
    for state, verdict in visited(strategy, budget, gives_up).items():
        right, wrong = state
        here = mass.pop(state)
        if verdict != "continue":
            stops.append(Stop(right, wrong, verdict, here))
            continue
        mass[right + 1, wrong] = mass.get((right + 1, wrong), 0.0) + here * pass_rate
        mass[right, wrong + 1] = mass.get((right, wrong + 1), 0.0) + here * (1.0 - pass_rate)
    return Law(strategy, budget, pass_rate, tuple(stops), gives_up)


def implied_weight(law: Law, rule: AdvantageRule, past: Past = EMPTY, greedy_rate: float = 0.5) -> float:
    """The prompt weight w in E[gradient of a visit] = w·∇p, for a group's mean over its kept samples.

    With S the score function, E[S | right] = ∇p/p and E[S | wrong] = -∇p/q, and advantages that depend on labels only:
    w = E[ΣA+ / n]/p - E[ΣA- / n]/q, n the kept samples, ΣA+ and ΣA- over the kept right and wrong ones, rewards 0 and 1
    (w = 1 for plain REINFORCE with the true mean as baseline, 1/p for the gradient of log p). Visits without a group
    count as zero, whether dropped or trained at zero advantage. Own derivation, after the policy gradient theorem.
    Against a greedy response w is the mean over its two rewards; where labels do not decide T it is the same for both.

    Args:
        law: Its pass rate must lie inside (0, 1).
        rule: Makes the advantages.
        past: The prompt's, for baseline `history`.
        greedy_rate: P(the greedy response is right), in [0, 1], for baseline `greedy`.

    Raises:
        ValueError: p is 0 or 1: there ∇p/p or ∇p/q does not exist. Or the rule whitens: then w depends on the other
            prompts of the step as well.
    """
    if rule.whiten:
        raise ValueError(
            "a whitened advantage has no implied weight of its own: it depends on the step's other prompts"
        )
    rate = law.pass_rate
    if not 0.0 < rate < 1.0:
        raise ValueError(f"pass_rate must be inside (0, 1) for an implied weight, got {rate}")
    estimates = unbiased_table(law.strategy, law.budget, law.gives_up) if rule.baseline == "unbiased" else {}
    greedy = [(0.0, 1.0 - greedy_rate), (1.0, greedy_rate)] if rule.needs_greedy else [(0.0, 1.0)]
    terms: list[float] = []
    for stop in law.stops:
        if stop.verdict == "futile" or not (rule.needs_greedy or law.has_signal(stop)):
            continue
        estimate = estimates.get((stop.right, stop.wrong), 0.0)
        for kept_right, kept_wrong, share in kept_law(law.strategy, stop.right, stop.wrong):
            num_kept = kept_right + kept_wrong
            lost_a_class = law.strategy.selection == "balanced" and not (kept_right and kept_wrong)
            if not num_kept or (lost_a_class and stop.right and stop.wrong):
                continue
            for reward, chance in greedy:
                pool = Pool(stop.right, stop.wrong, kept_right, kept_wrong, past, estimate, reward)
                factors = rule.factors(pool)
                right_sum = kept_right * factors.advantage(1.0, is_right=True)
                wrong_sum = kept_wrong * factors.advantage(0.0, is_right=False)
                each = chance * stop.probability * share / num_kept
                terms.append(each * (right_sum / rate - wrong_sum / (1.0 - rate)))
    return math.fsum(terms)
