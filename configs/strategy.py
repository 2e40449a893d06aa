"""Which strategy spends the samples, and its own settings: one section a family.

Strategies are named as in docs/strategies.md. A name with a colon or a dot, `package.module:Class` or
`package.module.Class`, loads a user's own.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from configs.base import Section

STRATEGIES = (
    "balance", "dapo", "estimate", "filter", "fixed", "giveup", "gvm", "knapsack", "pilot", "positives", "raft",
    "reject", "rounds", "staged", "vip",
)  # fmt: skip
"""Known names; `staged` is a schedule of the others (configs/schedule.py)."""
RUN_WIDE = {
    "accounting", "at_exit", "futility", "max_tokens_per_visit", "raise_by_deadline", "requeue_after", "unresolved",
    "width",
}  # fmt: skip
"""Keys of a strategy that a stage cannot change."""
ALLOCATING = ("estimate", "gvm", "knapsack", "vip")
"""Those whose budgets come from [allocation]."""
KEEPING_ALL = (*ALLOCATING, "dapo", "filter", "fixed", "giveup", "pilot", "raft", "reject")
"""Those whose authors train every sample; the others downsample."""
DOWNSAMPLED = 4
"""Kept samples of arXiv 2510.04996."""


class Strategy(Section):
    """The exit rule of an arm and what is kept of it."""

    name: str = "balance"
    """One of docs/strategies.md, or `package.module:Class` of your own (`package.module.Class` too)."""
    exit: Literal["balance", "positives"] = "balance"
    """The exit that `rounds` tests after each round; the others have their own."""
    k_pos: int = Field(default=2, ge=1)
    """Right samples that an arm needs (balance, positives, rounds)."""
    k_neg: int = Field(default=2, ge=1)
    """Wrong samples that an arm needs (balance, rounds)."""
    n_max: int = Field(default=32, ge=1)
    """Samples that count for one visit of a prompt, at most."""
    group_size: int = Field(default=DOWNSAMPLED, ge=0)
    """Samples kept for training, at most (n); 0 = every fresh one. `auto` or absent: 4, but at most n_max, for balance,
    positives, rounds and your own, 0 for all others, as their authors."""
    round_size: int = Field(default=8, ge=1)
    """Samples of one round (rounds), and of a first visit (gvm)."""
    rounds: int = Field(default=4, ge=1)
    """Rounds at most (rounds): round_size x rounds must be n_max."""
    width: int = Field(default=0, ge=0)
    """Requests in flight for one arm; 0 = by need, the width that wastes nothing."""
    raise_by_deadline: bool = True
    """Let an arm exceed its need when its scarce samples would otherwise expire first (costs some aborted tokens)."""
    accounting: Literal["launch", "completion"] = "launch"
    """`launch`: exit rules read the scored prefix in launch order (unbiased). `completion`: whatever came back first
    (biased to short answers)."""
    at_exit: Literal["abort", "drain"] = "abort"
    """What an arm has under way when its visit would end: `abort`: stopped, never counts. `drain`: finished, counted,
    part of the pool; the arm asks for nothing more and retires when all of it is there."""
    max_tokens_per_visit: int = Field(default=0, ge=0)
    """Counted response tokens at which a visit ends, solved or not; 0 = no limit. Favours short answers."""
    futility: Literal["auto", "none", "expired", "threshold", "optimal"] = "auto"
    """Stop arms that are not worth the rest ([futility]): by a posterior threshold, by the optimal table, or
    (`expired`) by the threshold only where samples expired. `auto`: threshold for balance and positives under a bound
    on staleness; none without one (then the law is that of the exit alone), for the others and with stages."""
    unresolved: Literal["auto", "drop", "keep", "shrink", "requeue", "defer"] = "auto"
    """Arms without signal at their budget's end: replaced; trained at zero advantage; an empty place in the step; given
    their budget again later; visited again soon. `auto`: keep for fixed and rounds (as their authors), shrink for
    filter, drop for the others."""
    requeue_after: int = Field(default=64, ge=0)
    """Prompts admitted before an arm that waits (giveup, requeue) goes on."""

    @model_validator(mode="before")
    @classmethod
    def _keeps_what_its_authors_keep(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        given = dict(cast("Mapping[str, object]", value))
        if given.get("group_size", "auto") == "auto":
            given["group_size"] = own_group_size(given.get("name", "balance"), given.get("n_max", 32))
        return given

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.name not in STRATEGIES and not is_own(self.name):
            known = ", ".join(STRATEGIES)
            raise ValueError(f"strategy.name must be one of {known}, or package.module:Class, got {self.name!r}")
        return self

    @model_validator(mode="after")
    def _exit_is_that_of_rounds(self) -> Self:
        if self.exit == "positives" and self.name not in ("rounds", "positives") and ":" not in self.name:
            raise ValueError(f"strategy.exit must be balance for {self.name}, got positives: only rounds reads it")
        return self

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        rule = self.exit if self.name == "rounds" else self.name
        if rule == "balance" and self.n_max < self.k_pos + self.k_neg:
            raise ValueError(
                f"strategy.n_max must be >= k_pos + k_neg = {self.k_pos + self.k_neg} for {self.name}, got {self.n_max}"
            )
        if rule == "positives" and self.n_max < self.k_pos:
            raise ValueError(f"strategy.n_max must be >= k_pos = {self.k_pos} for {self.name}, got {self.n_max}")
        if rule == "balance" and self.group_size % 2:
            raise ValueError(f"strategy.group_size must be even for {self.name}, got {self.group_size}")
        if self.group_size > self.n_max and self.name not in ("giveup", "pilot", "staged"):
            raise ValueError(f"strategy.group_size must be <= n_max = {self.n_max}, got {self.group_size}")
        if self.name == "giveup" and self.unresolved in ("requeue", "defer"):
            raise ValueError(f"strategy.unresolved must not be {self.unresolved} for giveup: it throws for that itself")
        if self.name == "rounds" and self.round_size * self.rounds != self.n_max:
            product = self.round_size * self.rounds
            raise ValueError(f"strategy.round_size x rounds must be n_max = {self.n_max}, got {product}")
        return self


def is_own(name: str) -> bool:
    """Whether a name is the path of a user's class."""
    return ":" in name or "." in name


