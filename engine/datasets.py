"""Read prompts and reference answers from JSON lines, Parquet, an HF data set, or a simulated source.

Invariants: every row has a text, an answer and an id that no other row of its source has; a row that has not is a
`DataError` naming file and line, never a silent skip. Called by the engine at start-up, off the event loop.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from configs.inputs import Data
from engine.core.errors import DataError

UNLABELLED = "unlabelled"
SIMULATED_PREFIX = "simulated:"

_Place = str  # "file.jsonl:12": where a row stands, for messages
_Columns = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a data set.

    Example: `PromptRow("arith-0", "What is 90 - 8?", "82", "2d-1d")`.
    """

    prompt_id: str
    """Unique in its source and stable between runs."""
    text: str
    """The prompt, before any chat template."""
    answer: str
    """The reference answer."""
    level: str
    """Difficulty label, `unlabelled` where the row has none."""


def load_prompts(source: str, data: Data, levels: Collection[str] = ()) -> list[PromptRow]:
    """Every row of `source`, in its order.

    Args:
        source: `path.jsonl`, `path.parquet`, an HF data set `name` or `name:split` (split `train` where none is
            given), or `simulated:ROWS`.
        data: Column names.
        levels: Keep only rows of these levels; empty = all.

    Raises:
        DataError: no such file or data set, a row that is not a JSON object, a column that is missing, a row without
            prompt or answer, two rows with one id, or nothing left to train on.
    """
    rows = _simulated_rows(source) if source.startswith(SIMULATED_PREFIX) else _checked_rows(_raw_rows(source), data)
    if not rows:
        raise DataError(f"{source}: holds no rows")
    if not levels:
        return rows
    kept = [row for row in rows if row.level in levels]
    absent = sorted(set(levels) - {row.level for row in kept})
    if absent:
        found = ", ".join(sorted({row.level for row in rows}))
        raise DataError(f"{source}: no row of level {', '.join(absent)}; levels in it: {found}")
    return kept


def _simulated_rows(source: str) -> list[PromptRow]:
    count = source.removeprefix(SIMULATED_PREFIX)
    if not count.isascii() or not count.isdigit() or int(count) == 0:
        raise DataError(f"simulated source must be simulated:ROWS with ROWS >= 1, got {source!r}")
    return [PromptRow(f"simulated-{i}", f"Reply with {i}.", str(i), UNLABELLED) for i in range(int(count))]


def _raw_rows(source: str) -> Iterator[tuple[_Place, _Columns]]:
    path = Path(source)
    if path.suffix == ".jsonl":
        return jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.is_file():
        raise DataError(f"{source}: a data file must end in .jsonl or .parquet")
    return _hub_rows(source)


def jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(file:line, row) of a JSON lines file; blank lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is no JSON object.
    """
    try:
        # Binary lines end at \n only; text mode would also have to decode the whole file before the first bad line.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.isspace():
                    continue
                place = f"{path}:{number}"
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as exc:
                    raise DataError(f"{place}: not JSON: {exc}") from exc
                if not isinstance(row, dict):
                    raise DataError(f"{place}: a row must be a JSON object, got {type(row).__name__}")
                yield place, cast("_Columns", row)
    except OSError as exc:
        raise DataError(f"data file {path}: cannot be read: {exc.strerror}") from exc


def _parquet_rows(path: Path) -> Iterator[tuple[_Place, _Columns]]:
    import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]  (only this format pays for the import)

    parquet = cast("Any", pyarrow.parquet)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except ValueError as exc:  # ArrowInvalid is one
        raise DataError(f"data file {path}: not Parquet: {exc}") from exc
    except OSError as exc:
        raise DataError(f"data file {path}: cannot be read: {exc.strerror or exc}") from exc


def _hub_rows(source: str) -> Iterator[tuple[_Place, _Columns]]:
    name, _, split = source.partition(":")
    try:
        import datasets  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]  (optional)

        load = cast("Any", datasets).load_dataset
    except (ImportError, AttributeError) as exc:  # AttributeError: a bare folder called datasets/ imports too
        raise DataError(f"data set {source!r}: an HF data set needs the package: pip install datasets") from exc
    try:
        table = load(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as exc:
        raise DataError(f"data set {source!r}: cannot be loaded: {exc}") from exc
    for number, row in enumerate(cast("Iterable[_Columns]", table), start=1):
        yield f"{source}:{number}", row


def _checked_rows(raw: Iterable[tuple[_Place, _Columns]], data: Data) -> list[PromptRow]:
    rows: list[PromptRow] = []
    places: dict[str, _Place] = {}
    repeats: dict[str, int] = {}
    for place, columns in raw:
        text = _required(place, columns, data.prompt_column)
        answer = _required(place, columns, data.answer_column)
        level = _text(place, data.level_column, columns.get(data.level_column)) or UNLABELLED
        prompt_id = _text(place, data.id_column, columns.get(data.id_column))
        if not prompt_id:
            prompt_id = _hash_id(text, answer)
            # Data sets repeat rows: each copy is a prompt of its own, numbered in file order.
            repeats[prompt_id] = repeats.get(prompt_id, 0) + 1
            if repeats[prompt_id] > 1:
                prompt_id = f"{prompt_id}-{repeats[prompt_id]}"
        if prompt_id in places:
            raise DataError(f"{place}: id {prompt_id!r} is already taken by {places[prompt_id]}")
        places[prompt_id] = place
        rows.append(PromptRow(prompt_id, text, answer, level))
    return rows


def _hash_id(text: str, answer: str) -> str:
    return hashlib.sha256(f"{text}\0{answer}".encode()).hexdigest()[:16]


def _required(place: _Place, columns: _Columns, name: str) -> str:
    if name not in columns:
        raise DataError(f"{place}: no column {name!r}; columns here: {', '.join(sorted(columns)) or 'none'}")
    text = _text(place, name, columns[name])
    if not text:
        raise DataError(f"{place}: column {name!r} is empty")
    return text


def _text(place: _Place, name: str, value: object) -> str:
    """`value` as text: strings as they stand (blank = missing), finite numbers in their shortest form."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    raise DataError(f"{place}: column {name!r} must be text or a finite number, got {value!r:.60}")
