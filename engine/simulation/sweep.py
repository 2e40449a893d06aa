"""A table over the pass rate: what K = 8 costs by rule, budget and exit test, simulated beside the exact value.

The setting is that of arXiv 2510.04996 v3, appendix D: 8 right samples (`positives`) or 8 of each class (`balance`),
N_max = 32, 64, 128, rounds of N_max / 8. Each row is a run of its own through the scheduler, without expiry.
Plots need matplotlib (the extra `plots`).
"""

import csv
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from configs.load import ConfigError
from configs.root import Config
from engine.core.law import exact_law
from engine.policy import make_policy
from engine.simulation.run import simulate

K = 8
BUDGETS = (32, 64, 128)
PASS_RATES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
ROUNDS = 8
_NO_EXPIRY = 1_000_000

Rule = Literal["positives", "balance"]
Test = Literal["sample", "round"]


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    rule: Rule
    test: Test
    """When the exit is tested: after each sample in launch order, or after each round."""
    k: int
    n_max: int
    pass_rate: float
    samples_exact: float
    """Counted samples of a visit, by dynamic programming (engine/core/law.py)."""
    samples_mean: float
    """The same, simulated."""
    samples_se: float
    success_exact: float
    success_rate: float


def sweep(config: Config, folder: Path, pass_rates: Sequence[float] = PASS_RATES) -> list[Path]:
    """Run the table and write `sweep.csv` and one plot a rule into `folder`; returns the files.

    Args:
        config: Gives prompts a row (`sim.prompts`), seed, slots and length law.
        folder: Made if it is not there.
        pass_rates: Of the rows.

    Raises:
        ConfigError: matplotlib is not installed, or `folder` cannot be made; found out before anything runs.
    """
    _check_plots()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {folder}: no folder can be made there: {exc.strerror}") from exc
    rows = list(table(config, pass_rates))
    path = folder / "sweep.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return [path, *(_plot(rows, rule, folder) for rule in ("positives", "balance"))]


def table(config: Config, pass_rates: Sequence[float] = PASS_RATES) -> Iterator[Row]:
    """Every row, in the order of the file."""
    for rule in ("positives", "balance"):
        for test in ("sample", "round"):
            for n_max in BUDGETS:
                for pass_rate in pass_rates:
                    yield _row(_setting(config, rule, test, n_max, pass_rate), rule, test)


def _setting(config: Config, rule: Rule, test: Test, n_max: int, pass_rate: float) -> Config:
    """The configuration of one row."""
    strategy: dict[str, object] = {
        **config.strategy.model_dump(),
        "name": rule if test == "sample" else "rounds",
        "exit": rule,
        "k_pos": K,
        "k_neg": K,
        "n_max": n_max,
        "group_size": 2 * K,
        "round_size": n_max // ROUNDS,
        "rounds": ROUNDS,
        "futility": "none",
    }
    changes: dict[str, object] = {
        "strategy": strategy,
        "sim": {**config.sim.model_dump(), "pass_rate": pass_rate, "epochs": 1},
        "selector": {},
        "staleness": {"max": _NO_EXPIRY},
        "stages": [],
    }
    return Config.model_validate({**config.model_dump(), **changes})


def _row(config: Config, rule: Rule, test: Test) -> Row:
    report = simulate(config, step_s=0.0)
    pass_rate = config.sim.pass_rate
    if not isinstance(pass_rate, float):
        raise TypeError(f"a row has one pass rate, got {pass_rate!r}")
    law = exact_law(make_policy(config).strategy, pass_rate, config.strategy.n_max)
    return Row(
        rule=rule,
        test=test,
        k=K,
        n_max=config.strategy.n_max,
        pass_rate=pass_rate,
        samples_exact=law.expected_samples,
        samples_mean=report.samples_per_prompt_mean,
        samples_se=report.samples_per_prompt_se or 0.0,
        success_exact=law.solved_rate,
        success_rate=report.success_rate,
    )


def _check_plots() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--sweep draws with matplotlib, which is not installed: pip install 'adastream[plots]'")


def _plot(rows: Sequence[Row], rule: Rule, folder: Path) -> Path:
    """Samples a prompt and success against p, one colour a budget, lines exact and points simulated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for colour, n_max in enumerate(BUDGETS):
        for test, style in (("sample", "-"), ("round", "--")):
            chosen = [row for row in rows if (row.rule, row.test, row.n_max) == (rule, test, n_max)]
            rates = [row.pass_rate for row in chosen]
            name = f"N_max = {n_max}, each {test}"
            left.plot(rates, [row.samples_exact for row in chosen], style, color=f"C{colour}", label=name)
            errors = [3.0 * row.samples_se for row in chosen]
            left.errorbar(rates, [row.samples_mean for row in chosen], errors, fmt=".", color=f"C{colour}")
            if test == "sample":
                right.plot(rates, [row.success_exact for row in chosen], style, color=f"C{colour}", label=name)
                right.plot(rates, [row.success_rate for row in chosen], ".", color=f"C{colour}")
    left.set(xlabel="pass rate p", ylabel="samples a prompt (points: simulated, ± 3 SE)", title=f"{rule}, K = {K}")
    right.set(xlabel="pass rate p", ylabel="probability that the exit is reached", title="success (in rounds the same)")
    left.legend(fontsize="small")
    right.legend(fontsize="small")
    path = folder / f"sweep_{rule}.png"
    figure.savefig(path, dpi=150)  # pyright: ignore[reportUnknownMemberType]  (its stub leaves parameters open)
    return path
