"""The command lines of the processes that the engine starts: the same ones a cluster scheduler would place."""

from collections.abc import Sequence
from pathlib import Path

from configs.root import Config
from engine.cores import CorePlan
from engine.run_folder import RunFolder
from engine.supervisor import Command

WORKER_MODULES = {"vllm": "workers.vllm", "simulated": "workers.simulated"}
LEARNER_MODULES = {"torch": "learner.train", "simulated": "learner.simulated"}
LEARNER = "learner"
BORROWER_NICENESS = 10
"""The learner gets nine tenths of a core that both want: it is the scarcer side then, and the worker still moves."""


def worker_commands(config: Config, folder: RunFolder, address: str, plan: CorePlan) -> list[Command]:
    """One command a worker of this machine."""
    return [
        Command(
            name=f"worker-{index}",
            arguments=[
                *_module(WORKER_MODULES[config.worker.kind], address, folder),
                "--name",
                f"worker-{index}",
            ],
            log_path=folder.log_path(f"worker-{index}"),
            cores=plan.generation[index],
            niceness=BORROWER_NICENESS if index == plan.borrower else 0,
            max_restarts=config.worker.max_restarts,
        )
        for index in range(config.worker.count)
    ]


def learner_command(config: Config, folder: RunFolder, address: str, plan: CorePlan) -> Command:
    """The learner's command."""
    # Where ranks leave the cause of their end; without it every start would leave a folder in /tmp.
    causes = folder.log_path(LEARNER).with_suffix("")
    arguments: Sequence[str] = [
        *_launcher(config.learner.ranks, causes),
        *_module(LEARNER_MODULES[config.learner.kind], address, folder),
        "--run-folder",
        str(folder.path),
    ]
    return Command(
        name=LEARNER,
        arguments=arguments,
        log_path=folder.log_path(LEARNER),
        cores=plan.learning,
        pin=True,
        causes=causes,
    )


def _launcher(ranks: int, causes: Path) -> list[str]:
    """What starts `ranks` processes of a module, gives each its place, and ends all when one ends."""
    if ranks == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--log-dir", str(causes)]


def _module(module: str, address: str, folder: RunFolder) -> list[str]:
    config_path: Path = folder.path / "config.toml"
    return ["-m", module, "--connect", address, "--config", str(config_path)]