def own_group_size(name: object, n_max: object) -> int:
    """The group size of a strategy that is given none; values that are not checked yet may be anything."""
    if name in KEEPING_ALL:
        return 0
    # Even, since balance keeps as many of each class.
    return min(DOWNSAMPLED, n_max - n_max % 2) if isinstance(n_max, int) and n_max > 1 else DOWNSAMPLED


class Advantage(Section):
    """Baseline and weights of a group's advantages (engine/core/advantage.py)."""

    name: Literal[
        "auto", "ada", "grpo", "drgrpo", "rloo", "remax", "reinforce++", "reinforce++_baseline", "maxrl", "raft",
        "signed", "anchored", "hybrid", "custom",
    ] = "auto"  # fmt: skip
    """`ada`: pool mean; `grpo`: kept mean, divided by std; `drgrpo`: kept mean; `rloo`: leave-one-out; `remax`:
    reward of a greedy response; `reinforce++`: whitened over the step; `reinforce++_baseline`: kept mean, then whitened
    over the step; `maxrl`: pool mean, divided by it; `raft`: the reward itself; `signed`: rewards -1 and 1; `anchored`:
    mean of all attempts, group sums to zero; `hybrid`: pool mean, times 1/√p; `custom`: what the keys below say;
    `auto`: raft for raft, signed for reject, anchored for giveup, hybrid for estimate, ada for the others."""
    baseline: Literal["pool", "kept", "leave_one_out", "unbiased", "history", "greedy", "zero", "signed"] = "pool"
    """Subtracted from the reward. `greedy` draws one more response for each arm, at temperature 0."""
    divide_by_std: bool = False
    """Divide by the pool's standard deviation (ddof = 1)."""
    weight: Literal["none", "inverse_sqrt", "inverse", "maxrl"] = "none"
    """Prompt weight 1/√p, 1/p (both capped) or 1/r̄."""
    max_weight: float = Field(default=10.0, gt=0.0)
    """Cap of 1/√p and 1/p."""
    epsilon: float = Field(default=0.0, ge=0.0)
    """Added to p under 1/√p and 1/p."""
    centring: Literal["none", "anchor_pos"] = "none"
    """`anchor_pos`: scale wrong samples so that a group's advantages sum to zero."""
    whiten: bool = False
    """Then whiten the advantages of a step's samples together: mean 0, standard deviation 1."""


