"""What the means of a simulated run are made of: no failed visit, exact sums, lengths as drawn, few rates weighed."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest

from configs.load import load_config
from configs.simulation import Simulation
from engine.core.prior import of_rates
from engine.simulate import main
from engine.simulation.law import Laws
from engine.simulation.report import Report
from engine.simulation.run import simulate

PRESET = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"

LENGTHS = list(itertools.product((0.3, 2.0, 64.0), (0.02, 1.0), (0.0, 0.8, 2.0)))
"""Mean of right lengths, ratio of wrong ones, sigma."""


def play(text: str) -> Report:
    return simulate(load_config(PRESET, ["staleness.max=1000000", "sim.prompts=600", *text.split()]), step_s=0.0)


def test_failed_visits_are_counted_and_enter_no_mean() -> None:
    setting = "sim.pass_rate=0.2 sim.prompts=2000 sim.failure_rate="
    failing, sound = play(f"{setting}0.2"), play(f"{setting}0.0")
    assert failing.visits == sound.visits == 2000
    assert failing.visits_failed > 50 > 0 == sound.visits_failed
    # Exact: 10.140 samples and 0.99287. A failed visit is neither solved nor without signal.
    assert failing.success_rate == pytest.approx(0.99287, abs=3.0 * math.sqrt(0.9929 * 0.0071 / 2000))
    assert failing.zero_signal_rate < 0.005
    assert failing.visits_lost == 0
    counted = failing.samples_per_prompt_mean * (failing.visits - failing.visits_failed)
    assert counted == pytest.approx(round(counted), abs=1e-6)
    assert f"visits failed       {failing.visits_failed}, in no mean" in failing.as_text()
    assert "visits failed" not in sound.as_text()


def test_a_run_whose_visits_all_fail_ends_with_nothing_solved() -> None:
    report = play("sim.failure_rate=0.99 sim.prompts=20 worker.max_sample_failures=1 sim.slots=4")
    assert report.visits == 20
    assert report.visits_failed >= 19
    assert report.samples >= 20


def test_lost_and_failed_visits_and_launches_are_in_the_json(capsys) -> None:
    setting = ["sim.prompts=300", "staleness.max=0", "strategy.futility=none", "sim.failure_rate=0.2"]
    assert main(["--config", str(PRESET), "--json", *setting]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert min(printed["visits_lost"], printed["visits_failed"]) > 0
    # Those of the prompts that keep the slots full included, so that wall_s can be divided.
    assert printed["launches"] > printed["samples"]


@pytest.mark.parametrize("advantage", ["ada", "grpo"])
def test_biases_and_weights_are_the_same_to_the_last_digit_for_any_width_and_slots(advantage) -> None:
    setting = f"sim.pass_rate=[0.1,0.3,0.7] advantage.name={advantage} sim.prompts=900"
    found = [
        play(f"{setting} sim.slots={slots} sim.workers={workers} sim.width={width}")
        for slots, workers, width in ((1, 1, 0), (64, 1, 0), (30, 3, 8))
    ]
    assert len({report.pool_mean_bias for report in found}) == 1
    assert len({tuple(report.implied_weight.items()) for report in found}) == 1
    assert len(found[0].implied_weight) == 3


@pytest.mark.parametrize(("mean", "ratio", "sigma"), LENGTHS)
def test_the_mean_of_drawn_lengths_is_exact_also_where_most_have_one_token(mean, ratio, sigma) -> None:
    law = Laws(Simulation(tokens_mean=mean, length_ratio_wrong=ratio, tokens_sigma=sigma), of_rates([0.5]))
    draws = [p.token_ids.draw(i) for p in itertools.islice(law.prompts(), 400) for i in range(64)]
    for label in (True, False):
        lengths = [tokens for is_right, tokens in draws if is_right is label]
        error = statistics.stdev(lengths) / math.sqrt(len(lengths))
        assert abs(statistics.fmean(lengths) - law.mean_tokens(is_right=label)) <= 4.0 * error + 3e-4


@pytest.mark.parametrize("setting", ["sim.tokens_mean=2", "sim.length_ratio_wrong=0.02"])
def test_kept_lengths_of_short_answers_follow_their_law(setting) -> None:
    report = play(f"sim.pass_rate=0.3 sim.prompts=2000 {setting}")
    assert report.kept_length_ratio_right == pytest.approx(1.0, abs=0.03)
    assert report.kept_length_ratio_wrong == pytest.approx(1.0, abs=0.03)


def test_a_profile_of_few_rates_has_a_weight_for_each_and_one_of_many_has_none(tmp_path) -> None:
    def weights(rates: list[float]) -> dict[str, float]:
        path = tmp_path / "profile.csv"
        rows = "".join(f"p{number},{rate}\n" for number, rate in enumerate(rates))
        path.write_text(f"prompt_id,rate\n{rows}", encoding="utf-8")
        return play(f"sim.pass_rate={path}").implied_weight

    assert list(weights([0.2, 0.5, 0.2, 0.0, 0.8])) == ["0.2", "0.5", "0.8"]
    assert weights([number / 100 for number in range(100)]) == {}
    assert play("sim.pass_rate=0.2,0.5").implied_weight.keys() == {"0.2", "0.5"}
