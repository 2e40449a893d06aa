"""`python -m engine.plan --generation-tokens-per-s G --learner-tokens-per-s L [...] [--json]`: sizes for a run.

Proposes K, N_max, width, workers and η for a law of pass rates and some GPUs, says what they and their alternatives
cost (exactly, and in short simulated runs), and prints the overrides for `engine.serve`.
Exit codes: 0 done, 1 a simulated run failed, 2 an input cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from configs.load import ConfigError
from engine.core.errors import AdastreamError, DataError
from engine.planning import Question, propose
from engine.planning.page import as_json, as_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, plan, print; returns the exit code."""
    options = _parser().parse_args(arguments)
    question = Question(
        generation_tokens_per_s=options.generation_tokens_per_s,
        learner_tokens_per_s=options.learner_tokens_per_s,
        pass_rate=options.pass_rate,
        params=options.params,
        gpus=options.gpus,
        response_tokens=options.response_tokens,
        prompt_tokens=options.prompt_tokens,
        groups_per_step=options.groups_per_step,
        slots=options.slots,
        kv_bytes_per_token=options.kv_bytes_per_token,
        samples=options.samples,
        seed=options.seed,
    )
    try:
        plan = propose(question)
    except (ConfigError, DataError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except AdastreamError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    sys.stdout.write(json.dumps(as_json(plan), indent=2) + "\n" if options.json else as_text(plan))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.plan", description="Propose sizes for a run and say why.")
    add = parser.add_argument
    add("--generation-tokens-per-s", type=float, required=True, help="of one GPU, all slots together, as measured")
    add("--learner-tokens-per-s", type=float, required=True, help="of one GPU, forward and backward, as measured")
    add("--pass-rate", default="tiers", help="tiers, a number, a list such as 0.1,0.4, or a .jsonl or .csv profile")
    add("--params", type=float, default=1.5e9, help="parameters of the model (memory estimate)")
    add("--gpus", type=int, default=8, help="GPUs, each large enough for one worker")
    add("--response-tokens", type=float, default=512.0, help="mean length of a response")
    add("--prompt-tokens", type=float, default=128.0, help="mean length of a prompt")
    add("--groups-per-step", type=int, default=128, help="B, groups of an optimizer step")
    add("--slots", type=int, default=64, help="requests that one generating GPU runs at once")
    add("--kv-bytes-per-token", type=float, default=0.0, help="KV cache of a token; 0 = estimated from --params")
    add("--samples", type=int, default=12_000, help="samples of one simulated run, about")
    add("--seed", type=int, default=0, help="of the simulated runs")
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