class History(Section):
    """What is remembered of a prompt from visit to visit."""

    visit_decay: float = Field(default=0.9, ge=0.0, le=1.0)
    """Earlier counts are multiplied by it at each visit (λ of Reinforce-Ada-Est)."""
    version_decay: float = Field(default=1.0, ge=0.0, le=1.0)
    """And by it with each policy version."""


class Allocation(Section):
    """Budgets from what is known of the prompts: estimate, gvm, knapsack, vip."""

    samples_per_prompt: float = Field(default=8.0, gt=0.0)
    """Mean budget over a window."""
    window: int = Field(default=64, ge=1)
    """Prompts whose budgets are set together."""
    n_min: int = Field(default=2, ge=0)
    """Smallest budget (estimate, knapsack, vip)."""
    power: Literal["inverse_sqrt", "inverse"] = "inverse_sqrt"
    """estimate: N ∝ 1/√p̂ (paper), or n_min + a share ∝ 1/p̂ (authors' code: n_min = 1, and n_max too large to clip)."""
    prior_right: float = Field(default=1.0, gt=0.0)
    """α of p̂ = (right + α) / (total + α + β)."""
    prior_wrong: float = Field(default=16.0, gt=0.0)
    """β of it."""
    gvm_alpha: float = Field(default=1e-3, gt=0.0)
    """α of gvm's weight 1/√(p̂ + α / p̂^(β-1))."""
    gvm_beta: float = Field(default=2.0, ge=1.0)
    """β of it."""

    @model_validator(mode="after")
    def _minimum_fits(self) -> Self:
        if self.n_min > self.samples_per_prompt:
            raise ValueError(
                f"allocation.n_min must be <= samples_per_prompt = {self.samples_per_prompt:g}, got {self.n_min}"
            )
        return self


class Giveup(Section):
    """Never give up (giveup): all-wrong prompts come back with a probability."""

    k: int = Field(default=4, ge=1)
    """Samples of one round (K)."""
    p_requeue: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Probability that an arm without a right sample goes on later with another round."""
    max_samples: int = Field(default=1024, ge=1)
    """Samples of a prompt over all its rounds, at most; at 0.95 and rounds of 4, one hopeless prompt in 500,000 gets so
    far."""

    @model_validator(mode="after")
    def _a_round_fits(self) -> Self:
        if self.max_samples < self.k:
            raise ValueError(f"giveup.max_samples must be >= k = {self.k}, got {self.max_samples}")
        return self


class Pilot(Section):
    """Pilot, then commit (pilot)."""

    n_pilot: int = Field(default=16, ge=1)
    """Samples before the decision."""
    n_commit: int = Field(default=48, ge=0)
    """Samples after it."""
    p_low: float = Field(default=0.125, ge=0.0, le=1.0)
    """Below this pilot pass rate the prompt is deferred."""
    p_high: float = Field(default=0.75, ge=0.0, le=1.0)
    """Above it the visit ends without a group."""

    @model_validator(mode="after")
    def _band_is_open(self) -> Self:
        if self.p_low >= self.p_high:
            raise ValueError(f"pilot.p_low must be < p_high = {self.p_high:g}, got {self.p_low:g}")
        return self


class Futility(Section):
    """When an arm is not worth the rest of its samples (strategy.futility)."""

    p_success: float = Field(default=0.2, ge=0.0, le=1.0)
    """threshold: stop where the posterior probability of the exit within the budget falls below this."""
    prior_right: float = Field(default=0.5, gt=0.0)
    """threshold: α of the Beta prior of p."""
    prior_wrong: float = Field(default=2.0, gt=0.0)
    """threshold: β of it."""
    prior: str = "tiers"
    """optimal: law of p over prompts: `tiers`, a number, numbers with commas, or a profile file (.jsonl or .csv with
    prompt_id and rate, or right and total)."""

    @field_validator("prior", mode="before")
    @classmethod
    def _numbers_are_a_law(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            return ",".join(str(part) for part in cast("Sequence[object]", value))
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
