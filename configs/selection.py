"""Which prompt is visited next (engine/core/selectors): the section `selector`, and `stages.selector` for a stage."""

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Section


class Mopps(Section):
    """Thompson draws of pass rates ([selector.mopps])."""

    rule: Literal["nearest", "band"] = "nearest"
    """`nearest`: the draw nearest to the target; `band`: any draw inside the band."""
    target: float = Field(default=0.5, ge=0.0, le=1.0)
    """nearest: pass rate that is worth most."""
    low: float = Field(default=0.3, ge=0.0, le=1.0)
    """band: lower bound."""
    high: float = Field(default=0.7, ge=0.0, le=1.0)
    """band: upper bound."""

    @model_validator(mode="after")
    def _band_is_open(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"selector.mopps.low must be < high = {self.high:g}, got {self.low:g}")
        return self


class Greso(Section):
    """Skipping of prompts that keep ending without spread ([selector.greso])."""

    p_easy: float = Field(default=0.5, gt=0.0, le=1.0)
    """Chance of a visit after one all-right visit, at the start; its z-th power after z in a row."""
    p_hard: float = Field(default=0.5, gt=0.0, le=1.0)
    """The same after all-wrong visits."""
    p_step: float = Field(default=0.01, ge=0.0, le=1.0)
    """Both move by this towards the target; 0 = they stay."""
    p_min: float = Field(default=0.05, gt=0.0, le=1.0)
    """Neither falls below it."""
    p_max: float = Field(default=0.95, gt=0.0, le=1.0)
    """Nor rises above it."""
    floor: float = Field(default=0.01, gt=0.0, le=1.0)
    """Least chance of a visit at each turn."""
    target: float = Field(default=0.25, ge=0.0, le=1.0)
    """Wanted share of visits without spread."""
    easy_share: float = Field(default=1.0 / 3.0, ge=0.0, le=1.0)
    """Part of it that is all right; the rest is all wrong."""
    adjust_every: int = Field(default=64, ge=1)
    """Visits of prompts that were visited before, between two moves."""

    @model_validator(mode="after")
    def _starts_within_its_range(self) -> Self:
        if self.p_min > self.p_max:
            raise ValueError(f"selector.greso.p_min must be <= p_max = {self.p_max:g}, got {self.p_min:g}")
        for name, chance in (("p_easy", self.p_easy), ("p_hard", self.p_hard)):
            if not self.p_min <= chance <= self.p_max:
                raise ValueError(
                    f"selector.greso.{name} must be within [p_min, p_max] = [{self.p_min:g}, {self.p_max:g}],"
                    f" got {chance:g}"
                )
        return self


class Curriculum(Section):
    """A target pass rate that moves over training ([selector.curriculum])."""

    first: float = Field(default=0.75, ge=0.0, le=1.0)
    """Target at the start of the run, or of the stage that sets it."""
    last: float = Field(default=0.25, ge=0.0, le=1.0)
    """Target after `steps`."""
    steps: int = Field(default=200, ge=1)
    """Policy versions over which it moves, evenly."""


class Selector(Section):
    """Which prompt is visited next."""

    name: Literal["uniform", "mopps", "greso", "curriculum"] = "uniform"
    """`uniform`: each once an epoch; `mopps`: Thompson draws; `greso`: skips; `curriculum`: a moving target."""
    pool: int = Field(default=16, ge=2, le=256)
    """mopps, curriculum: candidates of one visit; those not taken are passed over until the next epoch."""
    max_passes: int = Field(default=100, ge=0)
    """A prompt that was passed over this often in a row is visited next; 0 = no such bound."""
    prior_right: float = Field(default=1.0, ge=0.1)
    """mopps, curriculum: α of the Beta prior of a pass rate."""
    prior_wrong: float = Field(default=1.0, ge=0.1)
    """mopps, curriculum: β of it."""
    mopps: Mopps = Field(default_factory=Mopps)
    """Thompson draws."""
    greso: Greso = Field(default_factory=Greso)
    """Skips."""
    curriculum: Curriculum = Field(default_factory=Curriculum)
    """A moving target."""

    @model_validator(mode="after")
    def _nobody_is_left_out(self) -> Self:
        if self.name == "curriculum" and not self.max_passes:
            raise ValueError("selector.max_passes must be above 0 for curriculum, got 0: some prompts would never come")
        return self
