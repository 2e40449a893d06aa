"""How fast the simulator plays the real dispatcher: samples a second, cost against the queue's length, the largest run.

Phases: `rate` (each strategy, three runs), `flat` (cost of a sample with 1,000 to 1,000,000 prompts in the queue, short
runs repeated), `scale` (1,024 workers x 256 slots, B = 32,768, 1,000,000 prompts: runs to its end; peak memory of the
process), `profile` (cProfile of one run).
Times are those of the processor, so that other work on the machine counts little; nothing else on the core is better.
Run: `python -m benchmarks.simulator rate` and so on.
"""

import argparse
import cProfile
import pstats
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from configs.load import load_config
from engine.simulation import Report, simulate

PRESET = Path("configs/sim.toml")
STEP_S = 0.374
"""Of the preset's learner at `sim.learner_ratio` = 1.2; given, so that no run measures it in a warm-up."""
NO_EXPIRY = "staleness.max=1000000"
STRATEGIES = {
    "balance": [NO_EXPIRY],
    "balance, η = 2": ["staleness.max=2"],
    "balance, 8 in flight": [NO_EXPIRY, "sim.width=8"],
    "positives": [NO_EXPIRY, "strategy.name=positives"],
    "rounds": [NO_EXPIRY, "strategy.name=rounds"],
    "fixed": [NO_EXPIRY, "strategy.name=fixed", "strategy.n_max=8"],
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


def play(overrides: Sequence[str]) -> tuple[Report, float]:
    """One run of the preset and its seconds of processor time."""
    config = load_config(PRESET, overrides)
    started_at = time.process_time()
    report = simulate(config, STEP_S)
    return report, time.process_time() - started_at


def rate(prompts: int) -> None:
    """Samples a second of each strategy, median and range of three runs."""
    for name, overrides in STRATEGIES.items():
        rates = []
        for seed in range(3):
            report, cpu_s = play([f"sim.prompts={prompts}", f"sim.seed={seed}", *overrides])
            rates.append(report.samples / cpu_s)
        print(f"{name:22} {statistics.median(rates):9.0f} samples/s ({min(rates):.0f} to {max(rates):.0f})")


def flat() -> None:
    """Microseconds a sample at each size of the queue."""
    for prompts in SIZES:
        samples, cpu_s, seed = 0, 0.0, 0
        while samples < MIN_SAMPLES:
            report, run_s = play([f"sim.prompts={prompts}", f"sim.seed={seed}", "staleness.max=4"])
            samples, cpu_s, seed = samples + report.samples, cpu_s + run_s, seed + 1
        print(f"{prompts:9} prompts: {cpu_s / samples * 1e6:6.2f} us a sample ({samples} samples in {seed} runs)")


def scale() -> None:
    """The largest setting, to its end."""
    report = simulate(load_config(PRESET, SCALE))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        report.as_text(), f"peak memory {peak_bytes / 2**30:.2f} GiB, {time.process_time():.0f} s of processor", sep=""
    )


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
