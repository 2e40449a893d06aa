"""Expectations under a prior are exact, whatever its pieces; its sources are checked row by row."""

import math
import random

import pytest

from engine.core.errors import DataError
from engine.core.prior import MAX_ATOMS, TIERS, Piece, gauss_legendre, mixture, of_rates, tiers
from engine.profiles import load_law, load_profile
from workers import simulated_law

UNIFORM = mixture([Piece(1.0, 0.0, 1.0)])


def beta(a: float, b: float) -> float:
    return math.exp(math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))


def midpoints(right: float, wrong: float, num: int = 20_000) -> float:
    """P(next is right) under the tiers, by brute force."""
    mass = mean = 0.0
    for piece in TIERS:
        width = (piece.high - piece.low) / num
        for i in range(num):
            p = piece.low + (i + 0.5) * width
            here = piece.share / num * p**right * (1.0 - p) ** wrong
            mass, mean = mass + here, mean + here * p
    return mean / mass


@pytest.mark.parametrize("degree", range(0, 128, 2))
def test_the_quadrature_is_exact_to_degree_127(degree) -> None:
    total = math.fsum(weight * place**degree for place, weight in gauss_legendre(64))
    assert total == pytest.approx(2.0 / (degree + 1), rel=1e-12)


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (3, 60), (64, 63), (127, 0), (1, 126)])
def test_powers_of_p_and_q_have_their_beta_integrals(right, wrong) -> None:
    pairs = zip(UNIFORM.nodes, UNIFORM.weights, strict=True)
    total = math.fsum(w * p**right * (1.0 - p) ** wrong for p, w in pairs)
    assert total == pytest.approx(beta(right + 1, wrong + 1), rel=1e-10)


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (1, 0), (0, 31), (5, 120), (63, 63)])
def test_the_next_sample_obeys_the_rule_of_succession_under_a_uniform_prior(right, wrong) -> None:
    assert UNIFORM.next_right(right, wrong) == pytest.approx((right + 1) / (right + wrong + 2), rel=1e-11)


@pytest.mark.parametrize(("right", "wrong"), [(0.4, 2.3), (0.9, 300.0), (30, 970), (0, 1000)])
def test_faded_and_very_long_counts_are_exact_to_a_ten_thousandth(right, wrong) -> None:
    assert tiers().next_right(right, wrong) == pytest.approx(midpoints(right, wrong), abs=1e-5, rel=1e-4)


def test_the_tiers_are_normalised() -> None:
    assert math.fsum(tiers().weights) == pytest.approx(1.0, abs=1e-14)
    assert tiers().next_right() == pytest.approx(0.2126 / 1.001, rel=1e-13)


def test_the_tiers_are_those_that_simulated_workers_draw_from() -> None:
    assert tuple((piece.share, piece.low, piece.high) for piece in TIERS) == simulated_law.TIERS


def test_a_posterior_over_atoms_is_bayes() -> None:
    prior = of_rates([0.1, 0.1, 0.5])
    assert prior.nodes == (0.1, 0.5)
    assert prior.posterior(1, 1) == pytest.approx([0.18 / 0.43, 0.25 / 0.43])


def test_counts_that_the_prior_excludes_still_have_a_posterior() -> None:
    assert of_rates([0.0]).next_right(3, 1) == 0.0
    assert of_rates([0.0, 1.0]).next_right(1, 1) == pytest.approx(0.5)
    assert of_rates([0.0, 1.0]).next_right(1, 0) == pytest.approx(1.0)


def test_a_long_profile_is_merged_without_moving_its_mean() -> None:
    rng = random.Random(3)
    rates = [rng.random() ** 2 for _ in range(5000)] + [0.0, 1.0]
    prior = of_rates(rates)
    assert len(prior.nodes) <= MAX_ATOMS + 1
    assert prior.next_right() == pytest.approx(math.fsum(rates) / len(rates), rel=1e-12)


def test_a_draw_picks_the_piece_by_its_share_and_the_rate_within_it() -> None:
    prior = tiers()
    assert prior.draw(0.0, 0.5) == pytest.approx(0.05)
    assert prior.draw(0.196 / 1.001, 0.99) == pytest.approx(0.099)
    assert prior.draw(0.198 / 1.001, 0.0) == 0.1
    assert prior.draw(1.0 - 2**-53, 0.5) == pytest.approx(0.75)
    assert {of_rates([0.2, 0.7]).draw(i / 10, 0.3) for i in range(10)} == {0.2, 0.7}


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "at least one piece"),
        ([Piece(0.0, 0.1, 0.2)], "share must be > 0"),
        ([Piece(1.0, 0.3, 0.2)], "low <= high"),
        ([Piece(1.0, -0.1, 0.2)], r"in \[0, 1\], got -0.1"),
        ([Piece(1.0, 0.1, math.nan)], r"in \[0, 1\], got nan"),
    ],
)
def test_a_prior_that_is_no_law_is_refused(pieces, message) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(pieces)


