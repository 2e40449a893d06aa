"""The staleness frontier: what a bound costs, by simulation: samples a useful group, waste and age against η.

Setting of the design's table: 64 slots, B = 16, 2/2, n_max 32, published difficulty tiers, lognormal lengths (sigma
0.8), a learner 1.2 times as fast as the generators; then fewer and more slots for the same B.

    python -m benchmarks.frontier --out docs/plots
    python -m benchmarks.frontier --setting large --out docs/plots
    python -m benchmarks.frontier --setting slow-learner --out docs/plots

The first writes `frontier.csv` and `frontier.png` (matplotlib, the extra `plots`). `large`: 64 workers x 256 slots,
B = 2,048, 4/4, n_max 64, n = 8; `slow-learner`: a learner 0.7 times as fast, which must never wait. Each writes a CSV.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from configs.load import load_config
from engine.simulation import Report, simulate

PRESET = Path("configs/sim.toml")
STALENESS = (1, 2, 4, 8)
SLOTS = (16, 64, 256)
DEFAULT = "default"
WAYS = {
    DEFAULT: ["strategy.name=balance"],
    "need + deadline": ["strategy.name=balance", "strategy.futility=none"],
    "need": ["strategy.name=balance", "strategy.futility=none", "strategy.raise_by_deadline=false"],
    "rounds of 8": ["strategy.name=rounds"],
    "futility = expired": ["strategy.name=balance", "strategy.futility=expired"],
}

LARGE = (
    "sim.workers=64", "sim.slots=256", "learner.groups_per_step=2048", "strategy.k_pos=4", "strategy.k_neg=4",
    "strategy.n_max=64", "strategy.group_size=8",
)  # fmt: skip
ROUNDS_OF_64 = ("strategy.rounds=8",)
SLOW_LEARNER = ("sim.learner_ratio=0.7",)


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    way: str
    slots: int
    eta: int
    samples_per_group: float
    """Counted and wasted."""
    wasted_share: float
    """Of tokens."""
    age: float
    """Mean staleness of kept samples, versions."""
    busy: float
    """Share of the slots' time in use."""
    success: float
    """Share of the visits that were solved."""
    learner_idle: float
    """Share of the learner's time."""
    dropped: int
    """Sealed groups that broke the bound before they were shipped."""
    oldest: int
    """Largest staleness in a gradient."""


def play(way: str, slots: int, eta: int, prompts: int, extra: Sequence[str] = ()) -> Point:
    """One run of the preset; `slots` in all."""
    overrides = [
        f"sim.prompts={prompts}", f"sim.slots={slots}", "sim.workers=1", "sim.pass_rate=tiers", "sim.learner_ratio=1.2",
        "sim.length_ratio_wrong=1.0", f"staleness.max={eta}", "learner.groups_per_step=16", *WAYS[way], *extra,
    ]  # fmt: skip
    return _point(way, slots, eta, simulate(load_config(PRESET, overrides)))


def _point(way: str, slots: int, eta: int, report: Report) -> Point:
    tokens = report.tokens_generated
    return Point(
        way=way,
        slots=slots,
        eta=eta,
        samples_per_group=round(report.samples / max(1, report.useful_groups), 3),
        wasted_share=round(report.tokens_wasted / tokens, 4) if tokens else 0.0,
        age=round(report.staleness_mean or 0.0, 3),
        busy=round(report.worker_busy_ratio, 4),
        success=round(report.success_rate, 4),
        learner_idle=round(report.learner_idle_ratio or 0.0, 4),
        dropped=report.groups_dropped,
        oldest=report.staleness_max or 0,
    )


def draw(points: list[Point], path: Path) -> None:
    """Three panels against η; the last one shows slots per B."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (cost, age, ratio) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for way in WAYS:
        own = [point for point in points if point.way == way and point.slots == 64]
        cost.plot([p.eta for p in own], [p.samples_per_group for p in own], marker="o", label=way)
        age.plot([p.eta for p in own], [p.age for p in own], marker="o", label=way)
    for slots in SLOTS:
        own = [point for point in points if point.way == DEFAULT and point.slots == slots]
        ratio.plot(
            [p.eta for p in own], [p.samples_per_group for p in own], marker="o", label=f"{slots / 16:g} slots a group"
        )
    for axes, title in (
        (cost, "samples a useful group, 64 slots, B = 16"),
        (age, "mean age of kept samples, versions"),
        (ratio, "samples a useful group, default"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("staleness.max (η)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(STALENESS, [str(eta) for eta in STALENESS])
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def frontier(prompts: int) -> list[Point]:
    """Every way against η, and the default with fewer and more slots."""
    return [
        _told(play(way, slots, eta, prompts))
        for way in WAYS
        for slots in (SLOTS if way == DEFAULT else (64,))
        for eta in STALENESS
    ]


def compare(extra: Sequence[str], slots: int, prompts: int) -> list[Point]:
    """The default beside the paper's rounds in another setting."""
    return [
        _told(play(way, slots, eta, prompts, [*extra, *more]))
        for way, more in ((DEFAULT, ()), ("rounds of 8", ROUNDS_OF_64 if extra is LARGE else ()))
        for eta in STALENESS[:3]
    ]


def _told(point: Point) -> Point:
    sys.stdout.write(f"{point}\n")
    sys.stdout.flush()
    return point


def _write(points: Sequence[Point], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Point)])
        table.writeheader()
        table.writerows(asdict(point) for point in points)


def main() -> int:
    """Play, write, draw; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/plots"))
    parser.add_argument("--setting", choices=("frontier", "large", "slow-learner"), default="frontier")
    parser.add_argument("--prompts", type=int, default=0, help="visits a run; 0 = 8,000, and 120,000 for large")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    match options.setting:
        case "large":
            points = compare(LARGE, 64 * 256, options.prompts or 120_000)
        case "slow-learner":
            points = compare(SLOW_LEARNER, 64, options.prompts or 8_000)
        case _:
            points = frontier(options.prompts or 8_000)
            draw(points, options.out / "frontier.png")
    _write(points, options.out / f"{options.setting}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
