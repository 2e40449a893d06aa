"""A learner of several ranks as real processes; the test plays the engine."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import psutil

from engine.transport.base import PeerGone, PeerJoined, Received
from engine.transport.zmq import ZmqHub
from engine.wire import Credit, Heartbeat, Message, StepDone, WeightsPublished, WeightsReady
from tests.support.learner_inputs import random_group
from tests.support.learner_process import save_model_with_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0
GROUPS = 4


class LearnerRun:
    """A hub and one learner; `launcher` is what stands before the module."""

    def __init__(self, folder: Path, launcher: list[str], settings: dict[str, str]) -> None:
        self.folder, self.launcher = folder, launcher
        self.options: list[str] = []
        self.says_where = True
        """The command line names the engine's address and the run's folder; otherwise the configuration does."""
        self.log_path = folder / "learner.log"
        model = folder / "model"
        save_model_with_tokenizer(model)
        learner = {"backend": '"deepspeed"', "threads": "1", "groups_per_step": str(GROUPS)} | settings
        lines = "".join(f"{key} = {value}\n" for key, value in learner.items())
        (folder / "config.toml").write_text(
            f'[run]\nmax_steps = 9\n[model]\npath = "{model}"\nmax_context_tokens = 16\n'
            f"[sampling]\nmax_tokens = 8\n[optimizer]\nlr = 1e-2\n[learner]\n{lines}"
            "micro_batch_tokens = 40\nmax_first_mismatch_nats = 100.0\n"
        )

    async def __aenter__(self) -> "LearnerRun":
        self.hub = await ZmqHub.bind("127.0.0.1", 0)
        config, where = self.folder / "config.toml", []
        if self.says_where:
            where = ["--connect", self.hub.address, "--run-folder", str(self.folder / "run")]
        else:
            with config.open("a") as file:
                file.write(f"[server]\nwire_port = {self.hub.address.rpartition(':')[2]}\n")
        with self.log_path.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.launcher, "--config", str(config), *where, *self.options,
                cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "DS_ACCELERATOR": "cpu"},
            )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.ranks():
            process.kill()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.hub.close()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def ranks(self) -> list[psutil.Process]:
        """Processes of the learner's ranks, rank 0 first."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        found = {}
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "RANK" in (environment := child.environ()):
                    found[int(environment["RANK"])] = child
        return [found[rank] for rank in sorted(found)]

    async def next(self, kind: type[Message]) -> Message:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                match await self.hub.receive():
                    case Received(message=message) if isinstance(message, kind):
                        return message
                    case PeerJoined() | Received(message=Heartbeat()):
                        continue
                    case PeerGone() | Received() as event:
                        raise AssertionError(f"{event}\n{self.log[-5000:]}")

    async def step(self, rng, version: int) -> tuple[StepDone, WeightsReady]:
        """Publish `version` and let the learner take the next step."""
        await self.hub.send("learner", WeightsPublished(policy_version=version))
        assert (await self.next(Credit)).groups == GROUPS
        for number in range(GROUPS):
            await self.hub.send("learner", random_group(rng, version * GROUPS + number, version=version))
        return await self.next(StepDone), await self.next(WeightsReady)

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, *f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()]
