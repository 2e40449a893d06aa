"""Graded sums: right answers, disjoint splits, the same bytes for the same seed."""

import json
import re

import pytest

from engine.core.errors import DataError
from engine.prepare import LEVELS, MIXES, arithmetic, main

OPERANDS = {
    "1d+1d": r"\d \+ \d", "1d-1d": r"\d - \d", "1d*1d": r"\d \* \d", "2d+1d": r"\d\d \+ \d", "2d-1d": r"\d\d - \d",
    "2d+2d": r"\d\d \+ \d\d", "2d-2d": r"\d\d - \d\d", "3d+3d": r"\d{3} \+ \d{3}", "3d-2d": r"\d{3} - \d\d",
    "2d*1d": r"\d\d \* \d", "a+b+c": r"\d \+ \d \+ \d", "a*b+c": r"\d \* \d \+ \d",
}  # fmt: skip


def _rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _run(folder, *options):
    return main(["arithmetic", "--out", str(folder), *options])


@pytest.mark.parametrize("mix", MIXES)
def test_every_answer_is_right_and_no_operand_has_the_wrong_size(tmp_path, mix):
    assert _run(tmp_path, "--mix", mix) == 0
    for row in _rows(tmp_path / "train.jsonl") + _rows(tmp_path / "test.jsonl"):
        expression = re.fullmatch(r"What is (.*)\? Reply with only the number\.", row["problem"]).group(1)
        assert re.fullmatch(OPERANDS[row["level"]], expression)
        assert eval(expression) == int(row["answer"]) >= 0  # the pattern above admits digits and operators only


@pytest.mark.parametrize("mix", MIXES)
def test_train_and_test_share_no_problem_and_repeat_none(tmp_path, mix):
    _run(tmp_path, "--mix", mix)
    train, test = _rows(tmp_path / "train.jsonl"), _rows(tmp_path / "test.jsonl")
    assert (len(train), len(test)) == (1500, 240)
    assert len({row["problem"] for row in train + test}) == 1740
    assert len({row["id"] for row in train + test}) == 1740


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    for folder, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        _run(tmp_path / folder, "--seed", seed)
    for name in ("train.jsonl", "test.jsonl"):
        first, again, other = ((tmp_path / folder / name).read_bytes() for folder in "abc")
        assert first == again
        assert first != other


def test_both_splits_hold_every_level_of_the_mix():
    for split in arithmetic(0, 3000, 240, MIXES["full"]):
        assert {problem.level for problem in split} == set(LEVELS)


def test_shares_are_kept_where_the_levels_have_room():
    train, _ = arithmetic(0, 400, 40, {"2d+2d": 3, "3d+3d": 1})
    assert sum(problem.level == "2d+2d" for problem in train) == 300


def test_a_level_that_is_too_small_leaves_its_share_to_the_others():
    train, test = arithmetic(0, 500, 10, {"1d-1d": 1, "3d+3d": 1})
    assert sum(problem.level == "1d-1d" for problem in train + test) == 55
    assert len(train) == 500


def test_asking_for_more_problems_than_there_are_is_an_error(tmp_path, capsys):
    with pytest.raises(DataError, match=r"hold .* problems for this, 500 asked"):
        arithmetic(0, 500, 5, {"1d+1d": 1})
    assert _run(tmp_path, "--levels", "1d+1d") == 1
    assert "error: the levels 1d+1d hold" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_level_names_the_known_ones(tmp_path, capsys):
    assert _run(tmp_path, "--levels", "4d+4d") == 1
    assert "unknown level 4d+4d; levels: 1d+1d" in capsys.readouterr().err


def test_own_levels_and_shares_replace_the_mix(tmp_path):
    assert _run(tmp_path, "--levels", "2d+2d=3,3d+3d", "--train", "40", "--test", "8") == 0
    levels = [row["level"] for row in _rows(tmp_path / "train.jsonl")]
    assert (levels.count("2d+2d"), levels.count("3d+3d")) == (30, 10)


def test_an_unwritable_folder_is_a_clear_error_and_leaves_no_partial_file(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert _run(blocker) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert blocker.read_text() == ""


def test_running_again_replaces_the_files_and_leaves_nothing_else(tmp_path):
    _run(tmp_path, "--seed", "1")
    _run(tmp_path, "--seed", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.jsonl", "train.jsonl"]
