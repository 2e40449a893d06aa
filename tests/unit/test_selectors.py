"""Selectors: exact chances and choices, determinism by seed, and nobody left out."""

import math
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config
from engine.core.past import EMPTY, History, Past
from engine.core.prompts import visit_order
from engine.core.rng import SplitMix, derive
from engine.core.selectors import Candidate, Curriculum, Draw, Greso, Mopps, Selection, Selector, Uniform
from engine.core.selectors.draws import beta, uniform
from engine.selection import make_selection


def candidates(*pasts: Past) -> list[Candidate]:
    return [Candidate(f"p{number}", past) for number, past in enumerate(pasts)]


def rate(mean: float, total: float = 10_000.0) -> Past:
    """A past so long that every draw lies within 0.03 of its mean."""
    return Past(mean * total, (1.0 - mean) * total, 10)


def picks(selector: Selector, among: list[Candidate], num_draws: int, version: int = 0) -> Counter[int | None]:
    return Counter(selector.choose(among, Draw(derive(7, number), version)) for number in range(num_draws))


def z_score(found: int, total: int, probability: float) -> float:
    return abs(found - total * probability) / math.sqrt(total * probability * (1.0 - probability))


# --- draws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "num_draws"),
    [
        (1, 1, 4000),
        (1, 9, 4000),
        (5, 1, 4000),
        (3, 7, 4000),
        (0.5, 0.5, 4000),
        (2.5, 1.5, 4000),
        (200, 40, 4000),
        (1.5, 30, 20_000),  # sees a Gamma shape that is off by 0.07
    ],
)
def test_beta_draws_have_the_exact_mean_and_variance(a: float, b: float, num_draws: int) -> None:
    rng = SplitMix(derive(1, round(10 * a), round(10 * b)))
    found = [beta(rng, a, b) for _ in range(num_draws)]
    mean, variance = a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1))
    assert abs(statistics.fmean(found) - mean) < 4 * math.sqrt(variance / num_draws)
    assert statistics.variance(found) == pytest.approx(variance, rel=0.12)
    assert 0.0 < min(found) <= max(found) < 1.0


def test_a_beta_draw_has_the_exact_distribution_function() -> None:
    # Beta(2, 2): F(x) = 3x² - 2x³, by the rejection method; Beta(1, 3): F(x) = 1 - (1 - x)³, by inversion.
    for a, b, law in ((2.0, 2.0, lambda x: 3 * x**2 - 2 * x**3), (1.0, 3.0, lambda x: 1 - (1 - x) ** 3)):
        rng = SplitMix(5)
        found = sorted(beta(rng, a, b) for _ in range(4000))
        distance = max(abs((rank + 0.5) / 4000 - law(x)) for rank, x in enumerate(found))
        assert distance < 1.95 / math.sqrt(4000)  # Kolmogorov-Smirnov, chance 0.001 of a false alarm


def test_a_uniform_draw_never_reaches_its_ends() -> None:
    class Fixed(SplitMix):
        def __init__(self, value: int) -> None:
            self.value = value

        def next(self) -> int:
            return self.value

    assert uniform(Fixed(0)) > 0.0
    assert uniform(Fixed((1 << 64) - 1)) < 1.0


# --- MoPPS ----------------------------------------------------------------------------------------------------------


def test_mopps_takes_the_prompt_nearest_to_one_half_when_pasts_are_sharp() -> None:
    among = candidates(rate(0.1), rate(0.9), rate(0.55), rate(0.3), rate(0.0), rate(1.0))
    assert picks(Mopps(), among, 200) == {2: 200}


def test_mopps_takes_the_prompt_nearest_to_another_target() -> None:
    among = candidates(rate(0.1), rate(0.9), rate(0.55))
    assert picks(Mopps(target=0.2), among, 50) == {0: 50}


def test_mopps_takes_unknown_prompts_equally_often() -> None:
    found = picks(Mopps(), candidates(EMPTY, EMPTY, EMPTY, EMPTY), 2000)
    assert all(z_score(found[index], 2000, 0.25) < 4 for index in range(4))


def test_mopps_explores_an_unknown_prompt_as_often_as_its_draw_is_nearer() -> None:
    # |U - 0.5| < 0.2 has probability 0.4; the known prompt's draw is 0.7 within 0.005.
    found = picks(Mopps(), candidates(Past(700_000.0, 300_000.0, 9), EMPTY), 2000)
    assert z_score(found[1], 2000, 0.4) < 4


