"""The comparison of two runs, on made-up curves."""

import json

import pytest

from benchmarks.first_light import Step, compare, read_steps, seconds_to, useful_groups_per_min


def curve(step_s: float, rewards: list[float], useful: int = 8) -> list[Step]:
    return [Step(step_s * (i + 1), reward, useful) for i, reward in enumerate(rewards)]


RISING = [i / 20 for i in range(20)]


def test_a_run_that_is_twice_as_fast_has_half_the_time_ratio_and_twice_the_rate():
    comparison = compare(curve(10.0, RISING), curve(20.0, RISING))
    assert comparison.time_ratio == pytest.approx(0.5)
    assert comparison.engine_useful_groups_per_min == pytest.approx(2 * comparison.naive_useful_groups_per_min)
    assert comparison.target_reward == pytest.approx(0.85)


def test_a_run_that_never_gets_there_has_no_ratio():
    comparison = compare(curve(10.0, [0.1] * 20), curve(20.0, RISING))
    assert comparison.engine_s_to_target is None
    assert comparison.time_ratio is None


def test_the_rate_leaves_out_what_happens_after_the_first_seconds():
    steps = [*curve(10.0, [0.0] * 6, useful=4), Step(120.0, 0.0, 1000)]
    assert useful_groups_per_min(steps, 60.0) == pytest.approx(24.0)


def test_the_target_is_reached_by_the_mean_of_five_steps_not_by_one_lucky_step():
    assert seconds_to(curve(1.0, [0, 1, 0, 0, 0, 1, 1, 1, 1, 1]), 0.8) == pytest.approx(9.0)


def test_a_step_without_new_prompts_repeats_the_reward_before_it(tmp_path):
    path = tmp_path / "events.jsonl"
    rows = [
        {"event": "evaluated", "accuracy": 0.1},
        {"event": "step", "t": 50.0, "first_sample_reward": 0.1, "useful_groups": 9},
        {"event": "step", "t": 60.0, "first_sample_reward": None, "useful_groups": 7},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert read_steps(path) == [Step(50.0, 0.1, 9), Step(60.0, 0.1, 7)]


def test_a_run_without_steps_is_an_error(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no step"):
        read_steps(path)
