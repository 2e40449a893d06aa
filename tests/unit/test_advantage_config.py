"""`[advantage]`: names become rules, and combinations that make no sense are refused before anything starts."""

from pathlib import Path
from typing import get_args

import pytest

from configs.load import ConfigError, load_config
from configs.strategy import Advantage
from engine.core.advantage import AdvantageRule, Baseline
from engine.policy import PRESETS, make_policy

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
FIXED = ("strategy.name=fixed", "strategy.n_max=4", "strategy.group_size=4")


def rule(*overrides: str) -> AdvantageRule:
    return make_policy(load_config(PRESET, overrides)).rule


def test_every_name_has_a_rule_and_every_baseline_can_be_written() -> None:
    assert set(get_args(Advantage.model_fields["name"].annotation)) == {"auto", "custom", *PRESETS}
    assert get_args(Advantage.model_fields["baseline"].annotation) == get_args(Baseline)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("remax", AdvantageRule(baseline="greedy")),
        ("reinforce++", AdvantageRule(baseline="zero", whiten=True)),
        ("reinforce++_baseline", AdvantageRule(baseline="kept", whiten=True)),
    ],
)
def test_a_name_is_its_rule(name, expected) -> None:
    assert rule(*FIXED, f"advantage.name={name}") == expected


def test_a_custom_rule_whitens_over_any_baseline() -> None:
    found = rule("advantage.name=custom", "advantage.baseline=greedy", "advantage.whiten=true")
    assert found == AdvantageRule(baseline="greedy", whiten=True)


@pytest.mark.parametrize("strategy", ["fixed", "balance", "positives", "giveup", "dapo", "filter", "raft"])
def test_a_greedy_baseline_goes_with_every_strategy(strategy) -> None:
    assert rule(f"strategy.name={strategy}", "advantage.name=remax").needs_greedy


STAGE = '\n[[stages]]\nfrom_step = 3\n[stages.strategy]\nname = "raft"\nn_max = 4\n'


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.name=raft"], r"name = reinforce\+\+ .* but raft keeps right ones only; use fixed"),
        (["strategy.name=dapo"], "gives every group an advantage, so dapo would leave none out"),
        (["strategy.name=filter"], "so filter would leave none out"),
        (["strategy.name=reject"], "so reject would leave none out"),
        (["strategy.unresolved=requeue"], "so strategy.unresolved = requeue would leave none out"),
        (
            ["learner.groups_per_step=1", "strategy.name=fixed", "strategy.group_size=1"],
            "needs two samples a step, got learner.groups_per_step = 1 and one sample kept by fixed",
        ),
        (
            ["learner.groups_per_step=1", "strategy.name=fixed", "strategy.group_size=0", "strategy.n_max=1"],
            "one sample kept by fixed",
        ),
    ],
)  # fmt: skip
def test_whitening_is_refused_where_it_makes_no_sense(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        rule("advantage.name=reinforce++", *overrides)


def test_whitening_is_refused_for_a_stage_that_keeps_right_samples_only(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(PRESET.read_text(encoding="utf-8") + STAGE, encoding="utf-8")
    overrides = ["advantage.name=reinforce++_baseline", "strategy.name=fixed", "strategy.unresolved=keep"]
    config = load_config(path, overrides)
    with pytest.raises(ConfigError, match="but raft keeps right ones only"):
        make_policy(config)


def test_filters_go_with_whitening_after_the_groups_mean() -> None:
    for strategy in ("dapo", "filter", "reject"):
        assert rule(f"strategy.name={strategy}", "advantage.name=reinforce++_baseline").whiten
