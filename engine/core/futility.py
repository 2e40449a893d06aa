"""Which arms are not worth the rest of their samples: a threshold on the odds of the exit, or the optimal table.

Asked after a counted sample whose verdict is `continue`, so every visit counts at least one sample, and a prompt that
was hopeless at its last visit is looked at again. A stopped arm is deferred: its counts enter the prompt's past.
Invariants: a decision depends on the counts and the past alone, never on latency or on the order of arrival; both
rules answer in constant time. The table is solved in engine/futility_table.py.
"""

import math
from dataclasses import dataclass, field

from engine.core.past import Past
from engine.core.policy import Futility
from engine.core.strategy import Counts, Strategy

_State = tuple[int, int, int, tuple[int, int] | None]
"""(right, wrong, budget, what the exit misses; None where nothing expired, so that the counts say it)."""
PAST_CAP = 32
"""Samples of a past that the table knows apart; 561 pasts. A longer past is scaled down to them with its rate kept:
it is old, and 32 wrong samples already decide."""


def first_stop(rule: Futility, counts: Counts, past: Past, need: int) -> int:
    """Samples after which `rule` may stop an arm for the first time, `need` at most, whatever they turn out to be."""
    for ahead in range(1, need):
        for right in range(ahead + 1):
            wrong = ahead - right
            after = Counts(
                counts.fresh_right + right,
                counts.fresh_wrong + wrong,
                counts.right + right,
                counts.wrong + wrong,
                counts.budget,
                counts.seed,
            )
            if rule.stops(after, past):
                return ahead
    return need


def place(right: int, wrong: int) -> int:
    """Position of a pair of counts among all pairs, by total and then by right ones: (0,0), (0,1), (1,0), (0,2), .."""
    total = right + wrong
    return total * (total + 1) // 2 + right


@dataclass(frozen=True, slots=True)
class Threshold:
    """`strategy.futility = "threshold"`: stop where the exit has become unlikely within what is left of the budget.

    p ~ Beta(α, β), updated with the past and all counted samples; the exit is then reached with the beta-binomial
    probability of at least the missing samples of each class among those left (Skellam, JRSS B 10, 1948, for the law;
    stopping at a predictive probability as Lee and Liu do, Clinical Trials 5, 2008; the past is ours).
    Where no class is missing (0, 0), no exit is looked for and nothing stops.
    """

    strategy: Strategy
    p_success: float
    """Stops below it; 0 = never."""
    prior_right: float
    """α > 0."""
    prior_wrong: float
    """β > 0."""
    needs_expiry: bool = False
    """`strategy.futility = "expired"`: ask only where a sample of this visit expired. Such an arm has lost what it paid
    for and would pay again under the same clock; without expiry nothing changes."""
    _known: dict[_State, bool] = field(default_factory=dict[_State, bool])
    """Decisions, of arms without a past."""
    _known_sure: dict[tuple[int, int, int, int], int] = field(default_factory=dict[tuple[int, int, int, int], int])
    """(right, wrong, budget, need) -> how many are sure, of arms without a past and without expired samples."""

    def num_sure(self, counts: Counts, past: Past, need: int) -> int:
        """How many of the next `need` samples count whatever they are."""
        has_expired = counts.fresh_right + counts.fresh_wrong < counts.right + counts.wrong
        if self.needs_expiry and not has_expired:
            return need
        if has_expired or past.total > 0.0:
            return first_stop(self, counts, past, need)
        key = (counts.right, counts.wrong, counts.budget, need)
        known = self._known_sure.get(key)
        if known is None:
            known = self._known_sure[key] = first_stop(self, counts, past, need)
        return known

    def stops(self, counts: Counts, past: Past) -> bool:
        """Whether an arm that would go on stops here."""
        has_expired = counts.fresh_right + counts.fresh_wrong < counts.right + counts.wrong
        if self.needs_expiry and not has_expired:
            return False
        if past.total > 0.0:
            return self._decide(counts, past)
        key = (counts.right, counts.wrong, counts.budget, self.strategy.missing(counts) if has_expired else None)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._decide(counts, past)
        return known

    def _decide(self, counts: Counts, past: Past) -> bool:
        alpha = self.prior_right + past.right + counts.right
        beta = self.prior_wrong + past.wrong + counts.wrong
        missing = self.strategy.missing(counts)
        return exit_probability(alpha, beta, counts.budget - counts.total, missing) < self.p_success


def exit_probability(alpha: float, beta: float, num_left: int, missing: tuple[int, int]) -> float:
    """P(a <= X <= num_left - b) for (a, b) = `missing`, X ~ BetaBinomial(num_left, alpha, beta).

    Summed over the a + b terms outside, so the absolute error is that of 1 - sum (about 1e-13).
    """
    right, wrong = missing
    if right + wrong > num_left:
        return 0.0
    outside = _fewer_than(right, alpha, beta, num_left) + _fewer_than(wrong, beta, alpha, num_left)
    return max(0.0, 1.0 - outside)


def _fewer_than(bound: int, alpha: float, beta: float, num: int) -> float:
    """P(X < bound), X ~ BetaBinomial(num, alpha, beta), bound <= num."""
    if bound <= 0:
        return 0.0
    # Logarithms: P(X = 0) may be below any float where P(X < bound) is not.
    log_term = math.lgamma(beta + num) + math.lgamma(alpha + beta) - math.lgamma(beta) - math.lgamma(alpha + beta + num)
    total = math.exp(log_term)
    for x in range(bound - 1):
        log_term += math.log((num - x) / (x + 1) * (alpha + x) / (beta + num - x - 1))
        total += math.exp(log_term)
    return total


@dataclass(frozen=True, slots=True)
class OptimalTable:
    """`strategy.futility = "optimal"`: the states in which no way of going on is worth its samples.

    One bit for every (past, state). A past shifts the prior of its prompt; the price of a useful group is the same for
    all, that of first visits, so a prompt with a bad past is stopped where its samples would buy more elsewhere.
    Limits: a past is rounded to whole samples and capped (`PAST_CAP`). Expired samples of this visit count as past:
    they tell of p and bring the exit no nearer; that they also used up budget is not seen, so such an arm may stop a
    little late. An arm whose budget was raised past `n_max` (unresolved = "requeue") is not stopped after n_max.
    """

    n_max: int
    """Budget that the table was solved for."""
    price: float
    """Samples of a useful group at the optimum, over first visits."""
    bits: bytes
    """Bit place(past)·n_max(n_max + 1)/2 + place(state), the highest of its byte first; 1 = stop."""

    def num_sure(self, counts: Counts, past: Past, need: int) -> int:
        """How many of the next `need` samples count whatever they are."""
        return first_stop(self, counts, past, need)

    def stops(self, counts: Counts, past: Past) -> bool:
        """Whether an arm that would go on stops here."""
        if counts.total >= self.n_max:
            return False
        right = past.right + (counts.right - counts.fresh_right)
        wrong = past.wrong + (counts.wrong - counts.fresh_wrong)
        index = place(counts.fresh_right, counts.fresh_wrong)
        if right or wrong:
            index += _past_place(right, wrong) * place(0, self.n_max)
        return bool(self.bits[index >> 3] >> (7 - (index & 7)) & 1)


def _past_place(right: float, wrong: float) -> int:
    """Place of a past that is rounded to whole samples, PAST_CAP at most."""
    total = right + wrong
    num = min(PAST_CAP, round(total))
    num_right = min(num, round(right * min(1.0, PAST_CAP / total)))
    return place(num_right, num - num_right)
