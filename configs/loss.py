"""What the learner's gradient is of (learner/objectives): the section `loss` and its parts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Section

Objective = Literal["ppo", "cispo", "gspo", "reinforce", "decoupled", "likelihood"]
OWN_CLIPS: dict[Objective, tuple[float, float]] = {
    "ppo": (0.2, 0.28),
    "decoupled": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""(low, high) that `clip_low = 0` and `clip_high = 0` mean. ppo: arXiv 2510.04996 and 2503.14476; decoupled: the same;
gspo: arXiv 2507.18071, 5.1; cispo: no lower bound (arXiv 2506.13585, 3.1), ratios up to 5 (arXiv 2510.13786)."""
COUNTED = ("ppo", "cispo", "gspo")
"""Objectives whose own ratio is learner over sampler: engine/learner mismatch is in it already."""


class Mismatch(Section):
    """Weight of a token for what sampler and learner compute differently ([loss.mismatch]).

    k = learner (for decoupled: proximal policy) over sampler, without a gradient, from the logprobs that came with the
    sample. It is never used together with an objective whose ratio holds it already.
    """

    rule: Literal["auto", "none", "tis", "icepop"] = "auto"
    """`tis`: min(k, cap); `icepop`: k inside [low, high], else 0; `none`: 1. `auto`: tis for decoupled, whose
    definition has this weight, else none."""
    level: Literal["token", "sequence"] = "token"
    """tis: k of a token, or the product over the response (exact, but long responses are soon cut)."""
    cap: float = Field(default=2.0, ge=1.0)
    """tis: C; 1.5 to 5 for tokens, 2 to 10 for sequences."""
    low: float = Field(default=0.5, ge=0.0, lt=1.0)
    """icepop: smallest k that is trained."""
    high: float = Field(default=5.0, gt=1.0)
    """icepop: largest k that is trained."""


class Kl(Section):
    """Penalty on the distance to the initial model ([loss.kl])."""

    weight: float = Field(default=0.0, ge=0.0)
    """Of the penalty; 0 = none, and no forward pass of the reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """`k1`: r = log π/π_ref; its gradient ∇log π has mean zero over samples of π, so it adds noise and holds nothing
    back: for comparisons only. `k2`: r²/2, whose gradient is the exact divergence's. `k3`: GRPO's exp(-r) - 1 + r,
    never below 0."""
    reference: str = ""
    """The initial model, as in model.path; empty = model.path, as it was when the run started. Takes its memory once
    more."""


class Loss(Section):
    """Objective, trust region, aggregation. Defaults are the paper's (arXiv 2510.04996)."""

    objective: Objective = "ppo"
    """`ppo`: clipped ratio; `cispo`: clipped weight, no token without a gradient; `gspo`: one ratio a response;
    `reinforce`: no ratio; `decoupled`: PPO around a proximal policy; `likelihood`: of samples with A > 0 (RAFT)."""
    clip_low: float = Field(default=0.0, ge=0.0, le=1.0)
    """ε_low: the ratio is clipped at 1 - ε_low. 0 = the objective's own: 0.2; gspo 3e-4; cispo 1, which is no bound."""
    clip_high: float = Field(default=0.0, ge=0.0, allow_inf_nan=True)
    """ε_high: the ratio is clipped at 1 + ε_high. 0 = the objective's own: 0.28; gspo 4e-4; cispo 4. inf = no bound."""
    dual_clip: float = Field(default=10.0, gt=1.0, allow_inf_nan=True)
    """c: for negative advantages the objective is bounded below by c·A (ppo, gspo, decoupled). inf = no bound."""
    proximal: Literal["loglinear", "recompute"] = "loglinear"
    """decoupled: `loglinear` goes from sampler to learner by age, (d - 1)/d of the way; `recompute` takes the learner's
    own before the update's first mini-batch. With learner.mini_batches = 1 that is the policy itself: the clip never
    binds."""
    mismatch: Mismatch = Field(default_factory=Mismatch)
    """Engine/learner mismatch."""
    m2_budget: float = Field(default=0.0, ge=0.0)
    """τ of M2PO: tokens are masked until the rest's mean squared log ratio is within it (0.04 in the paper); 0 = off.
    For ppo the mask takes the clip's place."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "auto"
    """Over the whole step: mean over tokens, mean over responses of their token means, or sum over
    responses x `constant_tokens` (Dr. GRPO). `auto`: sequence_mean for gspo, whose objective is a mean over responses
    (arXiv 2507.18071, equation 5), else token_mean."""
    constant_tokens: int = Field(default=0, ge=0)
    """constant: tokens that a response counts as, e.g. sampling.max_tokens."""
    kl: Kl = Field(default_factory=Kl)
    """Distance to the initial model."""
    entropy_weight: float = Field(default=1e-4, ge=0.0)
    """Weight of the entropy bonus."""

    @property
    def clips(self) -> tuple[float, float]:
        """ε_low and ε_high in force; infinite where nothing is clipped by them."""
        low, high = OWN_CLIPS.get(self.objective, (1.0, float("inf")))
        if self.objective == "ppo" and self.m2_budget:
            low, high = 1.0, float("inf")
        return self.clip_low or low, self.clip_high or high

    @property
    def mismatch_rule(self) -> Literal["none", "tis", "icepop"]:
        """What `auto` means for the objective."""
        if self.mismatch.rule == "auto":
            return "tis" if self.objective == "decoupled" else "none"
        return self.mismatch.rule

    @property
    def aggregation_rule(self) -> Literal["token_mean", "sequence_mean", "constant"]:
        """What `auto` means for the objective."""
        if self.aggregation == "auto":
            return "sequence_mean" if self.objective == "gspo" else "token_mean"
        return self.aggregation

    @model_validator(mode="after")
    def _mismatch_counts_once(self) -> Self:
        rule = self.mismatch.rule
        if self.objective in COUNTED and rule not in ("auto", "none"):
            raise ValueError(
                f"loss.mismatch.rule must be none for loss.objective = {self.objective}, got {rule}: its ratio against"
                " the sampler's logprobs counts the mismatch already (reinforce, likelihood and decoupled take it)"
            )
        if self.objective == "decoupled" and rule == "none":
            raise ValueError(
                "loss.mismatch.rule must be tis or icepop for loss.objective = decoupled, got none: its weight"
                " proximal over sampler would have no bound"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for key, value in (("clip_low", self.clip_low), ("clip_high", self.clip_high)):
            if value and self.m2_budget and self.objective == "ppo":
                raise ValueError(f"loss.{key} must be 0 with loss.m2_budget: its mask replaces the clip, got {value:g}")
        if self.aggregation == "constant" and not self.constant_tokens:
            raise ValueError(
                "loss.constant_tokens must be >= 1 for loss.aggregation = constant, got 0 (usual: sampling.max_tokens)"
            )
        return self
