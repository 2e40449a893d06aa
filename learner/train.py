"""The learner process: `python -m learner.train --connect ADDR --config PATH --run-folder DIR [--set KEY=VALUE ...]`.

Exit codes: 0 stopped by the engine; 2 model, configuration or checkpoint cannot be used; 3 the engine is gone; 4 a wait
passed its deadline; 1 anything else; 143 after SIGTERM. The first SIGINT is left to the engine (a terminal sends it to
both, and the engine then says stop); a second one ends the learner.

Invariant: torch is imported only after the thread count is set.
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

from configs import Config, load_config
from configs.load import ConfigError
from configs.model_folder import ModelError, check_model
from engine.core.errors import AdastreamError, DataError, DeadlineError, PeerLost
from engine.transport.zmq import ZmqLink
from engine.wire import PROTOCOL_VERSION, Hello
from learner.stream import LearnerStream, StreamSettings

logger = logging.getLogger(__name__)

EXIT_USAGE, EXIT_ENGINE_GONE, EXIT_DEADLINE, EXIT_TERMINATED = 2, 3, 4, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the learner; its exit code."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        config = load_config(options.config, options.set)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_USAGE
    _limit_threads(config)
    try:
        check_model(config.model.path)
        asyncio.run(_train(config, options))
    except (ConfigError, DataError, ModelError) as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_USAGE
    except PeerLost as exc:
        logger.error("%s", exc)  # noqa: TRY400  (one line says it; a trace would hide it)
        return EXIT_ENGINE_GONE
    except DeadlineError as exc:
        logger.error("%s", exc)  # noqa: TRY400
        return EXIT_DEADLINE
    except AdastreamError as exc:
        logger.error("%s", exc)  # noqa: TRY400
        return 1
    except asyncio.CancelledError:
        return EXIT_TERMINATED
    except Exception:
        logger.exception("the learner failed")
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="learner.train", description="Train on the groups of a running engine.")
    parser.add_argument("--connect", required=True, metavar="ADDR", help="the engine's address, e.g. tcp://host:5555")
    parser.add_argument("--config", required=True, type=Path, metavar="PATH", help="the run's configuration")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value")
    parser.add_argument("--run-folder", required=True, type=Path, metavar="DIR", help="for DIR/checkpoints")
    parser.add_argument("--name", default="learner", help="name under which the engine knows this learner")
    return parser.parse_args(arguments)


def _limit_threads(config: Config) -> None:
    """One thread a core we were given: more would spin against each other."""
    threads = str(config.learner.threads or len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = threads
    os.environ["MKL_NUM_THREADS"] = threads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


async def _train(config: Config, options: argparse.Namespace) -> None:
    from learner.trainer import TorchTrainer  # imports torch

    settings = StreamSettings(
        groups_per_step=config.learner.groups_per_step,
        idle_deadline_s=config.learner.idle_deadline_s,
        save_every_steps=config.checkpoint.every_steps,
        overlaps_updates=config.learner.overlap_updates,
    )
    hello = Hello(
        protocol=PROTOCOL_VERSION, role="learner", name=options.name, life=secrets.token_hex(8), pid=os.getpid()
    )
    _heed_signals()
    with TorchTrainer(config, options.run_folder) as trainer:
        link = await ZmqLink.connect(options.connect, hello)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(link.close)
            await LearnerStream(link, trainer, settings).run()


def _heed_signals() -> None:
    """SIGTERM cancels this task, so that segments are removed; the first SIGINT is the engine's."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_interrupt() -> None:
        logger.info("interrupted: waiting for the engine to say stop; once more ends the learner")
        loop.add_signal_handler(signal.SIGINT, task.cancel)

    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)


if __name__ == "__main__":
    sys.exit(main())
