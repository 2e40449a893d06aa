"""`python -m engine.serve --config X [section.key=value ...] [--dry-run]`: the engine's process.

Exit codes: 0 the run is over, 1 it failed (the cause is the last line), 2 the configuration or data cannot be used,
130 interrupted.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from configs.load import ConfigError, dump_config, load_config
from configs.preflight import check_learner
from configs.root import Config
from engine.coordinator import Coordinator
from engine.core.errors import AdastreamError, DataError, Interrupted, first_cause
from engine.cores import CorePlan, plan_cores
from engine.datasets import PromptRow, load_prompts
from engine.dry_run import describe_plan
from engine.exchange import Exchange, Inputs
from engine.launch import LEARNER
from engine.policy import make_policy
from engine.run_folder import RunFolder, run_path
from engine.shutdown import stop_signals
from engine.status import StatusReporter
from engine.summary import SummaryValue
from engine.transport.zmq import ZmqHub
from engine.verifiers import VerifierPool
from metrics.live import LiveView
from metrics.recorder import Recorder
from metrics.report import format_summary
from metrics.server import MetricsServer

log = logging.getLogger(__name__)

VERSION = "0.1.0"
INTERRUPTED = 130
FINISH_DEADLINE_S = 10.0
"""A learner whose last checkpoint is written has this long to end by itself."""
KILL_DEADLINE_S = 10.0
"""Children that got a signal to end have this long before they are killed."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run, loaded and checked."""

    config: Config
    train: Sequence[PromptRow]
    test: Sequence[PromptRow]
    cores: CorePlan
    path: Path
    """Of the run folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.serve", description="Run training from a TOML preset.")
    parser.add_argument("--config", type=Path, required=True, help="TOML file, e.g. configs/quickstart.toml")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and exit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. sampling.max_tokens=32")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        cores = plan_cores(config.cores, config.worker.count)
        check_learner(config)
        if options.dry_run:
            sys.stdout.write(describe_plan(config, cores))
            return 0
        job = _load(config, cores)
    except (ConfigError, DataError, ValueError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    return uvloop.run(serve(job))


def _load(config: Config, cores: CorePlan) -> Job:
    path = run_path(config)
    make_policy(config)  # what cannot be built is said here, before anything starts
    train = load_prompts(config.data.train, config.data, config.data.levels)
    test = load_prompts(config.data.test, config.data) if config.data.test else []
    return Job(config, train, test, cores, path)


async def serve(job: Job) -> int:
    """Run a job with its live view; returns the exit code."""
    view = LiveView(job.config.server.live, sys.stdout)
    handler = view.handler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    path = job.path
    try:
        with RunFolder(path) as folder:
            return await _run(job, folder, view)
    except BaseExceptionGroup as group:
        cause: BaseException = first_cause(group)
    except (AdastreamError, OSError) as exc:
        cause = exc
    finally:
        view.close()
    if isinstance(cause, Interrupted):
        sys.stderr.write(f"interrupted by {cause}; nothing was left running; logs: {path / 'logs'}\n")
        return INTERRUPTED
    if not isinstance(cause, (AdastreamError, OSError)):
        raise cause
    sys.stderr.write(f"error: {cause}\nlogs: {path / 'logs'}\n")
    return 1


async def _run(job: Job, folder: RunFolder, view: LiveView) -> int:
    config = job.config
    folder.write_whole("config.toml", dump_config(config))
    recorder = Recorder()
    recorder.info(VERSION, config.strategy.name, config.model.path)
    async with AsyncExitStack() as stack:
        hub = await ZmqHub.bind(
            config.server.host, config.server.wire_port, silence_deadline_s=config.worker.heartbeat_deadline_s
        )
        stack.push_async_callback(hub.close)
        grader = await stack.enter_async_context(VerifierPool(config.verifier, observe=recorder.verdict))
        inputs = Inputs(config, folder, hub, grader, recorder, job.train, job.test, job.cores)
        async with asyncio.TaskGroup() as tasks:
            coordinator = Coordinator(Exchange(inputs, tasks))
            reporter = StatusReporter(coordinator, grader, view)
            server = MetricsServer(recorder.render, reporter.health, config.server.host, config.server.http_port)
            await stack.enter_async_context(server)
            log.info("run folder %s; metrics http://%s:%d/metrics", folder.path, config.server.host, server.port)
            status = tasks.create_task(reporter.run())
            summary = await _supervised(coordinator)
            status.cancel()
    folder.write_whole("summary.json", json.dumps(summary, indent=2) + "\n")
    view.close()
    sys.stdout.write(format_summary(summary, folder.path))
    return INTERRUPTED if coordinator.interrupted else 0


async def _supervised(coordinator: Coordinator) -> dict[str, SummaryValue]:
    """Run with signal handlers; whatever happens, no child is left."""
    task = asyncio.current_task()
    if task is None:
        raise AssertionError("must run inside a task")

    def on_first(name: str) -> None:
        if not coordinator.interrupt(name):
            task.cancel()

    def on_second() -> None:
        task.cancel()

    with stop_signals(on_first, on_second):
        try:
            summary = await coordinator.run()
            # A signal would end the ranks of a learner while they leave each other.
            await coordinator.exchange.supervisor.finish(LEARNER, FINISH_DEADLINE_S)
        except asyncio.CancelledError:
            if coordinator.interrupted:
                raise Interrupted(coordinator.interrupted) from None
            raise
        finally:
            await coordinator.exchange.supervisor.stop(KILL_DEADLINE_S)
    return summary


if __name__ == "__main__":
    sys.exit(main())
