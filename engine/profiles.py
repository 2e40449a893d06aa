"""Read laws of the pass rate: `tiers`, a number, a list of numbers, or a measured profile file.

Invariant: every row of a profile has a prompt id of its own and a rate in [0, 1], else a `DataError` names file and
line; nothing is skipped. Called at start-up by the engine, the simulator and the planner.

A profile is JSON lines or CSV (with a header line), one prompt a row: `prompt_id`, and either `rate` or the counts
`right` and `total`. Other columns are ignored.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from engine.core.errors import DataError
from engine.core.prior import Prior, of_rates, tiers
from engine.datasets import jsonl_rows

_SUFFIXES = (".jsonl", ".csv")
_Row = tuple[str, Mapping[str, object]]
"""("profile.jsonl:12", columns)."""


def load_law(source: str | float | Sequence[float], key: str = "law of pass rates") -> Prior:
    """The law of p that a configuration names.

    Args:
        source: `tiers`, a number, numbers (also as text: `0.1`, `0.1, 0.4`, `[0.1, 0.4]`), or a profile's path.
        key: Where it was named, for errors.

    Raises:
        DataError: a rate outside [0, 1], an unusable profile, or none of these.
    """
    if isinstance(source, str):
        source = source.strip()
        if source == "tiers":
            return tiers()
        rates = _numbers(source)
        if rates is None:
            if not source.endswith(_SUFFIXES):
                raise DataError(f"{key} must be tiers, numbers, or a .jsonl or .csv profile, got {source!r}")
            return of_rates(load_profile(source).values())
    else:
        rates = [source] if isinstance(source, int | float) else source
    try:
        return of_rates(rates)
    except ValueError as exc:
        raise DataError(f"{key} {source!r}: {exc}") from exc


def load_profile(path: str | Path) -> dict[str, float]:
    """Prompt id -> measured pass rate, in the file's order.

    Raises:
        DataError: no such file, not .jsonl or .csv, a row that cannot be used, two rows of one prompt, or no rows.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise DataError(f"a profile must be a .jsonl or .csv file, got {str(path)!r}")
    profile: dict[str, float] = {}
    try:
        for place, columns in jsonl_rows(path) if path.suffix == ".jsonl" else _csv_rows(path):
            prompt_id = columns.get("prompt_id")
            if prompt_id is None or prompt_id == "" or not isinstance(prompt_id, str | int):
                raise DataError(f"{place}: prompt_id must be text, got {prompt_id!r:.60}")
            if str(prompt_id) in profile:
                raise DataError(f"{place}: prompt_id {str(prompt_id)!r} stands in an earlier row too")
            profile[str(prompt_id)] = _rate(place, columns)
    except OSError as exc:
        raise DataError(f"profile {path}: cannot be read: {exc.strerror}") from exc
    if not profile:
        raise DataError(f"profile {path}: holds no rows")
    return profile


def _numbers(text: str) -> list[float] | None:
    """The numbers of a list, None when it is something else."""
    try:
        return [float(part) for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    except ValueError:
        return None


def _csv_rows(path: Path) -> Iterator[_Row]:
    # A bad byte becomes a bad value, which its row then names.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for row in rows:
                columns = cast("Mapping[str, object]", row)
                yield f"{path}:{rows.line_num}", columns
        except csv.Error as exc:
            raise DataError(f"{path}:{rows.reader.line_num}: not CSV: {exc}") from exc


def _rate(place: str, columns: Mapping[str, object]) -> float:
    if columns.get("rate") not in (None, ""):
        rate = _number(place, columns, "rate")
        if not 0.0 <= rate <= 1.0:
            raise DataError(f"{place}: rate must be in [0, 1], got {rate:g}")
        return rate
    right, total = _number(place, columns, "right"), _number(place, columns, "total")
    for name, count in (("right", right), ("total", total)):
        if not count.is_integer():
            raise DataError(f"{place}: {name} must be a whole number, got {count:g}")
    if not (0.0 <= right <= total and total > 0.0):
        raise DataError(f"{place}: counts must have 0 <= right <= total and total >= 1, got {right:g} of {total:g}")
    return right / total


def _number(place: str, columns: Mapping[str, object], name: str) -> float:
    value = columns.get(name)
    if value is None or value == "":
        raise DataError(f"{place}: needs a rate, or right and total; {name} is missing")
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{place}: {name} must be a finite number, got {value!r:.60}")
    return number
