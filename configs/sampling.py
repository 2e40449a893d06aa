"""How samples are drawn and when a prompt has enough of them: strategy, staleness, sampling."""

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Section


class Strategy(Section):
    """The exit rule of an arm and what is kept of it."""

    name: Literal["balance", "positives", "fixed"] = "balance"
    """`balance`: k_pos right and k_neg wrong samples; `positives`: k_pos right ones; `fixed`: n_max samples (GRPO)."""
    k_pos: int = Field(default=2, ge=1)
    """Right samples that an arm needs (balance, positives)."""
    k_neg: int = Field(default=2, ge=1)
    """Wrong samples that an arm needs (balance)."""
    n_max: int = Field(default=32, ge=1)
    """Samples that count for one visit of a prompt, at most."""
    group_size: int = Field(default=4, ge=2)
    """Samples kept for training, at most (n)."""
    width: int = Field(default=0, ge=0)
    """Requests in flight for one arm; 0 = by need, the width that wastes nothing."""
    raise_by_deadline: bool = True
    """Let an arm exceed its need when its scarce samples would otherwise expire first (costs some aborted tokens)."""
    accounting: Literal["launch", "completion"] = "launch"
    """`launch`: exit rules read the scored prefix in launch order (unbiased). `completion`: whatever came back first
    (biased to short answers)."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if self.name == "balance" and self.n_max < self.k_pos + self.k_neg:
            raise ValueError(
                f"strategy.n_max must be >= k_pos + k_neg = {self.k_pos + self.k_neg} for balance, got {self.n_max}"
            )
        if self.name == "positives" and self.n_max < self.k_pos:
            raise ValueError(f"strategy.n_max must be >= k_pos = {self.k_pos} for positives, got {self.n_max}")
        if self.name == "balance" and self.group_size % 2:
            raise ValueError(f"strategy.group_size must be even for balance, got {self.group_size}")
        if self.group_size > self.n_max:
            raise ValueError(f"strategy.group_size must be <= n_max = {self.n_max}, got {self.group_size}")
        return self


class Staleness(Section):
    """The hard bound on how old a trained token may be."""

    max: int = Field(default=2, ge=0)
    """η: learner's version at the gradient minus a token's version, at most. 0 = strictly on-policy."""


class Sampling(Section):
    """What is asked of the language model for each sample."""

    max_tokens: int = Field(default=24, ge=1)
    """Response tokens, at most; a response cut there counts as it stands."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Softmax temperature of training samples."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass; below 1 the behaviour logprobs are those of the cut distribution."""
