"""Settings that a strategy would cut short or never make a group with are refused by name, ignored ones are said."""

from pathlib import Path

import pytest

from configs.load import ConfigError, dump_config, load_config
from configs.strategy import STRATEGIES
from engine.policy import make_policy

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
ONE = "allocation.samples_per_prompt=1 allocation.n_min=1"


def policy(text: str):
    return make_policy(load_config(PRESET, ["history.version_decay=0.9", *(f"{part}" for part in text.split())]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "strategy.name=giveup strategy.n_max=8",
            "strategy.n_max = 8 has no effect with giveup: giveup.max_samples says",
        ),
        (
            "strategy.name=giveup strategy.round_size=2",
            "strategy.round_size = 2 has no effect with giveup: giveup.k says",
        ),
        (
            "strategy.name=pilot strategy.n_max=64",
            "strategy.n_max = 64 has no effect with pilot: pilot.n_pilot + n_commit",
        ),
    ],
)
def test_a_key_that_the_strategy_does_not_read_is_said_with_the_one_it_reads(text, message, caplog) -> None:
    assert policy(text) == policy(text.split()[0])
    assert message in caplog.text


def test_pilots_that_fill_the_visit_are_refused_where_there_are_to_be_more_of_them() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.round_size must be <= n_max = 32 for gvm, got 64"):
        policy("strategy.name=gvm strategy.round_size=64")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "strategy.name=pilot strategy.group_size=100",
            "strategy.group_size must be <= pilot.n_pilot [+] n_commit = 64 for pilot, got 100",
        ),
        ("strategy.name=giveup strategy.group_size=3", "strategy.group_size must be even for giveup, got 3"),
        (
            "strategy.name=giveup strategy.group_size=16 giveup.max_samples=8",
            "strategy.group_size must be <= giveup.max_samples = 8 for giveup, got 16",
        ),
    ],
)
def test_a_group_larger_than_a_visit_or_not_to_be_halved_is_refused(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(text)


@pytest.mark.parametrize(
    "text",
    [
        "strategy.name=pilot strategy.group_size=64",
        "strategy.name=gvm strategy.n_max=8",
        "strategy.name=fixed strategy.group_size=8",
        "strategy.name=balance strategy.rounds=8",
    ],
)
def test_sizes_that_fit_and_keys_of_other_strategies_stay_allowed(text) -> None:
    assert policy(text)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dumped_configuration_which_holds_every_key_can_be_built_again(tmp_path, name) -> None:
    overrides = [f"strategy.name={name}", "history.version_decay=0.9", "advantage.name=ada", "strategy.unresolved=drop"]
    config = load_config(PRESET, overrides)
    path = tmp_path / "dumped.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    again = load_config(path)
    assert again.strategy.model_fields_set >= {"n_max", "round_size", "rounds"}
    assert make_policy(again) == make_policy(config)


@pytest.mark.parametrize("name", ["dapo", "filter", "reject"])
@pytest.mark.parametrize("advantage", ["name=grpo", "name=drgrpo", "name=custom advantage.centring=anchor_pos"])
def test_filters_do_not_keep_a_part_whose_samples_may_all_be_alike(name, advantage) -> None:
    setting = f"strategy.name={name} strategy.n_max=8 advantage.{advantage} strategy.group_size="
    with pytest.raises(
        ConfigError, match=f"strategy.group_size must be 0 or n_max = 8 for {name} .*, got 4: those kept"
    ):
        policy(f"{setting}4")
    assert policy(f"{setting}0")
    assert policy(f"{setting}8")
    assert policy(f"strategy.name={name} strategy.n_max=8 strategy.group_size=4 advantage.name=ada")
    assert policy(f"strategy.name=fixed strategy.n_max=8 strategy.group_size=4 advantage.{advantage}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"strategy.name={name} strategy.n_max=1 {ONE}", f"^{name} must")
            for name in ("dapo", "filter", "reject", "fixed", "estimate", "gvm", "knapsack")
        ),
        ("strategy.name=positives strategy.k_pos=1 strategy.n_max=1 strategy.group_size=0", "^positives must"),
        ("strategy.name=giveup giveup.k=1 giveup.max_samples=1", "^giveup must sample a prompt twice or more a visit"),
        ("strategy.name=pilot pilot.n_pilot=1 pilot.n_commit=0", "^pilot.n_pilot must allow a share of right"),
        ("strategy.name=pilot pilot.n_pilot=1", r"in \[0.125, 0.75\] that is not all of them, got 1 with"),
        ("strategy.name=pilot pilot.n_pilot=4 pilot.p_low=0.3 pilot.p_high=0.4", "got 4 with n_commit = 48"),
        ("strategy.name=pilot pilot.n_pilot=4 pilot.p_low=0 pilot.p_high=0.2 pilot.n_commit=0", "n_commit = 0: no"),
        ("strategy.name=positives strategy.group_size=1", "strategy.group_size must be 0 or >= 2 for positives, got 1"),
        ("strategy.name=fixed strategy.group_size=1 advantage.name=drgrpo", "must be 0 or >= 2 for fixed, got 1"),
    ],
)  # fmt: skip
def test_a_strategy_that_can_never_have_a_signal_is_refused(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(text)


@pytest.mark.parametrize(
    "text",
    [
        "strategy.name=raft strategy.n_max=1",
        "strategy.name=fixed strategy.n_max=1 advantage.name=remax",
        "strategy.name=fixed strategy.n_max=1 advantage.name=reinforce++",
        "strategy.name=dapo strategy.n_max=2",
        "strategy.name=fixed strategy.group_size=1",
        "strategy.name=pilot pilot.n_pilot=1 pilot.p_low=0",
        "strategy.name=pilot pilot.n_pilot=4 pilot.n_commit=0",
    ],
)
def test_one_sample_is_enough_where_it_is_not_compared_with_others_of_its_prompt(text) -> None:
    assert policy(text)
