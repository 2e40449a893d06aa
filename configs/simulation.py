"""What `python -m engine.simulate` plays: prompts, workers and learner under a virtual clock ([sim])."""

import math
from collections.abc import Sequence
from typing import Self, cast

from pydantic import Field, field_validator, model_validator

from configs.base import Section

_RAREST = 8.0
"""Standard deviations of a normal draw that no run sees (one in 10^15)."""
_MOST_TOKENS = 2.0**53
"""Lengths above it are no longer whole numbers in floating point."""


class Simulation(Section):
    """Laws and sizes of a simulated run. The strategy, η and B are those of the run itself."""

    pass_rate: float | tuple[float, ...] | str = "tiers"
    """Law of the pass rate over prompts: a number, a list (each as frequent; also `0.1,0.5`), `tiers`, or a measured
    profile file (.jsonl or .csv: prompt_id, and rate, or right and total)."""
    prompts: int = Field(default=2000, ge=1)
    """Prompts whose visits are reported; others follow in the queue, so that the slots stay full."""
    epochs: int = Field(default=1, ge=1)
    """Turns of each prompt; [selector] makes a turn a visit or passes the prompt over. 1: first visits only. A prompt
    that was deferred or failed comes back at its next turn."""
    workers: int = Field(default=1, ge=1)
    """Generation workers."""
    slots: int = Field(default=64, ge=1)
    """Requests that one worker runs at once."""
    seed: int = Field(default=0, ge=0)
    """Seeds every draw: of prompt, label, length, failure and kept set."""
    learner_ratio: float = Field(default=1.2, gt=0.0)
    """The learner's rate over the generators': a step takes B / (ratio x groups that full slots finish a second, at
    this η; measured in a warm-up of first visits)."""
    update_s: float = Field(default=0.0, ge=0.0)
    """Seconds from the end of a step until new samples start from its weights; generation goes on meanwhile."""
    tokens_mean: float = Field(default=64.0, gt=0.0)
    """Mean length of right responses."""
    tokens_sigma: float = Field(default=0.8, ge=0.0, le=5.0)
    """Sigma of the lognormal law of lengths."""
    length_ratio_wrong: float = Field(default=1.0, gt=0.0)
    """Mean length of wrong responses over that of right ones."""
    tokens_per_s: float = Field(default=500.0, gt=0.0)
    """Tokens a second of one slot."""
    latency_s: float = Field(default=0.0, ge=0.0)
    """Seconds that a request holds its slot besides its tokens (prefill, wire, verdict)."""
    failure_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of requests that fail on the way and are asked for again; never counted as wrong."""
    width: int = Field(default=0, ge=0)
    """Requests in flight for one arm; 0 = as `strategy.width` says."""

    @field_validator("pass_rate", mode="before")
    @classmethod
    def _is_a_law(cls, value: object) -> object:
        value = _numbers(value) or value if isinstance(value, str) else value
        rates = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
        is_name = isinstance(value, str) and value != ""
        if not is_name and not (rates and all(_is_rate(rate) for rate in rates)):
            raise ValueError(
                f"sim.pass_rate must be a number in [0, 1], a list of such numbers, `tiers`, or a profile file,"
                f" got {rates!r:.80}"
            )
        return tuple(rates) if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _lengths_can_be_drawn(self) -> Self:
        ratio, sigma = max(1.0, self.length_ratio_wrong), self.tokens_sigma
        # In logarithms: the longest response itself may be beyond any float.
        longest = math.log(self.tokens_mean) + math.log(ratio) + _RAREST * sigma - sigma * sigma / 2.0
        if longest > math.log(_MOST_TOKENS):
            allowed = math.exp(math.log(_MOST_TOKENS) - longest + math.log(self.tokens_mean))
            raise ValueError(
                f"sim.tokens_mean must be <= {allowed:.3g} with tokens_sigma = {sigma:g} and length_ratio_wrong ="
                f" {self.length_ratio_wrong:g}, got {self.tokens_mean:g}: responses of 2^53 tokens could be drawn"
            )
        return self


def _numbers(text: str) -> tuple[float, ...]:
    """The numbers of `0.1,0.5`; empty when it is something else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return ()


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0
