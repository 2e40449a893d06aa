"""Strategies and selectors by stage of a run: [[stages]], and the schedule of `strategy.name = "staged"`.

A stage takes force at its first step and stays until the next one begins; what it does not set goes on as before.
"""

from typing import Self

from pydantic import Field, model_validator

from configs.base import Section
from configs.selection import Curriculum, Selector
from configs.strategy import RUN_WIDE, Strategy

LEAST_STEPS = 5
"""Of a run that is divided into fifths."""


class Stage(Section):
    """A part of a run: [[stages]] with a first step and what changes then."""

    from_step: int = Field(ge=0)
    """Policy version from which new arms use it; 0 only for the first stage of `strategy.name = "staged"`."""
    strategy: Strategy | None = None
    """The whole strategy of the stage, but for the keys that hold for the whole run; absent = the one before stays."""
    selector: Selector | None = None
    """Which prompt is visited next, keys as in [selector]; absent = the one before stays."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.strategy is None and self.selector is None:
            raise ValueError(f"the stage from step {self.from_step} must set strategy or selector, got neither")
        return self

    @model_validator(mode="after")
    def _leaves_the_run_alone(self) -> Self:
        if self.strategy is None:
            return self
        if changed := sorted(self.strategy.model_fields_set & RUN_WIDE):
            raise ValueError(f"stages.strategy must not set {', '.join(changed)}: [strategy] does, for the whole run")
        if self.strategy.name == "staged":
            raise ValueError("stages.strategy.name must be the strategy of one stage, got 'staged'")
        return self


def seed_schedule(max_steps: int) -> list[Stage]:
    """What `staged` plays when no stages are written: K = 1 for a fifth of the run, then 4, then 8 for the last fifth.

    The seed of the project gives the shares and K ("fast location of hard points", "standard balanced sampling",
    "conservative sampling + curriculum"); it names no source, and the gain it reports was never measured. Own choices:
    K right and K wrong samples at each stage, N_max = 8 K (the same seed's rule), all of them kept, and a curriculum
    that goes from its first target to its last one within the last stage.

    Args:
        max_steps: Steps of the run, at least `LEAST_STEPS`.
    """
    last = 4 * max_steps // 5
    course = Selector(name="curriculum", curriculum=Curriculum(steps=max_steps - last))
    return [
        Stage(from_step=0, strategy=_balanced(1)),
        Stage(from_step=max_steps // 5, strategy=_balanced(4)),
        Stage(from_step=last, strategy=_balanced(8), selector=course),
    ]


def _balanced(k: int) -> Strategy:
    return Strategy(name="balance", k_pos=k, k_neg=k, n_max=8 * k, group_size=2 * k)
