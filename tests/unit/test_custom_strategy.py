"""A user's own strategy: loaded by name, made from its section, and never able to mislead the dispatcher."""

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs import Config
from configs.load import ConfigError, load_config
from configs.strategy import Strategy as StrategyConfig
from engine.core.errors import RunError, first_cause
from engine.core.past import EMPTY
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.strategy import Counts, Strategy
from engine.policy import make_policy
from engine.serve import main
from engine.simulation.run import simulate
from engine.strategies.custom import load
from engine.strategies.positives import Positives
from tests.support.event_driver import Driver, bernoulli
from tests.support.whole_run import WholeRun

SOUND = """
from engine.core.strategy import FullBudget

class Own(FullBudget):
    def __init__(self, config):
        self.k, self.n_max, self.group_size = config.k_pos, config.n_max, config.group_size
        self.selection = "balanced"

    def verdict(self, counts):
        if counts.fresh_right >= self.k:
            return "solved"
        return "exhausted" if counts.total >= counts.budget else "continue"

    def missing(self, counts):
        return max(0, self.k - counts.fresh_right), 0

    def need(self, counts):
        return min(max(0, self.k - counts.fresh_right), counts.budget - counts.total)
"""
NUMBERS = itertools.count()

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts a module in a folder that Python imports from; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(text: str) -> str:
        name = f"own_strategy_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
        return name

    return put


