"""A user's own strategy, `strategy.name = "package.module:Class"` (or the dotted path `package.module.Class`).

The class is made with one argument, the [strategy] section, and has the members of engine.core.strategy.Strategy
(`FullBudget` gives it `window` and `budgets`).

Invariants:
- A strategy that cannot be imported, made, or asked about a new arm is refused at load, by name.
- Later answers are checked before they reach the dispatcher: an error or nonsense ends the run and names the strategy
  and the counts that it was asked about. No arm can go on past its budget or wait for ever.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar, cast, get_args

from configs.load import ConfigError
from configs.strategy import Strategy as StrategyConfig
from engine.core.errors import RunError
from engine.core.past import EMPTY, Past
from engine.core.strategy import Counts, Selection, Strategy, Verdict

T = TypeVar("T")

MEMBERS = ("group_size", "n_max", "selection", "window", "budgets", "verdict", "missing", "need")
VERDICTS: tuple[str, ...] = get_args(Verdict)
ENDS = tuple(verdict for verdict in VERDICTS if verdict not in ("continue", "again"))
SELECTIONS: tuple[str, ...] = get_args(Selection)
FAULTS = (Exception, SystemExit)
"""What code of a user may raise: `sys.exit()` there must not end the engine without a word."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A strategy whose every answer is checked."""

    name: str
    """As the configuration has it."""
    inner: Strategy
    group_size: int
    n_max: int
    selection: Selection
    window: int

    def budgets(self, pasts: Sequence[Past]) -> list[int]:
        """One integer in [0, n_max] a prompt."""
        answer = self._ask("budgets", self.inner.budgets, pasts)
        given = cast("Sequence[object]", answer) if isinstance(answer, list | tuple) else ()
        budgets = [budget for budget in given if _is_integer(budget) and 0 <= budget <= self.n_max]
        if not len(budgets) == len(given) == len(pasts):
            raise RunError(
                f"strategy {self.name}: budgets returned {answer!r} for {len(pasts)} prompts; "
                f"allowed: {len(pasts)} integers in [0, n_max = {self.n_max}]"
            )
        return budgets

    def verdict(self, counts: Counts) -> Verdict:
        """One of the verdicts, and an end at the budget."""
        answer = self._ask("verdict", self.inner.verdict, counts)
        allowed = ENDS if counts.total >= counts.budget else VERDICTS
        if not (isinstance(answer, str) and answer in allowed):
            raise self._nonsense("verdict", answer, counts, ", ".join(allowed))
        return cast("Verdict", answer)

    def missing(self, counts: Counts) -> tuple[int, int]:
        """Two integers that are not negative."""
        answer = self._ask("missing", self.inner.missing, counts)
        match answer:
            case (int(right), int(wrong)) if right >= 0 and wrong >= 0:
                return right, wrong
            case _:
                raise self._nonsense("missing", answer, counts, "(right, wrong), both integers >= 0")

    def need(self, counts: Counts) -> int:
        """An integer up to what is left of the budget, and at least 1 while the arm goes on."""
        answer = self._ask("need", self.inner.need, counts)
        left = counts.budget - counts.total
        if not _is_integer(answer) or answer > left or (answer < 1 and self._goes_on(counts)):
            raise self._nonsense("need", answer, counts, f"an integer in [1, {left}] while the arm goes on")
        return answer

    def _goes_on(self, counts: Counts) -> bool:
        # Samples that became fresh again may complete an exit between two verdicts: then a need of 0 is right.
        return not counts.total or self.verdict(counts) not in ENDS

    def _ask(self, what: str, method: Callable[[T], object], about: T) -> object:
        try:
            return method(about)
        except FAULTS as exc:
            raise RunError(f"strategy {self.name}: {what} raised {_text(exc)} for {_describe(about)}") from exc

    def _nonsense(self, what: str, answer: object, counts: Counts, allowed: str) -> RunError:
        return RunError(f"strategy {self.name}: {what} returned {answer!r} for {_describe(counts)}; allowed: {allowed}")


