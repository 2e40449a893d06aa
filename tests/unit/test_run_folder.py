"""A run folder's files are never overwritten, and rows go on after the last whole one."""

import json
from pathlib import Path

import pytest

from configs import Config
from configs.load import ConfigError
from engine.core.errors import RunError
from engine.run_folder import RunFolder, run_path


def config(folder: Path, resume: str = "no") -> Config:
    return Config.model_validate({"run": {"name": "a", "folder": str(folder), "max_steps": 1, "resume": resume}})


def test_a_new_run_takes_the_next_free_folder_and_a_resumed_one_its_own(tmp_path: Path) -> None:
    assert run_path(config(tmp_path)) == tmp_path / "a"
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    assert run_path(config(tmp_path)) == tmp_path / "a-3"
    assert run_path(config(tmp_path, "auto")) == tmp_path / "a"
    assert run_path(config(tmp_path, str(tmp_path / "a"))) == tmp_path / "a-3"
    with pytest.raises(ConfigError, match=r"run.resume must be no, auto or the folder of a checkpoint, got '/nowhere'"):
        run_path(config(tmp_path, "/nowhere"))


@pytest.mark.parametrize("torn", ["", '{"arm": 9, "te', "x" * 200_000])
def test_rows_go_on_after_the_last_whole_one(tmp_path: Path, torn: str) -> None:
    with RunFolder(tmp_path) as folder:
        folder.event("first", text="µ" * 100_000)
        folder._put("samples", {"arm": 4})
        folder._put("samples", {"arm": 2})
    for name in ("events.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    with RunFolder(tmp_path) as folder:
        assert folder.next_arm == 5
        folder.event("second")
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["first", "second"]


def test_a_file_of_one_torn_row_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("x" * 70_000)
    with RunFolder(tmp_path) as folder:
        assert folder.next_arm == 0
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_earlier_whole_files_stay_under_numbered_names(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for text in ("one", "two", "three"):
            folder.write_whole("summary.json", text)
    texts = {path.name: path.read_text() for path in tmp_path.glob("summary*")}
    assert texts == {"summary.json": "three", "summary-1.json": "one", "summary-2.json": "two"}


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with RunFolder(tmp_path), pytest.raises(RunError, match="must be free"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path):
        pass
