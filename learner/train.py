"""The learner process: `python -m learner.train --config PATH [--connect ADDR] [--run-folder DIR] [--set KEY=VALUE]`.

Without `--connect` the engine is looked for at `[server]`, which needs a fixed `wire_port`. Without `--run-folder` it
is the folder of a run's own configuration (`runs/NAME/config.toml`), else the last of runs/NAME, runs/NAME-2, ...

With `learner.backend = "deepspeed"` and `learner.ranks = N`, a launcher starts it N times, with the same options:

    torchrun --standalone --nproc-per-node N -m learner.train --config PATH
    deepspeed --num_gpus N --module learner.train --config PATH

Rank 0 holds the link to the engine; the others follow it (learner/ranked.py).

Exit codes: 0 stopped by the engine; 2 model, configuration or checkpoint cannot be used; 3 the engine is gone; 4 a wait
passed its deadline; 5 another rank failed; 1 anything else; 143 after SIGTERM. A launcher makes 1 of all but 0. The
first SIGINT is left to the engine (a terminal sends it to both, and the engine then says stop); a second one ends the
learner. Other ranks end with it.

Invariants: torch is imported only after the thread count is set; what can be seen to be missing (models, packages, a
CUDA device) is said before the engine is asked for.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from configs import Config, load_config
from configs.load import ConfigError
from configs.model_folder import ModelError, check_model
from configs.preflight import check_learner
from configs.training import Run
from engine.core.errors import AdastreamError, DataError, DeadlineError, PeerLost
from engine.transport.zmq import ZmqLink
from engine.wire import PROTOCOL_VERSION, Hello
from learner.placement import Placement, end_with_launcher, rank_threads, read_placement, tell_launcher
from learner.ranks import EXIT_RANK, RankLost
from learner.resume import make_checkpoint_folder
from learner.stream import LearnerStream, StreamSettings

logger = logging.getLogger(__name__)

RUN_CONFIG = "config.toml"
"""The resolved configuration in a run's folder."""
EXIT_USAGE, EXIT_ENGINE_GONE, EXIT_DEADLINE, EXIT_TERMINATED = 2, 3, 4, 143
EXIT_CODES: dict[type[Exception], int] = {
    ModelError: EXIT_USAGE,
    ConfigError: EXIT_USAGE,
    DataError: EXIT_USAGE,
    PeerLost: EXIT_ENGINE_GONE,
    DeadlineError: EXIT_DEADLINE,
    RankLost: EXIT_RANK,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the learner; its exit code."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        config = load_config(options.config, options.set)
        placement = read_placement(os.environ, config.learner)
        _complete(options, config)
        if not placement.rank:
            make_checkpoint_folder(options.run_folder)
    except (ConfigError, DataError) as exc:
        return _fail(EXIT_USAGE, str(exc))
    _limit_threads(config, placement)
    if placement.world_size > 1:
        end_with_launcher(placement)
    try:
        check_model(config.model.path)
        check_learner(config)
        if placement.rank:
            _follow(config, placement)
        else:
            asyncio.run(_train(config, options, placement))
    except asyncio.CancelledError:
        return EXIT_TERMINATED
    except Exception as exc:
        code = next((code for kinds, code in EXIT_CODES.items() if isinstance(exc, kinds)), 1)
        if not isinstance(exc, (AdastreamError, ModelError, ConfigError)):
            logger.exception("the learner failed")
        return _fail(code, str(exc))
    return 0


def _fail(code: int, text: str) -> int:
    """Say why this process ends, here and in the launcher's report."""
    sys.stderr.write(f"{text}\n")
    tell_launcher(text, os.environ)
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="learner.train", description="Train on the groups of a running engine.")
    parser.add_argument("--connect", metavar="ADDR", help="the engine's address, e.g. tcp://host:5555")
    parser.add_argument("--config", required=True, type=Path, metavar="PATH", help="the run's configuration")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value")
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="for DIR/checkpoints")
    # The deepspeed launcher adds it; LOCAL_RANK says the same.
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="learner", help="name under which the engine knows this learner")
    return parser.parse_args(arguments)


def _complete(options: argparse.Namespace, config: Config) -> None:
    """Take from the configuration what the command line leaves out.

    Raises:
        ConfigError: it does not say where the engine listens.
    """
    server = config.server
    if options.connect is None:
        if not server.wire_port:
            raise ConfigError("--connect must say where the engine listens, or server.wire_port its port; got neither")
        options.connect = f"tcp://{server.host}:{server.wire_port}"
    if options.run_folder is None:
        is_of_a_run = options.config.name == RUN_CONFIG
        options.run_folder = options.config.parent if is_of_a_run else _last_run(config.run)


def _last_run(run: Run) -> Path:
    """The folder that the engine made last: runs/NAME, or with its number where there was one already."""
    last = Path(run.folder) / run.name
    if run.resume == "auto":
        return last
    for number in itertools.count(2):
        following = last.with_name(f"{run.name}-{number}")
        if not following.exists():
            break
        last = following
    return last


def _limit_threads(config: Config, placement: Placement) -> None:
    """One thread a core we were given: more would spin against each other."""
    threads = str(rank_threads(config.learner, placement))
    os.environ["OMP_NUM_THREADS"] = threads
    os.environ["MKL_NUM_THREADS"] = threads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _follow(config: Config, placement: Placement) -> None:
    # A terminal's SIGINT is for the engine; this rank ends with rank 0.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from learner.ranked import follow  # imports torch

    follow(config, placement)


async def _train(config: Config, options: argparse.Namespace, placement: Placement) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    terminated = _heed_signals(loop, task)
    from learner.ranked import take_device  # imports torch, for seconds
    from learner.trainer import TorchTrainer

    take_device(config.learner, placement)  # said now, before the wait for an engine
    settings = StreamSettings(
        groups_per_step=config.learner.groups_per_step,
        idle_deadline_s=config.learner.idle_deadline_s,
        save_every_steps=config.checkpoint.every_steps,
        overlaps_updates=config.learner.overlap_updates,
    )
    hello = Hello(
        protocol=PROTOCOL_VERSION, role="learner", name=options.name, life=secrets.token_hex(8), pid=os.getpid()
    )

    def on_failure() -> None:
        loop.call_soon_threadsafe(task.cancel)

    trainer = TorchTrainer(config, options.run_folder, placement, on_failure)
    try:
        with trainer:
            link = await ZmqLink.connect(options.connect, hello)
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(link.close)
                await LearnerStream(link, trainer, settings).run()
    except (asyncio.CancelledError, AdastreamError):
        # A launcher ends all ranks at once: then another one's end is no cause.
        if trainer.failure and not terminated.is_set():
            raise RankLost(trainer.failure) from None
        raise


def _heed_signals(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> asyncio.Event:
    """SIGTERM cancels `task`, so that segments are removed, and sets the event; the first SIGINT is the engine's."""
    terminated, interrupted = asyncio.Event(), asyncio.Event()

    def on_terminate() -> None:
        terminated.set()
        task.cancel()

    def on_interrupt() -> None:
        if interrupted.is_set():
            task.cancel()
            return
        interrupted.set()
        logger.info("interrupted: waiting for the engine to say stop; once more ends the learner")

    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    return terminated


def _leave(code: int) -> NoReturn:
    """End the process with `code`, even where a library's threads would abort it after a failure."""
    if code:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    # The engine's, until this process can heed it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave(main())
