"""A whole run in one loop under virtual time: real coordinator, scheduler, updater, simulated peers, no sockets."""

import asyncio
import random
import secrets
from pathlib import Path

from configs import Config
from engine.coordinator import Coordinator
from engine.core.errors import PeerLost, RunError
from engine.cores import CorePlan
from engine.datasets import load_prompts
from engine.exchange import Exchange, Inputs
from engine.run_folder import RunFolder
from engine.supervisor import Command, OnExit
from engine.transport.memory import MemoryHub, MemoryLink
from engine.verifiers import InlineGrader
from engine.wire import PROTOCOL_VERSION, Hello, Message, StepDone, TrainGroup
from learner.resume import CheckpointFolder
from learner.simulated import new_stream
from metrics.recorder import Recorder
from tests.support import virtual_loop
from workers.generation import Session, new_hello
from workers.simulated import SimulatedWorker

RESTART_S = 0.5


class RecordingHub(MemoryHub):
    """Remembers the groups that were shipped."""

    shipped: dict[int, TrainGroup]

    async def send(self, peer: str, message: Message, deadline_s: float = 30.0) -> None:
        if isinstance(message, TrainGroup):
            self.shipped[message.group_id] = message
        await super().send(peer, message, deadline_s)


class RecordingLink(MemoryLink):
    """Remembers the steps that the learner took, also those of which a killed engine never heard."""

    steps: list[StepDone]

    async def send(self, message: Message, deadline_s: float = 30.0) -> None:
        if isinstance(message, StepDone):
            self.steps.append(message)
        await super().send(message, deadline_s)


class InLoopChildren:
    """Children as tasks; `crash` takes one down like a kill -9 would."""

    def __init__(self, config: Config, folder: Path, hub: MemoryHub, tasks: asyncio.TaskGroup, on_exit: OnExit) -> None:
        self.config, self.folder = config, folder
        self.hub, self.tasks, self.on_exit = hub, tasks, on_exit
        self.links: dict[str, MemoryLink] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.stopping: set[str] = set()
        self.alive: set[str] = set()
        self.steps: list[StepDone] = []
        self.crashed: set[str] = set()
        self.num_restarts = 0

    async def start(self, command: Command) -> None:
        self.running[command.name] = self.tasks.create_task(self._life(command.name))

    def kill(self, name: str) -> None:
        if name not in self.stopping:
            self.crash(name)

    def crash(self, name: str) -> None:
        if name not in self.alive:
            return
        self.alive.discard(name)
        self.crashed.add(name)
        self.links[name].vanish()
        self.running[name].cancel()
        self.tasks.create_task(self._restart(name))

    def expect_exit(self, name: str, *, only_clean: bool = False) -> None:
        self.stopping.add(name)

    async def finish(self, name: str, deadline_s: float) -> None:
        await asyncio.wait([self.running[name]], timeout=deadline_s)

    async def stop(self, deadline_s: float) -> None:
        self.stopping.update(self.running)
        for task in self.running.values():
            task.cancel()

    async def _restart(self, name: str) -> None:
        if name == "learner":
            raise RunError("learner was killed")
        self.num_restarts += 1
        await self.on_exit(name, "was killed")
        await asyncio.sleep(RESTART_S)
        if name not in self.stopping:
            self.running[name] = self.tasks.create_task(self._life(name))

    async def _life(self, name: str) -> None:
        config = self.config
        if name == "learner":
            hello = Hello(protocol=PROTOCOL_VERSION, role="learner", name=name, life=secrets.token_hex(4), pid=0)
        else:
            hello = new_hello(name, config.worker.slots, config.model.max_context_tokens)
        link = self.links[name] = await RecordingLink.connect(self.hub, hello)
        link.steps = self.steps
        self.alive.add(name)
        try:
            if name == "learner":
                await new_stream(link, config, CheckpointFolder(self.folder)).run()
            else:
                await Session(link, SimulatedWorker(config.simulated, config.run.seed)).run()
        except PeerLost:
            assert name in self.crashed, "only a crashed peer may lose its engine"
            return
        await link.close()


class WholeRun:
    """Runs a config to its end, or until all of it is killed; `crashes` = worker kills spread over the run."""

    def __init__(
        self, config: Config, folder: Path, crashes: int = 0, seed: int = 0, killed_after_s: float | None = None
    ) -> None:
        self.config, self.folder, self.killed_after_s = config, folder, killed_after_s
        self.crashes, self.rng = crashes, random.Random(seed)
        self.shipped: dict[int, TrainGroup] = {}
        self.children: InLoopChildren | None = None
        self.coordinator: Coordinator | None = None

    @property
    def steps(self) -> list[StepDone]:
        """Those that the learner took."""
        return self.children.steps

    def run(self) -> dict:
        """The summary, empty if the run was killed."""
        summary = {}
        try:
            summary = virtual_loop.run(self._run())
        except* TimeoutError:
            assert self.killed_after_s is not None
        return summary

    async def _run(self) -> dict:
        config = self.config
        asyncio.get_running_loop().pause(10.0)  # no real clock reads 0 at the start
        hub = await RecordingHub.bind(verify=False)
        hub.shipped = self.shipped

        def children(tasks: asyncio.TaskGroup, on_exit: OnExit) -> InLoopChildren:
            self.children = InLoopChildren(config, self.folder, hub, tasks, on_exit)
            return self.children

        train = load_prompts(config.data.train, config.data, config.data.levels)
        test = load_prompts(config.data.test, config.data) if config.data.test else []
        grader = InlineGrader(lambda text, answer: "correct" if text == answer else "wrong")
        with RunFolder(self.folder) as folder:
            inputs = Inputs(
                config,
                folder,
                hub,
                grader,
                Recorder(),
                train,
                test,
                CorePlan(((),) * config.worker.count, ()),
                children,
            )
            async with asyncio.timeout(self.killed_after_s or 1_000_000), asyncio.TaskGroup() as tasks:
                self.coordinator = Coordinator(Exchange(inputs, tasks))
                chaos = tasks.create_task(self._chaos())
                summary = await self.coordinator.run()
                chaos.cancel()
                await self.children.stop(1.0)
        await hub.close()
        return summary

    async def _chaos(self) -> None:
        for _ in range(self.crashes):
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            if self.coordinator.exchange.stage == "training":
                live = [worker.name for worker in self.coordinator.exchange.fleet.workers.values()]
                if live:
                    self.children.crash(self.rng.choice(live))
