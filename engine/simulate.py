"""`python -m engine.simulate --config X [section.key=value ...] [--json] [--sweep --out DIR]`: what a strategy costs.

Exit codes: 0 done, 1 the run failed (the cause is the last line), 2 the configuration or a profile cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import ConfigError, load_config
from engine.core.errors import AdastreamError, DataError
from engine.simulation.run import simulate
from engine.simulation.sweep import sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, play, report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.simulate", description="Play a run under a virtual clock and report what it costs."
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML file, e.g. configs/sim.toml")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--sweep", action="store_true", help="a table over the pass rate, as CSV and plots")
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="folder of the sweep's files")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. sim.pass_rate=0.2")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        if options.sweep:
            for path in sweep(config, options.out):
                sys.stdout.write(f"{path}\n")
            return 0
        report = simulate(config)
    except (ConfigError, DataError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except (AdastreamError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n" if options.json else report.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