def altered(body: str) -> str:
    """The sound strategy with some members replaced, under the name `Altered`."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{SOUND}\nclass Altered(Own):\n{lines}\n"


def made(write: Write, body: str, **settings) -> Strategy:
    return load(StrategyConfig(name=f"{write(altered(body))}:Altered", **settings))


def always(member: str, value: object) -> str:
    """A member that keeps this value whatever the class assigns."""
    return f"{member} = property(lambda self: {value!r}, lambda self, value: None)"


def later(member: str, answer: str) -> str:
    """A method that is sound until an arm has three samples."""
    head = f"def {member}(self, counts):\n    if counts.total < 3:\n        return super().{member}(counts)"
    return f"{head}\n    {answer}"


def second(answer: str, first: str) -> str:
    """`budgets` that are sound when asked first."""
    head = "asked = 0\ndef budgets(self, pasts):\n    self.asked += 1"
    return f"{head}\n    return {first} if self.asked == 1 else {answer}"


def test_a_strategy_of_ones_own_decides_as_the_built_in_one_with_the_same_rule(write) -> None:
    own = load(StrategyConfig(name=f"{write(SOUND)}:Own", k_pos=3, n_max=16, group_size=6))
    assert (own.n_max, own.group_size, own.selection, own.window) == (16, 6, "balanced", 1)

    def pools(strategy: Strategy) -> dict[str, tuple]:
        out = Driver(Policy(strategy, Bound(1_000_000, 16)), bernoulli(0.3)).run(200)
        return {
            r.arm.prompt.prompt_id: (r.reason, len(r.arm.counted), r.group and sorted(s.index for s in r.group.kept))
            for r in out.retirements
        }

    assert pools(own) == pools(Positives(3, 16, 6))


@pytest.mark.parametrize("path", ["{}:Own", "{}.Own"])
def test_a_strategy_is_found_by_a_path_with_a_colon_or_with_dots_only(write, path) -> None:
    own = load_config(SIM, [f"strategy.name={path.format(write(SOUND))}", "strategy.n_max=16"])
    assert make_policy(own).strategy.n_max == 16


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        (SOUND, "{module}:Missing", "module {module} has no class Missing; it has: Own"),
        (SOUND, "{module}:FullBudgets", "it has: Own$"),
        (SOUND, "{module}:Own.verdict", "must look like package.module:Class or .*, got '{module}:Own.verdict'"),
        (SOUND, "{module}.inner:Own", "module {module}.inner cannot be imported: ModuleNotFoundError"),
        (SOUND, ":Own", "must look like package.module:Class or .*, got ':Own'"),
        (SOUND, "{module}.Missing", "module {module} has no class Missing; it has: Own"),
        (SOUND, ".Own", "must look like package.module:Class or .*, got '.Own'"),
        (SOUND, "{module}.", "must look like package.module:Class or .*, got '{module}.'"),
        ("raise SystemExit(3)", "{module}:Own", "module {module} cannot be imported: SystemExit: 3"),
        ("1 / 0", "{module}:Own", "module {module} cannot be imported: ZeroDivisionError: division by zero"),
        ("def Own(", "{module}:Own", "module {module} cannot be imported: SyntaxError"),
        ("Own = 3", "{module}:Own", "module {module} has no class Own; it has: none"),
        ("class Own:\n    pass", "{module}:Own", r"Own\(config.strategy\) raised TypeError"),
        (
            "class Own:\n    def __init__(self, config):\n        self.n_max, self.window = 4, 1",
            "{module}:Own",
            "Own lacks group_size, selection, budgets, verdict, missing, need; a strategy has group_size, n_max",
        ),
    ],
)
def test_a_strategy_that_cannot_be_loaded_is_refused_by_name(write, text, wanted, message) -> None:
    module = write(text)
    name = wanted.format(module=module)
    with pytest.raises(ConfigError, match=message.replace("{module}", module)) as caught:
        load(StrategyConfig(name=name))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "group_size = property(lambda self: -1, lambda self, value: None)",
            "group_size must be an integer >= 0, got -1",
        ),
        ("n_max = property(lambda self: 0, lambda self, value: None)", "n_max must be an integer >= 1, got 0"),
        ("window = True", "window must be an integer >= 1, got True"),
        ("window = property(lambda self: 1 / 0)", "window raised ZeroDivisionError"),
        (always("selection", "best"), "selection must be one of balanced, uniform, right, got 'best'"),
        ("def budgets(self, pasts): return []", r"budgets returned \[\] for 1 prompts; allowed: 1 integers in \[0, "),
        (
            "def budgets(self, pasts): return [0] * len(pasts)",
            "budgets returned 0 for every prompt that was never visited",
        ),
        ("window = property(lambda self: exit(2))", "window raised SystemExit: 2"),
        ("def __init__(self, config): exit(2)", r"\(config.strategy\) raised SystemExit: 2"),
        ("def need(self): return 1", "need raised TypeError: .* for an arm with 0 right"),
        ("def need(self, counts): return 0", r"need returned 0 .* allowed: an integer in \[1, 32\]"),
        ("def missing(self, counts): return 2", r"missing returned 2 .*\(right, wrong\)"),
        (
            "def verdict(self, counts): return 'done'",
            "verdict returned 'done' for an arm with 1 right .* allowed: continue",
        ),
        ("def verdict(self, counts): return counts.correct", "verdict raised AttributeError: .*correct"),
    ],
)
def test_a_strategy_that_fails_on_a_new_arm_is_refused_at_load(write, body, message) -> None:
    with pytest.raises(ConfigError, match=message):
        made(write, body)


def counts(right: int, wrong: int, budget: int = 32) -> Counts:
    return Counts(right, wrong, right, wrong, budget, seed=77)


@pytest.mark.parametrize(
    ("member", "answer", "message"),
    [
        ("verdict", "return None", "verdict returned None .* allowed: continue, solved, exhausted, futile, again"),
        ("verdict", "return ['solved']", r"verdict returned \['solved'\]"),
        ("verdict", "raise SystemExit(3)", "verdict raised SystemExit: 3"),
        ("verdict", "return 1 / 0", "verdict raised ZeroDivisionError: division by zero"),
        ("need", "return 0", r"need returned 0 .* allowed: an integer in \[1, 28\]"),
        ("need", "return -1", "need returned -1"),
        ("need", "return 29", r"need returned 29 .* allowed: an integer in \[1, 28\]"),
        ("need", "return 1.5", "need returned 1.5"),
        ("need", "return True", "need returned True"),
        ("need", "return {}['x']", "need raised KeyError: 'x'"),
        ("missing", "return (1,)", r"missing returned \(1,\)"),
        ("missing", "return (1, -1)", r"missing returned \(1, -1\)"),
        ("missing", "return 'no'", "missing returned 'no'"),
        ("missing", "raise OSError('gone')", "missing raised OSError: gone"),
    ],
)
def test_an_error_or_nonsense_later_names_the_strategy_and_the_counts(write, member, answer, message) -> None:
    strategy = made(write, later(member, answer))
    asked = getattr(strategy, member)
    asked(counts(0, 2))
    with pytest.raises(RunError, match=message) as caught:
        asked(counts(1, 3))
    text = str(caught.value)
    assert ":Altered: " in text
    assert "an arm with 1 right (1 fresh) and 3 wrong (3 fresh) of 32 samples, seed 77" in text


@pytest.mark.parametrize("verdict", ["continue", "again"])
def test_an_arm_that_would_never_end_is_an_error_at_its_budget(write, verdict) -> None:
    strategy = made(write, f"def verdict(self, counts): return {verdict!r}", n_max=4)
    assert strategy.verdict(counts(0, 3, budget=4)) == verdict
    with pytest.raises(RunError, match=f"verdict returned '{verdict}' .* allowed: solved, exhausted, futile"):
        strategy.verdict(counts(0, 4, budget=4))


def test_an_arm_whose_exit_holds_again_may_need_nothing(write) -> None:
    assert made(write, "pass").need(counts(2, 1)) == 0


def test_an_arm_that_waits_to_go_on_must_need_something(write) -> None:
    body = "def verdict(self, counts): return 'again'\ndef need(self, counts): return 1 - (counts.total == 3)"
    strategy = made(write, body)
    with pytest.raises(RunError, match="need returned 0"):
        strategy.need(counts(1, 2))


@pytest.mark.parametrize(
    "answer", ["[8]", "[8, 8, 8]", "[8, -1]", "[8, 33]", "[8, 8.0]", "[8, True]", "None", "'88'", "{8}"]
)
def test_budgets_are_one_integer_up_to_n_max_for_each_prompt(write, answer) -> None:
    strategy = made(write, f"window = 2\n{second(answer, '[0, 32]')}")
    with pytest.raises(RunError, match=r"budgets returned .* for 2 prompts; allowed: 2 integers in \[0, n_max = 32\]"):
        strategy.budgets([EMPTY] * 2)


def test_budgets_that_raise_name_the_strategy(write) -> None:
    with pytest.raises(RunError, match="Altered: budgets raised ZeroDivisionError"):
        made(write, second("[1 / 0]", "[8]")).budgets([EMPTY])


def test_prompts_that_are_given_no_samples_at_all_end_a_simulated_run(write) -> None:
    name = f"{write(altered(second('[0] * len(pasts)', '[8]')))}:Altered"
    report = simulate(load_config(SIM, [f"strategy.name={name}", "sim.prompts=50"]))
    assert (report.visits, report.samples, report.launches) == (50, 0, 0)


SIM = Path(__file__).resolve().parents[2] / "configs" / "sim.toml"
BASE = {
    "run": {"name": "sim", "max_steps": 5},
    "model": {"max_context_tokens": 4096},
    "data": {"train": "simulated:200", "test": ""},
    "sampling": {"max_tokens": 2048},
    "worker": {"kind": "simulated", "count": 2, "slots": 16},
    "learner": {"kind": "simulated", "groups_per_step": 4},
    "server": {"live": "none"},
}


def whole_run(name: str, folder: Path) -> WholeRun:
    return WholeRun(Config.model_validate({**BASE, "strategy": {"name": name}}), folder)


def test_a_whole_run_goes_through_with_a_strategy_of_ones_own(write, tmp_path) -> None:
    summary = whole_run(f"{write(SOUND)}:Own", tmp_path / "run").run()
    assert summary["steps"] == 5
    assert summary["tokens_missing"] == 0


def test_a_whole_run_ends_with_the_name_of_the_strategy_that_failed(write, tmp_path) -> None:
    name = f"{write(altered(later('verdict', 'return counts.hope')))}:Altered"
    with pytest.raises(ExceptionGroup) as caught:
        whole_run(name, tmp_path / "run").run()
    cause = first_cause(caught.value)
    assert isinstance(cause, RunError)
    assert re.match(
        rf"arm \d+, prompt simulated-\d+: strategy {re.escape(name)}: verdict raised AttributeError", str(cause)
    )
    assert "an arm with" in str(cause)


def test_the_command_ends_with_an_error_that_names_a_strategy_it_cannot_load(tmp_path, capsys) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nmax_steps = 1\n[strategy]\nname = "no_such_package.rules:Mine"\n', encoding="utf-8")
    assert main(["--config", str(path), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: strategy.name 'no_such_package.rules:Mine': module no_such_package.rules cannot be")
