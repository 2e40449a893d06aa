"""Load a TOML preset, apply `section.key=value` overrides, and turn every fault into one clear message.

Raises `ConfigError` (a ValueError): which file, which key, what was got, what is allowed.
"""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import cast, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from configs.meaning import shown
from configs.root import Config
from configs.strategy import RUN_WIDE


class ConfigError(ValueError):
    """The configuration cannot be used; the text says which key, what was got and what is allowed."""


_TYPES = {
    "bool_type": "Input should be true or false",
    "float_type": "Input should be a valid number, without quotes and as TOML has it (0.5, not .5)",
    "int_type": "Input should be a valid integer, without quotes, point or exponent",
    "list_type": "Input should be a list",
    "tuple_type": "Input should be a list",
}
"""What a value of another type is told."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read `path` and apply overrides such as `sampling.max_tokens=32` (values in TOML syntax, or bare words).

    Raises:
        ConfigError: file missing or not TOML, unknown key, wrong type or range, malformed override.
    """
    try:
        table: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"config {path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"config {path}: not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"config {path}: not valid TOML: {exc}") from exc
    for override in overrides:
        _apply(table, override)
    try:
        return Config.model_validate(table)
    except ValidationError as exc:
        raise ConfigError("\n".join(f"config {path}: {line}" for line in _lines(exc))) from exc


def dump_config(config: Config) -> str:
    """The whole configuration, defaults included, as TOML that `load_config` reads back to an equal one."""
    # A stage may not set the keys that hold for the whole run, so it is written without them.
    stages = {"__all__": {"strategy": RUN_WIDE}}
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude={"stages": stages}))


def _apply(table: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names) or len(names) < 2:
        raise ConfigError(f"override must look like section.key=value, got {override!r}")
    place = table
    for name in names[:-1]:
        inner = place.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {name} is a value, not a section")
        place = cast("dict[str, object]", inner)
    place[names[-1]] = _value(text)


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _lines(error: ValidationError) -> Iterable[str]:
    for fault in error.errors():
        where, given = ".".join(str(part) for part in fault["loc"]), cast("object", fault["input"])
        got = str(given) if isinstance(given, float) else shown(given)  # 1.0 is not the integer 1
        match fault["type"]:
            case "extra_forbidden":
                allowed = _allowed(fault["loc"][:-1])
                near = difflib.get_close_matches(str(fault["loc"][-1]), allowed, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                yield f"unknown key {where!r} (got {got}); {hint}allowed: {', '.join(allowed)}"
            case "value_error":
                # The text names its keys; of several stages, say which.
                place = f"stages.{fault['loc'][1]}: " if fault["loc"][:1] == ("stages",) else ""
                yield from (place + line for line in str(fault["msg"]).removeprefix("Value error, ").splitlines())
            case "model_type":
                yield f"{where} must be a section with {', '.join(_allowed(fault['loc']))}, got {got}"
            case "missing":
                yield f"{where} must be set"
            case kind:
                yield f"{where}: {_TYPES.get(kind, fault['msg'])}, got {got}"


def _allowed(location: tuple[int | str, ...]) -> list[str]:
    """Keys of the section at a place; lists of sections are entered by number."""
    model: type[BaseModel] = Config
    for name in location:
        if isinstance(name, int):
            continue
        inner = _section(model.model_fields[name].annotation)
        if inner is None:
            break
        model = inner
    return sorted(model.model_fields)


def _section(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, also in a list or optionally."""
    for kind in (annotation, *cast("tuple[object, ...]", get_args(annotation))):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
