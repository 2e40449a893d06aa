"""The engine's part towards one real worker process: start it, talk to it, end it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from engine.transport.base import PeerGone, PeerJoined, Received
from engine.transport.zmq import ZmqHub
from engine.wire import Heartbeat, Message

M = TypeVar("M", bound=Message)
BOOT_DEADLINE_S = 180.0
ANSWER_DEADLINE_S = 60.0


@dataclass
class WorkerProcess:
    """A worker that said hello."""

    hub: ZmqHub
    process: asyncio.subprocess.Process
    log_path: Path
    joined: PeerJoined
    waiting: list[Message] = field(default_factory=list)

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            await self.hub.send(self.joined.peer, message)

    async def hear(self, kind: type[M], deadline_s: float = ANSWER_DEADLINE_S) -> M:
        """The next message of that kind; others wait for their own `hear`."""
        for message in self.waiting:
            if isinstance(message, kind):
                self.waiting.remove(message)
                return message
        async with asyncio.timeout(deadline_s):
            while True:
                event = await self.hub.receive()
                assert not isinstance(event, PeerGone), f"{event.reason}\n{_tail(self.log_path)}"
                if isinstance(event, Received):
                    if isinstance(event.message, kind):
                        return event.message
                    if not isinstance(event.message, Heartbeat):
                        self.waiting.append(event.message)

    def family(self) -> list[psutil.Process]:
        """The worker's process and everything it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@asynccontextmanager
async def running_worker(module: str, config: Path, log_path: Path, *arguments: str) -> AsyncIterator[WorkerProcess]:
    """Start `python -m module` as the engine would; nothing of it is left afterwards."""
    hub = await ZmqHub.bind("127.0.0.1", 0)
    with log_path.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "--connect", hub.address, "--config", str(config), *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(BOOT_DEADLINE_S):
            joined = await _first(hub, process, log_path)
        yield WorkerProcess(hub, process, log_path, joined)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await hub.close()


async def _first(hub: ZmqHub, process: asyncio.subprocess.Process, log_path: Path) -> PeerJoined:
    ended = asyncio.ensure_future(process.wait())
    event = asyncio.ensure_future(hub.receive())
    try:
        await asyncio.wait([ended, event], return_when=asyncio.FIRST_COMPLETED)
        assert event.done(), f"the worker ended with {ended.result()}\n{_tail(log_path)}"
        joined = event.result()
        assert isinstance(joined, PeerJoined)
        return joined
    finally:
        for task in (ended, event):
            task.cancel()
        await asyncio.wait([ended, event])


def _tail(log_path: Path) -> str:
    return log_path.read_text()[-4000:]
