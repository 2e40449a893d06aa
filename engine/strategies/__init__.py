"""Pure sampling strategies, one file each; `build` makes the one a config names."""

from configs.sampling import Strategy as StrategyConfig
from engine.core.strategy import Strategy
from engine.strategies.balance import Balance
from engine.strategies.fixed import Fixed
from engine.strategies.positives import Positives


def build(config: StrategyConfig) -> Strategy:
    """The strategy that `strategy.name` names."""
    if config.name == "balance":
        return Balance(config.k_pos, config.k_neg, config.n_max, config.group_size)
    if config.name == "positives":
        return Positives(config.k_pos, config.n_max, config.group_size)
    return Fixed(config.n_max, config.group_size)


__all__ = ["Balance", "Fixed", "Positives", "build"]
