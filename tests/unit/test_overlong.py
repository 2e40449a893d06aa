"""Overlong shaping: DAPO's formula, and that it changes advantages but not which pools carry a signal."""

import json

import pytest

from configs import Config
from engine.core.advantage import AdvantageRule
from engine.core.arm import Arm, Sample
from engine.core.group import has_signal, seal
from engine.core.overlong import overlong_penalty
from engine.core.strategy import Strategy
from engine.strategies import Balance, Fixed
from tests.support.event_driver import prompt
from tests.support.whole_run import WholeRun


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (16383, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0)]
)
def test_the_papers_numbers(num_tokens, expected):
    assert overlong_penalty(num_tokens, 20480, 4096, 1.0) == expected
    assert overlong_penalty(num_tokens, 20480, 4096, 0.5) == expected / 2


def test_no_buffer_is_no_penalty():
    assert overlong_penalty(20480, 20480, 0, 1.0) == 0.0


def test_a_buffer_as_long_as_the_limit_costs_from_the_first_token():
    assert overlong_penalty(1, 4, 4, 1.0) == -0.25


def shaped_arm(labels: str, penalties: list[float], strategy: Strategy) -> Arm:
    arm = Arm(0, prompt(0), 1, strategy, strategy.n_max)
    for index, (label, penalty) in enumerate(zip(labels, penalties, strict=True)):
        arm.launch()
        arm.score(Sample(index, float(label == "+") + penalty, label == "+", 0, 10, None))
        arm.take_next()
    return arm


@pytest.mark.parametrize("labels", ["++++", "----"])
@pytest.mark.parametrize("strategy", [Balance(2, 2, 4, 4), Fixed(4, 0)])
def test_shaping_alone_is_no_signal(labels, strategy):
    arm = shaped_arm(labels, [0.0, -0.5, 0.0, -1.0], strategy)
    assert not has_signal(arm)
    assert seal(0, arm, 0, AdvantageRule()) is None
    kept = seal(0, arm, 0, AdvantageRule(), unresolved="keep")
    assert not kept.is_useful


def test_equal_rewards_of_both_classes_are_a_signal_still():
    # A right answer at the limit has the reward of a wrong one: its advantage says so, the pool is no less resolved.
    arm = shaped_arm("++--", [-1.0, -1.0, 0.0, 0.0], Fixed(4, 0))
    assert has_signal(arm)
    group = seal(0, arm, 0, AdvantageRule())
    assert [group.advantage(sample) for sample in arm.counted] == [-0.5] * 4


def test_a_long_sample_has_the_lower_advantage_of_its_class():
    arm = shaped_arm("++--", [0.0, -0.25, 0.0, -0.5], Fixed(4, 0))
    group = seal(0, arm, 0, AdvantageRule())
    assert [group.advantage(sample) for sample in arm.counted] == [0.5, 0.25, -0.5, -1.0]


def run_config(**reward) -> Config:
    return Config.model_validate({
        "run": {"max_steps": 4}, "model": {"max_context_tokens": 4096}, "data": {"train": "simulated:300", "test": ""},
        "sampling": {"max_tokens": 2048}, "worker": {"kind": "simulated", "count": 2, "slots": 16},
        "simulated": {"tokens_per_s": 100.0, "step_s": 2.0, "length_ratio_wrong": 2.0},
        "learner": {"kind": "simulated", "groups_per_step": 8}, "server": {"live": "none"}, "reward": reward,
    })  # fmt: skip


def test_a_run_rewards_its_samples_by_length_and_reports_the_unshaped_pass_rate(tmp_path):
    run = WholeRun(run_config(overlong_tokens=1900, overlong_factor=0.5), tmp_path / "shaped")
    plain = WholeRun(run_config(), tmp_path / "plain")
    summary, without = run.run(), plain.run()
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        penalty = overlong_penalty(row["tokens"], 2048, 1900, 0.5)
        assert row["reward"] in (penalty, 1.0 + penalty)
    assert any(row["reward"] not in (0.0, 1.0) for row in rows)
    assert any(row["reward"] in (0.0, 1.0) for row in rows)
    # Which samples are drawn and when arms retire is as without shaping.
    assert summary["first_sample_reward_by_step"] == without["first_sample_reward_by_step"]
    assert summary["samples_counted"] == without["samples_counted"]