def test_the_band_rule_takes_any_prompt_inside_and_none_outside() -> None:
    among = candidates(rate(0.35), rate(0.65), rate(0.2), rate(0.8))
    found = picks(Mopps(band=(0.3, 0.7)), among, 1000)
    assert set(found) == {0, 1}
    assert z_score(found[0], 1000, 0.5) < 4


def test_the_band_rule_takes_the_nearest_to_the_band_when_all_are_outside() -> None:
    assert picks(Mopps(band=(0.3, 0.7)), candidates(rate(0.05), rate(0.85), rate(0.95)), 50) == {1: 50}
    assert picks(Mopps(band=(0.3, 0.7)), candidates(rate(0.2), rate(0.9), rate(0.05)), 50) == {0: 50}


def test_a_faded_past_is_the_papers_posterior() -> None:
    decay, prior = 0.8, 1.0
    history = History(visit_decay=decay)
    alpha = beta_ = prior
    for version, (right, wrong) in enumerate([(3, 5), (0, 8), (7, 1), (4, 4)]):
        history.record("p", right, wrong, version)
        alpha = decay * alpha + (1 - decay) * prior + right
        beta_ = decay * beta_ + (1 - decay) * prior + wrong
    past = history.past("p", 9)
    assert (prior + past.right, prior + past.wrong) == pytest.approx((alpha, beta_))


# --- GRESO ----------------------------------------------------------------------------------------------------------


def observed(selector: Greso, prompt_id: str, labels: str) -> Greso:
    outcome = {"+": (4, 0), "-": (0, 4), "m": (1, 3)}
    for label in labels:
        selector.observe(prompt_id, *outcome[label])
    return selector


@pytest.mark.parametrize(
    ("visits", "chance"),
    [
        ("", 1.0),
        ("m", 1.0),
        ("+", 0.6),
        ("++", 0.36),
        ("+++", 0.216),
        ("-", 0.3),
        ("--", 0.09),
        ("---", 0.027),
        ("----", 0.01),  # 0.0081, raised to the floor
        ("++m", 1.0),
        ("++m+", 0.6),
        ("++-", 0.3),
        ("--+", 0.6),
        ("m--", 0.09),
    ],
)
def test_greso_visits_with_the_exact_chance_of_the_row_of_visits_without_spread(visits: str, chance: float) -> None:
    selector = observed(Greso(p_easy=0.6, p_hard=0.3), "p0", visits)
    assert selector.visit_chance("p0") == pytest.approx(chance)
    found = picks(selector, candidates(EMPTY), 2000)
    if chance == 1.0:
        assert found == {0: 2000}
    else:
        assert z_score(found[None], 2000, 1.0 - chance) < 4


def test_greso_does_not_mix_up_prompts() -> None:
    selector = observed(Greso(), "p0", "++")
    assert selector.visit_chance("p1") == 1.0


def test_greso_moves_both_chances_by_one_step_after_enough_repeated_visits() -> None:
    selector = Greso(adjust_every=4)
    for number in range(10):
        observed(selector, f"p{number}", "+")
    assert (selector.p_easy, selector.p_hard) == (0.5, 0.5), "first visits are the first epoch: nothing moves"
    for number in range(4):
        observed(selector, f"p{number}", "+")
    assert (selector.p_easy, selector.p_hard) == pytest.approx((0.49, 0.51))
    for number in range(4):
        observed(selector, f"p{number}", "-" if number else "m")
    assert (selector.p_easy, selector.p_hard) == pytest.approx((0.50, 0.50))


def test_a_share_exactly_at_its_target_lowers_the_chance() -> None:
    selector = Greso(adjust_every=4, target_easy=0.25, target_hard=0.25)
    observed(selector, "p0", "m")
    observed(selector, "p0", "+mmm")
    assert (selector.p_easy, selector.p_hard) == pytest.approx((0.49, 0.51))


def test_greso_keeps_both_chances_within_their_range() -> None:
    selector = Greso(adjust_every=1)
    observed(selector, "p0", "+" * 200)
    assert (selector.p_easy, selector.p_hard) == (0.05, 0.95)


