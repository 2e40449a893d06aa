"""The simulated learner: the real stream with a wait in place of the gradient. Needs no torch.

Invariants: what the engine sees (credits, the bound at the gradient, steps, publications) is the real learner's own
code; one step lasts `simulated.step_s` of the loop's clock, so it runs under a virtual one too; no tensors move. Its
checkpoints hold a record and no weights, so a simulated run resumes as a real one does.

Run as `python -m learner.simulated --connect ADDR --config PATH --run-folder DIR [--set section.key=value ...]`.
Ends when: `Stop` (exit 0), the engine is gone, or nothing came for `learner.idle_deadline_s` (exit 1), or a checkpoint
cannot be used (exit 2).
"""

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from configs import Config, load_config
from configs.load import ConfigError
from engine.core.errors import AdastreamError, DataError
from engine.transport.base import Link
from engine.transport.zmq import ZmqLink
from engine.wire import PROTOCOL_VERSION, Fingerprint, Hello, Manifest, Milestone, TrainGroup
from learner.checkpoint import save_checkpoint
from learner.group_check import check_spans
from learner.milestone import Loaded
from learner.resume import CheckpointFolder, check_fits
from learner.stream import LearnerStream, StreamSettings

log = logging.getLogger(__name__)

_UNKNOWN = ("loss", "entropy", "kl_behaviour", "clip_share", "grad_norm", "lr")
"""What only a real gradient knows: reported as 0."""
_FINGERPRINT = Fingerprint("simulated", "none", "none", 1, {})
EXIT_UNUSABLE = 2


class SimulatedTrainer:
    """A `Trainer` that takes `simulated.step_s` for a step and counts its tokens."""

    def __init__(self, config: Config, checkpoints: CheckpointFolder) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._tokens_trained = 0
        self._tokens_packed = 0

    async def open(self) -> Loaded | None:
        """There is no model, only a milestone."""
        found = self._checkpoints.find(self._config)
        if found is None:
            return None if self._config.run.resume == "no" else Loaded()
        path, record = found
        check_fits(path, record.fingerprint, _FINGERPRINT)
        return Loaded(str(path), record.milestone)

    async def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Count response tokens, and those of prompt and response.

        Raises:
            RunError: a token's version is unknown, or later than the one that trains it.
        """
        for group in groups:
            check_spans(group)
            tokens = sum(len(sample.token_ids) for sample in group.samples)
            self._tokens_trained += tokens
            self._tokens_packed += tokens + len(group.prompt_token_ids) * len(group.samples)

    async def step(self) -> dict[str, float]:
        """Wait as long as an optimizer step takes."""
        await asyncio.sleep(self._config.simulated.step_s)
        metrics = dict.fromkeys(_UNKNOWN, 0.0) | {
            "ratio_max": 1.0,
            "tokens_trained": float(self._tokens_trained),
            "tokens_packed": float(self._tokens_packed),
        }
        self._tokens_trained = self._tokens_packed = 0
        return metrics

    async def lay_out(self, policy_version: int) -> Manifest:
        """A version without tensors."""
        return Manifest(policy_version=policy_version, mover="none", location="", num_bytes=0, tensors=[], canaries=[])

    async def save(self, milestone: Milestone) -> str:
        """A record without files: a kilobyte, written without leaving the loop."""
        folder, keep = self._checkpoints.path, self._config.checkpoint
        return str(save_checkpoint(folder, milestone, _FINGERPRINT, keep, lambda _folder: None))


def new_stream(link: Link, config: Config, checkpoints: CheckpointFolder) -> LearnerStream:
    """The simulated learner on `link`."""
    settings = StreamSettings(
        config.learner.groups_per_step,
        config.learner.idle_deadline_s,
        config.checkpoint.every_steps,
        overlaps_updates=config.learner.overlap_updates,
    )
    return LearnerStream(link, SimulatedTrainer(config, checkpoints), settings)


async def run(address: str, config: Config, run_folder: Path) -> None:
    """Join the engine at `address` and train until it says stop. Raises as `LearnerStream.run` does."""
    hello = Hello(protocol=PROTOCOL_VERSION, role="learner", name="learner", life=secrets.token_hex(8), pid=os.getpid())
    with contextlib.closing(CheckpointFolder(run_folder)) as checkpoints:
        await checkpoints.open(config.learner.idle_deadline_s)
        link = await ZmqLink.connect(address, hello)
        try:
            await new_stream(link, config, checkpoints).run()
        finally:
            await link.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m learner.simulated", description="A learner without a model.")
    parser.add_argument("--connect", required=True, metavar="ADDR", help="the engine, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--config", type=Path, required=True, metavar="PATH")
    parser.add_argument("--run-folder", type=Path, required=True, metavar="DIR", help="for DIR/checkpoints")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the engine says stop
    try:
        uvloop.run(run(options.connect, load_config(options.config, options.overrides), options.run_folder))
    except DataError as exc:
        log.error("learner cannot start: %s", exc)  # noqa: TRY400  (the text says it)
        return EXIT_UNUSABLE
    except (AdastreamError, ConfigError) as exc:
        log.error("learner failed: %s: %s", type(exc).__name__, exc)  # noqa: TRY400  (the text says it)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
