"""Draw the implied prompt weight w(p) of some strategies: lines exact (engine/core/law.py), points simulated.

Run: `python -m benchmarks.strategy_plots --out docs/plots` (needs matplotlib: the extra `plots`). The cost figures
beside it are those of `python -m engine.simulate --sweep`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from configs.load import load_config
from configs.root import Config
from engine.core.law import exact_law, implied_weight
from engine.core.past import EMPTY
from engine.core.policy import Policy
from engine.policy import make_policy
from engine.simulation import simulate

PRESET = Path("configs/sim.toml")
RATES = (0.03, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.97)
LINE = tuple(i / 200 for i in range(4, 197))
FIXED_8 = "strategy.name=fixed strategy.n_max=8 strategy.group_size=8"
OPTIONS = {
    "fixed, n = 8, grpo": f"{FIXED_8} advantage.name=grpo",
    "fixed, n = 8, rloo": f"{FIXED_8} advantage.name=rloo",
    "fixed, n = 8, maxrl": f"{FIXED_8} advantage.name=maxrl",
    "balance 2/2, N_max 32": "",
    "the same, giving up (optimal, tiers)": "strategy.futility=optimal",
    "rounds positives 1, 8 x 4": "strategy.name=rounds strategy.exit=positives strategy.k_pos=1",
}
VISITS = 1500
"""Of each pass rate."""


def weights(policy: Policy) -> Iterator[float]:
    """Exact w at the rates of the line, no sample expired."""
    futility = policy.futility
    for rate in LINE:
        law = (
            exact_law(policy.strategy, rate, policy.strategy.n_max, lambda counts: futility.stops(counts, EMPTY))
            if futility
            else exact_law(policy.strategy, rate, policy.strategy.n_max)
        )
        yield implied_weight(law, policy.rule)


def simulated(config: Config) -> dict[float, float]:
    """Measured w by pass rate."""
    return {float(rate): weight for rate, weight in simulate(config, step_s=0.0).implied_weight.items()}


def draw(folder: Path) -> Path:
    """Write implied_weight.png."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = ",".join(str(rate) for rate in RATES)
    common = [f"sim.pass_rate=[{rates}]", f"sim.prompts={VISITS * len(RATES)}", "staleness.max=1000000"]
    for colour, (name, overrides) in enumerate(OPTIONS.items()):
        config = load_config(PRESET, [*common, *overrides.split()])
        axes.plot(LINE, list(weights(make_policy(config))), color=f"C{colour}", label=name)
        found = simulated(config)
        axes.plot(list(found), list(found.values()), ".", color=f"C{colour}")
    axes.plot(LINE, [1.0 / rate for rate in LINE], ":", color="grey", label="1/p (gradient of log p)")
    axes.set(xlabel="pass rate p", ylabel="implied weight w of a visit", yscale="log", ylim=(0.2, 30.0))
    axes.set_title(f"E[gradient of a visit] = w(p)·∇p; points: {VISITS} simulated visits each")
    axes.legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "implied_weight.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> int:
    """Parse and draw."""
    parser = argparse.ArgumentParser(description="Plot implied weights.")
    parser.add_argument("--out", type=Path, default=Path("docs/plots"))
    print(draw(parser.parse_args().out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