def test_greso_brings_the_shares_of_useless_visits_to_their_targets() -> None:
    # 200 prompts with spread at every visit; 100 easy and 200 hard ones without it in nine visits of ten. Visited each
    # epoch, 18 % of the visits would be all right and 36 % all wrong.
    selection = Selection(Greso(), max_passes=0, seed=3)
    kinds = ["m"] * 200 + ["+"] * 100 + ["-"] * 200
    rng = SplitMix(11)
    outcomes: list[str] = []
    for _, row in visit_order(500, seed=0, max_epochs=80):
        candidate = Candidate(f"p{row}", EMPTY)
        if selection.draw([candidate], 0) is not None:
            outcome = kinds[row] if rng.below(10) else "m"
            outcomes.append(outcome)
            selection.observe(candidate.prompt_id, *{"+": (8, 0), "-": (0, 8), "m": (4, 4)}[outcome], version=0)
    first, last = Counter(outcomes[:500]), Counter(outcomes[len(outcomes) // 2 :])
    total = last.total()
    assert (first["+"] / 500, first["-"] / 500) == pytest.approx((0.18, 0.36), abs=0.04)
    assert last["+"] / total == pytest.approx(0.25 / 3, abs=0.02)
    assert last["-"] / total == pytest.approx(0.50 / 3, abs=0.02)


# --- curriculum -------------------------------------------------------------------------------------------------------


def test_the_target_moves_evenly_and_stays_at_its_end() -> None:
    curriculum = Curriculum(first=0.8, last=0.2, steps=60)
    assert [curriculum.target(version) for version in (0, 15, 30, 60, 90)] == pytest.approx([0.8, 0.65, 0.5, 0.2, 0.2])


def test_the_curriculum_takes_the_nearest_estimate_at_each_version() -> None:
    curriculum = Curriculum(first=0.9, last=0.1, steps=100)
    among = candidates(rate(0.1), rate(0.9), EMPTY)
    chosen = [curriculum.choose(among, Draw(0, version)) for version in (0, 50, 100)]
    assert chosen == [1, 2, 0], "easy, then unknown (the prior's mean is 0.5), then hard"


def test_the_prior_keeps_a_short_past_from_looking_extreme() -> None:
    among = candidates(Past(1.0, 0.0, 1), rate(0.9))
    assert Curriculum(first=0.95).choose(among, Draw(0, 0)) == 1
    assert Curriculum(first=0.6667).choose(among, Draw(0, 0)) == 0


# --- every selector ---------------------------------------------------------------------------------------------------


def test_the_uniform_selector_asks_for_no_candidates() -> None:
    assert Uniform().pool == 0
    assert Uniform().choose(candidates(rate(0.0), rate(0.5)), Draw(0, 0)) == 0


@pytest.mark.parametrize("make", [Mopps, lambda: observed(Greso(), "p0", "++"), Curriculum])
def test_one_seed_gives_the_same_choices_again(make) -> None:
    among = candidates(Past(2.0, 3.0, 1), EMPTY, Past(1.0, 6.0, 2), Past(5.0, 0.0, 1))

    def choices(seed: int) -> list[int | None]:
        selection = Selection(make(), seed=seed)
        return [selection.draw(among[: selection.pool(version)], version) for version in range(60)]

    assert choices(1) == choices(1)
    if make is not Curriculum:  # it throws no dice
        assert choices(1) != choices(2)


def test_every_candidate_is_visited_or_counted_as_passed_over() -> None:
    selection = Selection(Mopps(pool=4), seed=1)
    offered = visited = 0
    for size in (4, 4, 3, 1):
        offered += size
        visited += selection.draw(candidates(*[EMPTY] * size), 0) is not None
    assert (selection.num_draws, visited, selection.num_passed_over) == (4, 4, offered - visited)


class Stubborn:
    """Leaves out whom it can: never takes anybody, or always the candidate with the smallest name."""

    def __init__(self, pool: int) -> None:
        self.pool = pool

    def choose(self, among, draw) -> int | None:
        if self.pool == 1:
            return None
        names = [candidate.prompt_id for candidate in among]
        return names.index(min(names))

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        raise AssertionError("nothing was visited")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 6), st.integers(0, 1 << 32))
def test_no_prompt_is_passed_over_for_ever(num_prompts: int, pool: int, max_passes: int, seed: int) -> None:
    selection = Selection(Stubborn(pool), max_passes, seed)
    bound = max_passes if pool == 1 else max_passes + num_prompts - 1
    in_a_row: Counter[str] = Counter()
    visited: Counter[str] = Counter()
    num_epochs = 2 * (bound + 1) + pool
    turns = [f"p{row:02}" for _, row in visit_order(num_prompts, seed, num_epochs)]
    for start in range(0, len(turns), pool):
        names = turns[start : start + pool]
        chosen = selection.draw([Candidate(name, EMPTY) for name in names], 0)
        winner = None if chosen is None else names[chosen]
        for name in set(names):
            in_a_row[name] = 0 if name == winner else in_a_row[name] + 1
            visited[name] += name == winner
            assert in_a_row[name] <= bound
    if pool == 1:
        assert min(visited.values()) >= 2


