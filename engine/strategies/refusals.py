"""Settings that a strategy would cut short or never make a group with: refused by name where it is built.

What another strategy reads may stay in the file, since runs are compared by changing strategy.name: a warning says so.

Sections are checked alone when they load (configs/strategy.py); here a strategy meets the section of its family and
the run's advantages. A key counts as given where it differs from its default, so that a dumped configuration, which
holds every key, loads again.
"""

import logging

from configs.load import ConfigError
from configs.root import Config
from configs.strategy import Pilot, Strategy
from engine.core.advantage import AdvantageRule
from engine.core.strategy import Strategy as Built

log = logging.getLogger(__name__)

FILTERS = ("dapo", "filter", "reject")
"""Strategies that are `fixed` but for leaving out groups without signal."""
INSTEAD = {
    "giveup": {"n_max": "giveup.max_samples", "round_size": "giveup.k", "rounds": "giveup.max_samples"},
    "pilot": {"n_max": "pilot.n_pilot + n_commit", "round_size": "pilot.n_pilot", "rounds": "pilot.n_commit"},
}
"""Keys of [strategy] that a family does not read, and its own that does."""


def check_sizes(own: Strategy, config: Config) -> None:
    """Refuse sizes that a built-in strategy would not use as they are written; warn of those it does not read.

    Raises:
        ConfigError: which key, what was got, what is allowed.
    """
    for key, instead in INSTEAD.get(own.name, {}).items():
        value = own.model_dump()[key]
        if key in own.model_fields_set and value != Strategy.model_fields[key].default:
            log.warning("strategy.%s = %s has no effect with %s: %s says it", key, value, own.name, instead)
    if own.name == "giveup":
        _check_group_size(own, "giveup.max_samples", config.giveup.max_samples)
        if own.group_size % 2:
            raise ConfigError(f"strategy.group_size must be even for giveup, got {own.group_size}")
    elif own.name == "pilot":
        _check_group_size(own, "pilot.n_pilot + n_commit", config.pilot.n_pilot + config.pilot.n_commit)
        _check_band(config.pilot)
    elif own.name == "gvm" and own.n_max < own.round_size != Strategy.model_fields["round_size"].default:
        raise ConfigError(f"strategy.round_size must be <= n_max = {own.n_max} for gvm, got {own.round_size}")


def _check_group_size(own: Strategy, key: str, most: int) -> None:
    if own.group_size > most:
        raise ConfigError(f"strategy.group_size must be <= {key} = {most} for {own.name}, got {own.group_size}")


def _check_band(pilot: Pilot) -> None:
    """Some number of right pilots is committed, or is a group of its own."""
    rates = [right / pilot.n_pilot for right in range(0 if pilot.n_commit else 1, pilot.n_pilot)]
    if not any(pilot.p_low <= rate <= pilot.p_high for rate in rates):
        raise ConfigError(
            f"pilot.n_pilot must allow a share of right pilots in [{pilot.p_low:g}, {pilot.p_high:g}] that is not all"
            f" of them, got {pilot.n_pilot} with n_commit = {pilot.n_commit}: no visit would make a group"
        )


def check_signal(name: str, strategy: Built, rule: AdvantageRule) -> None:
    """Refuse a strategy that can never have a signal under these advantages, or filters by what it does not train.

    Args:
        name: `strategy.name`.
        strategy: Built.
        rule: Of the run.

    Raises:
        ConfigError: which key, what was got, what is allowed.
    """
    if strategy.selection == "right" or rule.needs_greedy or rule.compares_prompts:
        return  # needs no two samples that differ
    what, size = "advantages compare the samples of one prompt", strategy.group_size
    if strategy.n_max < 2:
        raise ConfigError(f"{name} must sample a prompt twice or more a visit, got {strategy.n_max}: {what}")
    reads_kept = rule.baseline == "kept" or rule.centring == "anchor_pos"
    if size == 1 and (strategy.selection == "balanced" or reads_kept):
        raise ConfigError(f"strategy.group_size must be 0 or >= 2 for {name}, got 1: {what}")
    if name in FILTERS and reads_kept and 0 < size < strategy.n_max:
        raise ConfigError(
            f"strategy.group_size must be 0 or n_max = {strategy.n_max} for {name} with advantages over the kept"
            f" samples, got {size}: those kept may all be alike where the visit's samples differ"
        )
