"""Resident memory of the learner over many updates: `python -m benchmarks.learner_memory [--steps 1000]`.

The real trainer on a two-layer model: every update takes groups of random lengths in two mini-batches, with a reference
policy, and lays the weights out. Resident memory is read after the first tenth of the updates (by then every buffer
exists) and from then on; exit code 1 if it moves by more than 2 %.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from configs import Config
from engine.wire import TrainGroup
from learner.trainer import TorchTrainer
from tests.support.learner_inputs import random_group
from tests.support.tiny_model import save_tiny_model

ALLOWED = 0.02
GROUPS = 8


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def groups_of(rng: np.random.Generator, version: int) -> list[TrainGroup]:
    """One update's groups: 4 responses of 1 to 60 tokens each."""
    return [
        random_group(rng, version * GROUPS + number, lengths=tuple(rng.integers(1, 61, 4)), version=version)
        for number in range(GROUPS)
    ]


async def measure(config: Config, folder: Path, steps: int) -> list[tuple[int, int]]:
    """(updates taken, resident bytes), 40 times over the run."""
    rng = np.random.default_rng(0)
    seen: list[tuple[int, int]] = []
    with TorchTrainer(config, folder) as trainer:
        await trainer.open()
        for version in range(steps):
            await trainer.lay_out(version)
            await trainer.accumulate(groups_of(rng, version))
            await trainer.step()
            if (version + 1) % max(1, steps // 40) == 0:
                seen.append((version + 1, resident_bytes()))
    return seen


def main() -> int:
    """Run it and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_tiny_model(model, is_tied=True, dtype=torch.bfloat16)
        config = Config.model_validate(
            {
                "model": {"path": str(model), "max_context_tokens": 128},
                "sampling": {"max_tokens": 64},
                "learner": {
                    "device": "cpu",
                    "groups_per_step": GROUPS,
                    "mini_batches": 2,
                    "micro_batch_tokens": 256,
                    "max_first_mismatch_nats": 100.0,
                },
                "loss": {"kl": {"weight": 0.01}},
            }
        )
        seen = asyncio.run(measure(config, Path(folder) / "run", steps))
    settled = [size for step, size in seen if step >= steps // 10]
    spread = (max(settled) - min(settled)) / settled[0]
    report = {
        "steps": steps,
        "resident_bytes_first": settled[0],
        "resident_bytes_last": settled[-1],
        "spread": round(spread, 4),
        "allowed": ALLOWED,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return int(spread > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
