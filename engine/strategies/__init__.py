"""Pure sampling strategies, one file each; `build` makes the one a config names.

A new strategy is one file, one line in `MAKERS` and one test.
"""

from collections.abc import Callable

from configs.root import Config
from configs.strategy import Strategy as StrategyConfig
from configs.strategy import is_own
from engine.core.strategy import Strategy
from engine.strategies import custom
from engine.strategies.balance import Balance
from engine.strategies.estimate import Estimate
from engine.strategies.filtered import Filtered
from engine.strategies.fixed import Fixed
from engine.strategies.giveup import GiveUp
from engine.strategies.gvm import Gvm
from engine.strategies.knapsack import Knapsack
from engine.strategies.pilot import Pilot
from engine.strategies.positives import Positives
from engine.strategies.raft import Raft
from engine.strategies.refusals import check_sizes
from engine.strategies.rounds import Rounds
from engine.strategies.vip import Vip

Maker = Callable[[StrategyConfig, Config], Strategy]


def build(own: StrategyConfig, config: Config) -> Strategy:
    """The strategy that `own.name` names, with the settings of its family from `config`.

    Raises:
        ConfigError: a user's strategy that cannot be loaded, or sizes that the strategy would not use as written.
    """
    if is_own(own.name):
        return custom.load(own)
    check_sizes(own, config)
    return MAKERS[own.name](own, config)


def _balance(own: StrategyConfig, _: Config) -> Strategy:
    return Balance(own.k_pos, own.k_neg, own.n_max, own.group_size)


def _positives(own: StrategyConfig, _: Config) -> Strategy:
    return Positives(own.k_pos, own.n_max, own.group_size)


def _fixed(own: StrategyConfig, _: Config) -> Strategy:
    return Fixed(own.n_max, own.group_size)


def _filtered(own: StrategyConfig, _: Config) -> Strategy:
    return Filtered(own.n_max, own.group_size)


def _raft(own: StrategyConfig, _: Config) -> Strategy:
    return Raft(own.n_max, own.group_size)


def _rounds(own: StrategyConfig, config: Config) -> Strategy:
    inner = _balance(own, config) if own.exit == "balance" else _positives(own, config)
    return Rounds(inner, own.round_size, own.rounds)


def _giveup(own: StrategyConfig, config: Config) -> Strategy:
    chain = config.giveup
    return GiveUp(chain.k, chain.p_requeue, chain.max_samples, own.group_size)


def _pilot(own: StrategyConfig, config: Config) -> Strategy:
    pilot = config.pilot
    return Pilot(pilot.n_pilot, pilot.n_commit, pilot.p_low, pilot.p_high, own.group_size)


def _estimate(own: StrategyConfig, config: Config) -> Strategy:
    spend = config.allocation
    return Estimate(
        spend.samples_per_prompt,
        spend.window,
        spend.n_min,
        own.n_max,
        spend.power,
        spend.prior_right,
        spend.prior_wrong,
        own.group_size,
    )


def _gvm(own: StrategyConfig, config: Config) -> Strategy:
    spend = config.allocation
    return Gvm(
        spend.samples_per_prompt,
        spend.window,
        spend.gvm_alpha,
        spend.gvm_beta,
        own.round_size,
        own.n_max,
        own.group_size,
    )


def _knapsack(own: StrategyConfig, config: Config) -> Strategy:
    spend = config.allocation
    return Knapsack(spend.samples_per_prompt, spend.window, spend.n_min, own.n_max, own.group_size)


def _vip(own: StrategyConfig, config: Config) -> Strategy:
    spend = config.allocation
    form = "rloo" if config.advantage.name == "rloo" else "drgrpo"
    return Vip(spend.samples_per_prompt, spend.window, spend.n_min, own.n_max, own.group_size, form)


def _staged(_: StrategyConfig, config: Config) -> Strategy:
    return build(config.strategies[0], config)


MAKERS: dict[str, Maker] = {
    "balance": _balance,
    "dapo": _filtered,
    "estimate": _estimate,
    "filter": _filtered,
    "fixed": _fixed,
    "giveup": _giveup,
    "gvm": _gvm,
    "knapsack": _knapsack,
    "pilot": _pilot,
    "positives": _positives,
    "raft": _raft,
    "reject": _filtered,
    "rounds": _rounds,
    "staged": _staged,
    "vip": _vip,
}
"""filter, dapo and reject differ in what becomes of arms without signal and in advantages (engine/policy.py); staged is
the strategy of its first stage, the policy has the others."""

__all__ = [
    "MAKERS",
    "Balance",
    "Estimate",
    "Filtered",
    "Fixed",
    "GiveUp",
    "Gvm",
    "Knapsack",
    "Pilot",
    "Positives",
    "Raft",
    "Rounds",
    "Vip",
    "build",
]