def load(own: StrategyConfig) -> Strategy:
    """Import, make and rehearse the strategy that `own.name` names.

    Raises:
        ConfigError: no such module or class, it cannot be made with `own`, it lacks a member, or it answers nonsense
            about an arm without samples or with one.
    """
    found = _find(own.name)
    try:
        made = cast("Callable[[StrategyConfig], object]", found)(own)
    except FAULTS as exc:
        raise ConfigError(
            f"strategy.name {own.name!r}: {found.__name__}(config.strategy) raised {_text(exc)}; "
            "the class is made with one argument, the [strategy] section"
        ) from exc
    lacking = [member for member in MEMBERS if member not in dir(made)]
    if lacking:
        raise ConfigError(
            f"strategy.name {own.name!r}: {found.__name__} lacks {', '.join(lacking)}; a strategy has "
            f"{', '.join(MEMBERS)}"
        )
    group_size, n_max, window = (
        _count(own.name, made, member, least) for member, least in (("group_size", 0), ("n_max", 1), ("window", 1))
    )
    checked = Checked(own.name, cast("Strategy", made), group_size, n_max, _selection(own.name, made), window)
    try:
        _rehearse(checked)
    except RunError as exc:
        raise ConfigError(str(exc)) from exc
    return checked


def _find(name: str) -> type:
    path, _, class_name = name.partition(":") if ":" in name else name.rpartition(".")
    if not all(part.isidentifier() for part in (*path.split("."), class_name)):
        raise ConfigError(f"strategy.name must look like package.module:Class or package.module.Class, got {name!r}")
    try:
        module = importlib.import_module(path)
    except FAULTS as exc:
        raise ConfigError(
            f"strategy.name {name!r}: module {path} cannot be imported: {_text(exc)}; "
            "it must be installed, or lie in the folder that the run starts in"
        ) from exc
    members: dict[str, object] = vars(module)
    found = members.get(class_name)
    if not isinstance(found, type):
        classes = [key for key, value in members.items() if isinstance(value, type) and value.__module__ == path]
        raise ConfigError(
            f"strategy.name {name!r}: module {path} has no class {class_name}; it has: {', '.join(classes) or 'none'}"
        )
    return found


def _rehearse(strategy: Checked) -> None:
    """Ask what every arm will be asked first: a misspelt name shows now, not after the workers have started."""
    if not any(strategy.budgets([EMPTY] * strategy.window)):
        raise RunError(
            f"strategy {strategy.name}: budgets returned 0 for every prompt that was never visited; no prompt would"
            " ever be sampled"
        )
    for right, wrong in ((0, 0), (1, 0), (0, 1)):
        counts = Counts(right, wrong, right, wrong, strategy.n_max)
        if not counts.total or strategy.verdict(counts) == "continue":
            strategy.need(counts)
            strategy.missing(counts)


def _count(name: str, made: object, member: str, least: int) -> int:
    value = _read(name, made, member)
    if not _is_integer(value) or value < least:
        raise ConfigError(f"strategy.name {name!r}: {member} must be an integer >= {least}, got {value!r}")
    return value


def _selection(name: str, made: object) -> Selection:
    value = _read(name, made, "selection")
    if not (isinstance(value, str) and value in SELECTIONS):
        raise ConfigError(f"strategy.name {name!r}: selection must be one of {', '.join(SELECTIONS)}, got {value!r}")
    return cast("Selection", value)


def _read(name: str, made: object, member: str) -> object:
    try:
        return getattr(made, member)
    except FAULTS as exc:
        raise ConfigError(f"strategy.name {name!r}: {member} raised {_text(exc)}") from exc


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _describe(about: object) -> str:
    if not isinstance(about, Counts):
        return "a window of prompts"
    return (
        f"an arm with {about.right} right ({about.fresh_right} fresh) and {about.wrong} wrong "
        f"({about.fresh_wrong} fresh) of {about.budget} samples, seed {about.seed}"
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
