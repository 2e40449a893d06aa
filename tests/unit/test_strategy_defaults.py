"""Defaults that follow a strategy's authors: how many samples are kept, and the chain of giveup."""

from pathlib import Path

import pytest

from configs import load_config
from configs.load import ConfigError, dump_config
from configs.strategy import STRATEGIES, Giveup, Strategy
from engine.core.law import exact_law
from engine.policy import make_policy
from engine.strategies import GiveUp

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
DOWNSAMPLING = ("balance", "positives", "rounds")


def built(*overrides: str):
    return make_policy(load_config(PRESET, overrides)).strategy


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "staged"])
def test_every_strategy_keeps_what_its_authors_train_and_an_explicit_size_wins(name) -> None:
    extra = ["history.version_decay=0.9"]
    assert built(f"strategy.name={name}", *extra).group_size == (4 if name in DOWNSAMPLING else 0)
    assert built(f"strategy.name={name}", "strategy.group_size=auto", *extra).group_size == (
        4 if name in DOWNSAMPLING else 0
    )
    for size in (0, 6):
        assert built(f"strategy.name={name}", f"strategy.group_size={size}", *extra).group_size == size


@pytest.mark.parametrize(("n_max", "size"), [(2, 2), (3, 2), (4, 4), (5, 4), (32, 4)])
def test_the_default_size_fits_a_small_budget_and_stays_even(n_max, size) -> None:
    assert Strategy(k_pos=1, k_neg=1, n_max=n_max).group_size == size


def test_a_users_own_strategy_is_told_four() -> None:
    assert Strategy(name="package.module:Class").group_size == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.group_size=many", 'strategy.group_size: .*integer.* got "many"'),
        ("strategy.group_size=-1", "strategy.group_size: .* got -1"),
        ("strategy.group_size=34", "strategy.group_size must be <= n_max = 32, got 34"),
        ("strategy.group_size=5", "strategy.group_size must be even for balance, got 5"),
        ("strategy.n_max=many", 'strategy.n_max: .*integer.* got "many"'),
        ("giveup.k=0", "giveup.k: .* got 0"),
        ("giveup.max_samples=3", "giveup.max_samples must be >= k = 4, got 3"),
        ("giveup.p_requeue=1.0", "giveup.p_requeue: .* got 1.0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(override, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(PRESET, [override])
    assert len(str(caught.value).splitlines()) == 1


def test_a_dumped_configuration_holds_the_size_it_was_run_with(tmp_path) -> None:
    path = tmp_path / "dumped.toml"
    path.write_text(dump_config(load_config(PRESET, ["strategy.name=estimate"])), encoding="utf-8")
    assert load_config(path).strategy.group_size == 0


def test_giveup_has_keys_of_its_own_and_leaves_the_others_alone() -> None:
    assert built("strategy.name=giveup") == GiveUp(4, 0.95, 1024, 0)
    own = ("giveup.k=16", "giveup.p_requeue=0.875", "giveup.max_samples=160", "strategy.group_size=4")
    assert built("strategy.name=giveup", *own) == GiveUp(16, 0.875, 160, 4)
    assert built("strategy.name=rounds", "giveup.k=2").round_size == 8


@pytest.mark.parametrize(
    ("own", "exact"),
    [
        (Giveup(), {0.05: 17.682, 0.1: 10.618, 0.2: 6.548, 0.5: 4.2525, 0.0: 80.0}),
        (Giveup(k=16, p_requeue=0.875), {0.05: 26.021, 0.1: 19.096, 0.2: 16.404, 0.5: 16.0002, 0.0: 128.0}),
    ],
)
def test_the_default_cap_leaves_the_costs_of_a_chain_as_they_are(own, exact) -> None:
    for rate, samples in exact.items():
        again = own.p_requeue * (1.0 - rate) ** own.k
        capped = own.k * (1.0 - again ** (own.max_samples // own.k)) / (1.0 - again)
        assert capped == pytest.approx(samples, rel=2.5e-4)
    assert own.p_requeue ** (1024 // own.k) < 3e-4


def test_fixed_trains_its_whole_group_by_default() -> None:
    strategy = built("strategy.name=fixed", "strategy.n_max=8")
    law = exact_law(strategy, 0.5, 8)
    assert (law.expected_samples, strategy.group_size) == (8.0, 0)
