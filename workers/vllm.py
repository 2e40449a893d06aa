"""The generation worker: `python -m workers.vllm --connect ADDR --name N --config PATH [--set section.key=value ...]`.

Invariants: cores and vLLM's environment are set before vLLM is imported; none of vLLM's processes outlives this one,
however it ends; it ends when the engine says stop (0), cannot be used as configured (2), or on any other cause (1).

Cores come from `--cores 0,1` or the environment variable ADASTREAM_CORES; none = any core.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING

from configs import Config, load_config
from configs.load import ConfigError
from configs.model_folder import ModelError, check_model
from engine.core.errors import AdastreamError, PeerLost, first_cause
from engine.transport.zmq import ZmqLink
from workers.generation import Session, new_hello

if TYPE_CHECKING:
    from workers.vllm_backend import VllmBackend

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""Linux prctl(2): the kernel signals this process when its parent dies."""


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even by SIGKILL."""
    parent = parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:  # it died before the kernel was asked
        os._exit(1)


if __name__ == "__mp_main__":  # vLLM's processes are spawned, so they import this file first
    _die_with_parent()


def set_environment(config: Config, cores: Sequence[int]) -> None:
    """Pin this process, and through it all of vLLM's, to `cores`, and set what vLLM reads at import."""
    if cores:
        os.sched_setaffinity(0, cores)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    fixed = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if Path(config.model.path).is_dir():
        fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    os.environ.update(fixed)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


async def run(address: str, name: str, config: Config) -> str:
    """Start vLLM, say hello, serve until stopped; returns why it ended.

    Raises:
        RunError: the model cannot be used, or vLLM died.
        PeerLost: the engine is gone.
    """
    from workers.vllm_backend import VllmBackend  # imports vLLM, which reads the environment

    began_at = time.monotonic()
    backend = await VllmBackend.start(config)
    try:
        log.info("vLLM took %.1f s to start", time.monotonic() - began_at)
        return await _serve(address, name, config, backend)
    finally:
        backend.close()


async def _serve(address: str, name: str, config: Config, backend: "VllmBackend") -> str:
    link = await ZmqLink.connect(address, new_hello(name, config.worker.slots, config.model.max_context_tokens))
    try:
        session = Session(link, backend)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, session.request_stop, "SIGTERM")
        return await _until_stopped(session, backend)
    finally:
        await link.close()


async def _until_stopped(session: Session, backend: "VllmBackend") -> str:
    """The conversation beside a watch on vLLM's processes. SIGTERM to the whole group may end those first."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(backend.until_dead())
            await session.run()
            watch.cancel()
    except* Exception as group:
        cause = first_cause(group)
        if not session.stop_reason:
            raise cause from group
        log.warning("while stopping: %s", cause)
    return session.stop_reason


def _cores(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as exc:
        raise ConfigError(f"cores must look like 0,1, got {text!r}") from exc


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers.vllm", description="A generation worker on vLLM.")
    parser.add_argument("--connect", required=True, metavar="ADDR", help="the engine, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--name", default="worker-0", help="unique among the engine's workers")
    parser.add_argument("--config", type=Path, required=True, metavar="PATH")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cores", default=os.environ.get("ADASTREAM_CORES", ""), metavar="0,1")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = load_config(options.config, options.overrides)
        cores = _cores(options.cores)
        check_model(config.model.path)
    except (ConfigError, ModelError, OSError) as exc:
        log.error("worker %s cannot start: %s", options.name, exc)  # noqa: TRY400  (the text says it)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the engine says stop
    try:
        set_environment(config, cores)
        reason = asyncio.run(run(options.connect, options.name, config))
    except PeerLost as exc:
        log.error("worker %s: the engine is gone: %s", options.name, exc)  # noqa: TRY400
        return 1
    except (AdastreamError, OSError) as exc:
        log.error("worker %s failed: %s: %s", options.name, type(exc).__name__, exc)  # noqa: TRY400
        return 1
    log.info("worker %s ends: %s", options.name, reason)
    return 0


if __name__ == "__main__":
    sys.exit(main())
