"""A run at one moment, as people are shown it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run at one moment."""

    elapsed_s: float
    """Since the run started."""
    stage: str
    """What the run does now, e.g. `evaluate`, `train`."""
    step: int
    """Optimizer steps taken."""
    steps_total: int
    """Optimizer steps of the run; 0 = no limit."""
    first_sample_reward: float | None
    """Mean over the last 5 steps of the arms' first-sample rewards; None before the first."""
    useful_groups_per_min: float
    """Groups with a gradient that were trained, a minute."""
    arms: dict[str, int]
    """State (sampling, waiting, training) -> arms."""
    samples_counted: int
    """Samples that exit rules have read."""
    budget_spent: int
    """Samples launched."""
    tokens: dict[str, int]
    """Fate (trained, counted, aborted, failed, evaluated) -> response tokens."""
    staleness_mean: float
    """Of trained samples, versions."""
    staleness_max: int
    """Greatest age of a trained sample, versions."""
    generation_tokens_per_s: float
    """Response tokens generated a second."""
    learner_tokens_per_s: float
    """Tokens that the learner computed a second."""
    weight_updates: int
    """Published updates."""
    accuracy_before: float | None = None
    """Held-out accuracy before training; None = not measured."""
