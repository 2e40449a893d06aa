"""How fast the simulator plays the real dispatcher: samples a second, cost against the queue's length, the largest run.

Phases: `rate` (each strategy, three runs), `flat` (cost of a sample with 1,000 to 1,000,000 prompts in the queue, the
short runs repeated until they are as long as the long ones are exact), `scale` (1,024 workers x 256 slots, B = 32,768,
1,000,000 prompts: runs to its end; peak memory of the process), `profile` (cProfile of one run).
Run: `python -m benchmarks.simulator rate` and so on; one core, nothing else on it.
"""

import argparse
import cProfile
import pstats
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import load_config
from engine.simulation import Report, simulate

PRESET = Path("configs/sim.toml")
STRATEGIES = {
    "balance": [],
    "balance, pace known, η = 2": ["staleness.max=2"],
    "positives": ["strategy.name=positives", "strategy.k_pos=2", "staleness.max=1000000"],
    "fixed": ["strategy.name=fixed", "strategy.n_max=8", "staleness.max=1000000"],
}
SIZES = (1_000, 10_000, 100_000, 1_000_000)
MIN_SAMPLES = 400_000
"""Samples measured at every size of the queue, over as many runs as that takes."""
SCALE = [
    "sim.workers=1024",
    "sim.slots=256",
    "sim.prompts=1000000",
    "learner.groups_per_step=32768",
    "staleness.max=4",
]


def play(overrides: Sequence[str]) -> Report:
    """One run of the preset."""
    return simulate(load_config(PRESET, overrides))


def rate(prompts: int) -> None:
    """Samples a second of each strategy, median and range of three runs."""
    for name, overrides in STRATEGIES.items():
        rates = []
        for seed in range(3):
            report = play([f"sim.prompts={prompts}", f"sim.seed={seed}", "staleness.max=1000000", *overrides])
            rates.append(report.samples / report.wall_s)
        print(f"{name:30} {statistics.median(rates):9.0f} samples/s ({min(rates):.0f} to {max(rates):.0f})")


def flat() -> None:
    """Microseconds a sample at each size of the queue."""
    for prompts in SIZES:
        samples, wall_s, seed = 0, 0.0, 0
        while samples < MIN_SAMPLES:
            report = play([f"sim.prompts={prompts}", f"sim.seed={seed}", "staleness.max=4"])
            samples, wall_s, seed = samples + report.samples, wall_s + report.wall_s, seed + 1
        print(f"{prompts:9} prompts: {wall_s / samples * 1e6:6.2f} us a sample ({samples} samples in {seed} runs)")


def scale() -> None:
    """The largest setting, to its end."""
    report = play(SCALE)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(report.as_text(), f"peak memory {peak_bytes / 2**30:.2f} GiB", sep="")


def profile(prompts: int) -> None:
    """Where the time of one run goes."""
    profiler = cProfile.Profile()
    profiler.runcall(play, [f"sim.prompts={prompts}", "staleness.max=4"])
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> int:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description="Speed of the simulator.")
    parser.add_argument("phase", choices=("rate", "flat", "scale", "profile"))
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts of a run (rate, profile)")
    options = parser.parse_args()
    match options.phase:
        case "rate":
            rate(options.prompts)
        case "flat":
            flat()
        case "scale":
            scale()
        case _:
            profile(options.prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
