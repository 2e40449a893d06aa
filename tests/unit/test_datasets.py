"""Data sets: every form loads, every bad row names its file and line."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from configs.inputs import Data
from engine.core.errors import DataError
from engine.datasets import PromptRow, load_prompts

ROW = {"id": "a", "problem": "What is 1 + 1?", "answer": "2", "level": "1d+1d"}


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
        return str(path)

    return write_lines


def test_json_lines_load_in_file_order(write):
    rows = load_prompts(write(ROW, {**ROW, "id": "b", "problem": "What is 2 + 1?", "answer": "3"}), Data())
    assert rows == [
        PromptRow("a", "What is 1 + 1?", "2", "1d+1d"),
        PromptRow("b", "What is 2 + 1?", "3", "1d+1d"),
    ]


def test_parquet_gives_the_same_rows_as_json_lines(write, tmp_path):
    rows = [{**ROW, "id": f"r{i}", "answer": str(i)} for i in range(5)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load_prompts(str(path), Data()) == load_prompts(write(*rows), Data())


def test_columns_are_chosen_in_the_config(write):
    path = write({"question": "Q", "solution": "A", "key": "k", "tier": 3})
    data = Data(prompt_column="question", answer_column="solution", id_column="key", level_column="tier")
    assert load_prompts(path, data) == [PromptRow("k", "Q", "A", "3")]


@pytest.mark.parametrize(("value", "text"), [(7, "7"), (7.0, "7"), (0.5, "0.5"), (-3, "-3"), ("1,000", "1,000")])
def test_an_answer_may_be_a_number(write, value, text):
    assert load_prompts(write({**ROW, "answer": value}), Data())[0].answer == text


def test_a_row_without_an_id_gets_a_stable_one(write):
    bare = {"problem": "P", "answer": "1"}
    first = load_prompts(write(bare, {"problem": "Q", "answer": "1"}), Data())
    moved = load_prompts(write({"problem": "Q", "answer": "1"}, bare, name="moved.jsonl"), Data())
    assert [row.prompt_id for row in first] == [row.prompt_id for row in reversed(moved)]
    assert first[0].prompt_id == "2a4b3b0b19712c84"
    assert first[0].level == "unlabelled"


def test_equal_rows_without_ids_stay_separate_prompts(write):
    rows = load_prompts(write(*[{"problem": "P", "answer": "1"}] * 3), Data())
    assert [row.prompt_id for row in rows] == ["2a4b3b0b19712c84", "2a4b3b0b19712c84-2", "2a4b3b0b19712c84-3"]


def test_an_answer_and_a_prompt_never_share_a_hash_by_moving_the_border(write):
    rows = load_prompts(write({"problem": "ab", "answer": "c"}, {"problem": "a", "answer": "bc"}), Data())
    assert rows[0].prompt_id != rows[1].prompt_id


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"id": "b", "problem": "P"}, r"rows.jsonl:2: no column 'answer'; columns here: id, problem"),
        ({"id": "b", "answer": "1"}, r"rows.jsonl:2: no column 'problem'; columns here: answer, id"),
        ({"id": "b", "problem": "P", "answer": ""}, r"rows.jsonl:2: column 'answer' is empty"),
        ({"id": "b", "problem": "P", "answer": None}, r"rows.jsonl:2: column 'answer' is empty"),
        ({"id": "b", "problem": "  ", "answer": "1"}, r"rows.jsonl:2: column 'problem' is empty"),
        ({"id": "b", "problem": "P", "answer": True}, r"rows.jsonl:2: column 'answer' must be text or a finite number"),
        ({"id": "b", "problem": "P", "answer": ["1"]}, r"must be text or a finite number, got \['1'\]"),
        ('{"problem": "P", "answer": NaN}', r"rows.jsonl:2: .*finite number, got nan"),
        ('{"problem": "P"', r"rows.jsonl:2: not JSON"),
        ("[1, 2]", r"rows.jsonl:2: a row must be a JSON object, got list"),
        (ROW, r"rows.jsonl:2: id 'a' is already taken by .*rows.jsonl:1"),
    ],
)
def test_a_bad_row_names_file_line_and_fault(write, bad, message):
    with pytest.raises(DataError, match=message):
        load_prompts(write(ROW, bad), Data())


def test_bytes_that_are_not_text_name_their_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"problem": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: not JSON"):
        load_prompts(str(path), Data())


def test_blank_lines_are_no_rows_but_count_as_lines(write):
    with pytest.raises(DataError, match=r"rows.jsonl:3: not JSON"):
        load_prompts(write(ROW, "", "{"), Data())
    assert len(load_prompts(write(ROW, "", name="blank.jsonl"), Data())) == 1


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet"])
def test_a_missing_file_says_so(tmp_path, name):
    with pytest.raises(DataError, match=f"{name}: cannot be read: .*No such file"):
        load_prompts(str(tmp_path / name), Data())


def test_a_file_that_is_no_parquet_says_so(write):
    with pytest.raises(DataError, match="not Parquet"):
        load_prompts(write("nothing", name="rows.parquet"), Data())


def test_a_file_of_another_kind_names_the_kinds(write):
    with pytest.raises(DataError, match=r"must end in .jsonl or .parquet"):
        load_prompts(write(ROW, name="rows.csv"), Data())


def test_an_empty_file_is_an_error(write):
    with pytest.raises(DataError, match="holds no rows"):
        load_prompts(write(), Data())


def test_levels_filter_and_an_unknown_level_names_the_known_ones(write):
    path = write(ROW, {**ROW, "id": "b", "level": "2d+2d"})
    assert [row.prompt_id for row in load_prompts(path, Data(), ["2d+2d"])] == ["b"]
    with pytest.raises(DataError, match=r"no row of level 9d; levels in it: 1d\+1d, 2d\+2d"):
        load_prompts(path, Data(), ["9d", "2d+2d"])


def test_a_simulated_source_makes_as_many_rows_as_asked():
    rows = load_prompts("simulated:1000", Data())
    assert len({row.prompt_id for row in rows}) == 1000
    assert all(row.answer in row.text for row in rows)


@pytest.mark.parametrize("source", ["simulated:0", "simulated:", "simulated:-1", "simulated:many"])
def test_a_simulated_source_without_a_count_is_refused(source):
    with pytest.raises(DataError, match="simulated:ROWS"):
        load_prompts(source, Data())


def test_a_folder_loads_through_the_hub_reader_and_a_wrong_split_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_prompts(str(folder), Data()) == [PromptRow("a", "What is 1 + 1?", "2", "1d+1d")]
    with pytest.raises(DataError, match=r'cannot be loaded: Unknown split "other"'):
        load_prompts(f"{folder}:other", Data())
