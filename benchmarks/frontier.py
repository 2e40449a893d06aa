"""The staleness frontier: what a bound costs, by simulation: samples a useful group, waste and age against η.

Setting of the design's table: 64 slots, B = 16, 2/2, n_max 32, published difficulty tiers, lognormal lengths (sigma
0.8), a learner 1.2 times as fast as the generators; then fewer and more slots for the same B.

    python -m benchmarks.frontier --out docs/plots

Writes `frontier.csv` and `frontier.png` (matplotlib, the extra `plots`).
"""

import argparse
import csv
import sys
from dataclasses import dataclass
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
    "futility = threshold": ["strategy.name=balance", "strategy.futility=threshold"],
}


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


def play(way: str, slots: int, eta: int, prompts: int) -> Point:
    """One run of the preset."""
    overrides = [
        f"sim.prompts={prompts}", f"sim.slots={slots}", "sim.workers=1", "sim.pass_rate=tiers", "sim.learner_ratio=1.2",
        "sim.length_ratio_wrong=1.0", f"staleness.max={eta}", "learner.groups_per_step=16", *WAYS[way],
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


def main() -> int:
    """Play, write, draw; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/plots"))
    parser.add_argument("--prompts", type=int, default=8000)
    options = parser.parse_args()
    points: list[Point] = []
    for way in WAYS:
        for slots in SLOTS if way == DEFAULT else (64,):
            for eta in STALENESS:
                points.append(play(way, slots, eta, options.prompts))
                sys.stdout.write(f"{points[-1]}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    names = list(Point.__dataclass_fields__)
    with (options.out / "frontier.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        table.writerows([[point.way, point.slots, point.eta, point.samples_per_group, point.wasted_share, point.age,
                          point.busy, point.success] for point in points])  # fmt: skip
    draw(points, options.out / "frontier.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