@pytest.mark.parametrize("source", [0.25, "0.25", "[0.25]", [0.25], (0.25, 0.25)])
def test_a_number_is_a_law(source) -> None:
    assert load_law(source).nodes == (0.25,)


def test_a_list_and_the_tiers_are_laws() -> None:
    assert load_law("0.1, 0.4").nodes == load_law((0.1, 0.4)).nodes == (0.1, 0.4)
    assert load_law("tiers") == tiers()


def test_a_profile_of_rates_or_of_counts_is_a_law(tmp_path) -> None:
    lines = tmp_path / "profile.jsonl"
    lines.write_text('{"prompt_id": "a", "rate": 0.25}\n\n{"prompt_id": 7, "right": 3, "total": 4}\n')
    table = tmp_path / "profile.csv"
    table.write_text("prompt_id,rate,right,total\na,0.25,,\n7,,3,4\n")
    assert load_profile(lines) == load_profile(table) == {"a": 0.25, "7": 0.75}
    assert load_law(f" {table} ").nodes == (0.25, 0.75)


BAD_ROWS = [
    ('{"prompt_id": "b", "rate": 1.2}', r"rate must be in \[0, 1\], got 1.2"),
    ('{"prompt_id": "b", "rate": -0.1}', "got -0.1"),
    ('{"prompt_id": "b", "rate": NaN}', "rate must be a finite number"),
    ('{"prompt_id": "b", "rate": true}', "rate must be a finite number, got True"),
    ('{"prompt_id": "b", "right": 5, "total": 4}', "got 5 of 4"),
    ('{"prompt_id": "b", "right": 1.5, "total": 4}', "right must be a whole number, got 1.5"),
    ('{"prompt_id": "b", "right": 1, "total": 4.5}', "total must be a whole number, got 4.5"),
    ('{"prompt_id": "b", "right": 0, "total": 0}', "total >= 1"),
    ('{"prompt_id": "b", "right": 1}', "total is missing"),
    ('{"prompt_id": "b"}', "needs a rate"),
    ('{"rate": 0.1}', "prompt_id must be text"),
    ('{"prompt_id": "a", "rate": 0.1}', "'a' stands in an earlier row too"),
    ('{"prompt_id": "b"', "not JSON"),
    ("[1]", "must be a JSON object, got list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_of_a_profile_is_named_by_file_and_line(tmp_path, row, message) -> None:
    path = tmp_path / "profile.jsonl"
    path.write_text('{"prompt_id": "a", "rate": 0.25}\n' + row + "\n")
    with pytest.raises(DataError, match=rf"profile\.jsonl:2: .*{message}"):
        load_law(str(path))


@pytest.mark.parametrize(
    ("row", "message"), [("b,1.2", r"in \[0, 1\], got 1.2"), ("b,x", "got 'x'"), ('b,"0.1', "not CSV"), ("b", "needs")]
)
def test_a_bad_line_of_a_csv_profile_is_named(tmp_path, row, message) -> None:
    path = tmp_path / "profile.csv"
    path.write_text("prompt_id,rate\na,0.25\n" + row + "\n")
    with pytest.raises(DataError, match=rf"profile\.csv:3: .*{message}"):
        load_profile(path)


@pytest.mark.parametrize("source", ["", "easy", "0.1,", "profile.txt"])
def test_text_that_is_no_law_names_the_key_it_stands_at(source) -> None:
    with pytest.raises(DataError, match=f"^sim.pass_rate must be tiers, numbers, or .* profile, got '{source}'$"):
        load_law(source, "sim.pass_rate")


def test_a_profile_of_another_kind_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"a profile must be a \.jsonl or \.csv file, got 'rates.txt'"):
        load_profile("rates.txt")


def test_what_is_no_law_is_refused(tmp_path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("prompt_id,rate\n")
    for source, message in (
        ("easy", "tiers, numbers, or"),
        ("1.5", r"in \[0, 1\], got 1.5"),
        ([0.1, 2.0], "got 2"),
        ((), "at least one piece"),
        (str(tmp_path / "absent.jsonl"), "cannot be read"),
        (str(empty), "holds no rows"),
    ):
        with pytest.raises(DataError, match=message):
            load_law(source)