def test_a_prompt_is_forced_at_the_turn_after_its_last_allowed_pass_and_not_before() -> None:
    selection = Selection(Stubborn(1), max_passes=3)
    found = [selection.draw(candidates(EMPTY), 0) for _ in range(8)]
    assert found == [None, None, None, 0, None, None, None, 0]


def test_without_a_bound_nobody_is_forced_and_nothing_is_remembered() -> None:
    selection = Selection(Stubborn(1), max_passes=0)
    assert [selection.draw(candidates(EMPTY), 0) for _ in range(500)] == [None] * 500
    assert len(selection._waits) == 0


def test_memory_holds_waiting_and_visited_prompts_only() -> None:
    selection = Selection(Greso(), max_passes=5)
    for number in range(100):
        selection.draw([Candidate(f"p{number}", EMPTY)], 0)
        selection.observe(f"p{number}", 4, 0, version=0)
    assert len(selection._waits) == 0, "all were visited"
    assert len(selection.selector._streaks) == 100


def test_a_visit_without_counted_samples_says_nothing() -> None:
    selection = Selection(Greso())
    selection.observe("p0", 0, 0, version=0)
    assert selection.selector.visit_chance("p0") == 1.0


# --- configuration ----------------------------------------------------------------------------------------------------


def built(**own) -> Selection:
    return make_selection(Config.model_validate({"run": {"max_steps": 1, "seed": 9}, "selector": own}))


def test_every_name_makes_its_selector_with_its_settings() -> None:
    assert built() == Selection(Uniform(), 100, 9)
    assert built(name="mopps", pool=8, mopps={"target": 0.4}).selector == Mopps(8, 0.4)
    assert built(name="mopps", mopps={"rule": "band"}).selector == Mopps(band=(0.3, 0.7))
    greso = built(name="greso", max_passes=0)
    assert (type(greso.selector), greso.max_passes) == (Greso, 0)
    assert (greso.selector.target_easy, greso.selector.target_hard) == pytest.approx((0.25 / 3, 0.5 / 3))
    own = {"p_easy": 0.4, "p_hard": 0.6, "p_step": 0.02, "p_min": 0.1, "p_max": 0.9, "floor": 0.03, "adjust_every": 7}
    made = built(name="greso", greso={**own, "target": 0.5, "easy_share": 0.25}).selector
    assert made == Greso(**own, target_easy=0.125, target_hard=0.375)
    course = built(name="curriculum", prior_wrong=16.0, curriculum={"first": 0.9, "steps": 50}).selector
    assert course == Curriculum(16, 0.9, 0.25, 50, 1.0, 16.0)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"name": "best"}, "'uniform', 'mopps', 'greso' or 'curriculum'"),
        ({"mopps": {"low": 0.7, "high": 0.3}}, "selector.mopps.low must be < high = 0.3, got 0.7"),
        ({"greso": {"p_min": 0.9, "p_max": 0.1}}, "selector.greso.p_min must be <= p_max = 0.1, got 0.9"),
        ({"greso": {"p_easy": 0.99}}, r"p_easy must be within \[p_min, p_max\] = \[0.05, 0.95\], got 0.99"),
        ({"name": "curriculum", "max_passes": 0}, "selector.max_passes must be above 0 for curriculum"),
        ({"pool": 1}, "greater than or equal to 2"),
    ],
)  # fmt: skip
def test_a_selector_that_cannot_be_is_refused_with_key_and_value(own: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**own)
