"""One verifier child process seen from the engine: start, ask, kill.

Invariants: at most one request in flight; a reply that has arrived beats a deadline that has passed; the child leads
its own process group, which `kill` ends as a whole; nothing is read from a child after its stdout ended.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Final, cast

from engine.core.errors import DeadlineError, PeerLost, WireError
from engine.wire import GRADE_LENGTH_BYTES, GradeReply, GradeRequest, decode_grade, encode_grade, grade_length

START_DEADLINE_S: Final = 60.0
"""Longest start of a child: half a second on an idle machine, much longer on one that is loading models."""
_EXIT_DEADLINE_S: Final = 1.0
_KILL_DEADLINE_S: Final = 10.0
_STALL_S: Final = 0.05
"""A timer later than this says that our own loop stood still; then the pipe is read once more before judging."""
_ROOT: Final = Path(__file__).resolve().parent.parent
_STDOUT: Final = 1


class VerifierChild(asyncio.SubprocessProtocol):
    """A running child. Made by `start_child`; `ask` it, and `kill` it in the end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.num_replies = 0
        self._loop = loop
        self._received = bytearray()
        self._reply: asyncio.Future[GradeReply] = loop.create_future()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._is_dead = False
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None

    @property
    def is_dead(self) -> bool:
        """Its stdout ended: no reply will come any more."""
        return self._is_dead

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        assert self._transport is not None
        return self._transport.get_pid()

    async def ask(self, request: GradeRequest, deadline_s: float) -> GradeReply:
        """Hand over `request` and wait for its reply.

        Raises:
            DeadlineError: no reply in time; the child is still busy and must be killed.
            PeerLost: the child died or sent no frame of ours.
        """
        assert self._stdin is not None
        if self._is_dead:
            raise PeerLost(self.epitaph())
        self._reply = self._loop.create_future()
        self._stdin.write(encode_grade(request))
        return await self.reply(deadline_s)

    async def reply(self, deadline_s: float) -> GradeReply:
        """The reply in flight. Raises as `ask` does."""
        due_at = self._loop.time() + deadline_s
        timer = self._loop.call_at(due_at, self._on_deadline, self._reply, due_at, deadline_s)
        try:
            return await self._reply
        finally:
            timer.cancel()

    async def kill(self) -> None:
        """SIGKILL the process group and wait until the process is reaped. Raises DeadlineError if it is not."""
        assert self._transport is not None
        if self._is_dead and not self._exited.done():
            await asyncio.wait({self._exited}, timeout=_EXIT_DEADLINE_S)  # its own exit code says why it ended
        if self._transport.get_returncode() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILL_DEADLINE_S):
                # First reaped, then closed: `close` would reap it behind the back of the loop's child watcher.
                await asyncio.shield(self._exited)
                self._transport.close()
                await asyncio.shield(self._closed)
        except TimeoutError as exc:
            raise DeadlineError(f"verifier {self.pid} must be gone {_KILL_DEADLINE_S} s after SIGKILL") from exc

    def epitaph(self) -> str:
        """How it ended, with its exit code once it is reaped (negative: the signal)."""
        code = self._transport.get_returncode() if self._transport is not None else None
        return f"verifier process ended{'' if code is None else f' with exit code {code}'}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process was started."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Bytes of the child's stdout."""
        self._received += data
        try:
            while (body := self._next_body()) is not None:
                self._take(decode_grade(body, GradeReply))
        except WireError as exc:
            self._fail(PeerLost(f"verifier process {self.pid}: {exc}"))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """A pipe ended; without its stdout the child is of no use."""
        if fd == _STDOUT:
            self._is_dead = True
            self._fail(PeerLost(self.epitaph()))

    def process_exited(self) -> None:
        """The process was reaped."""
        if not self._exited.done():
            self._exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Reaped, and every pipe is closed."""
        self._is_dead = True
        self._fail(PeerLost(self.epitaph()))
        if not self._closed.done():
            self._closed.set_result(None)

    def _next_body(self) -> bytes | None:
        if len(self._received) < GRADE_LENGTH_BYTES:
            return None
        end = GRADE_LENGTH_BYTES + grade_length(bytes(self._received[:GRADE_LENGTH_BYTES]))
        if len(self._received) < end:
            return None
        body = bytes(self._received[GRADE_LENGTH_BYTES:end])
        del self._received[:end]
        return body

    def _take(self, reply: GradeReply) -> None:
        if self._reply.done():
            raise WireError("a reply nobody asked for")
        self.num_replies += 1
        self._reply.set_result(reply)

    def _fail(self, error: PeerLost) -> None:
        if not self._reply.done():
            self._reply.set_exception(error)
            self._reply.exception()  # seen: a child that dies while nobody waits is found by `is_dead`

    def _on_deadline(self, reply: asyncio.Future[GradeReply], due_at: float, deadline_s: float) -> None:
        if reply.done():
            return
        if self._loop.time() - due_at > _STALL_S:
            # Once: an infinite due time is never late.
            self._loop.call_later(_STALL_S, self._on_deadline, reply, float("inf"), deadline_s)
            return
        reply.set_exception(DeadlineError(f"no verdict within {deadline_s:.3g} s"))


async def start_child(command: tuple[str, ...]) -> VerifierChild:
    """Start `command` as a verifier and wait until it says that it is ready.

    Raises:
        PeerLost: it could not be started, or ended before it was ready (its own log on stderr says why).
        DeadlineError: it was not ready within START_DEADLINE_S; it is dead now.
    """
    loop = asyncio.get_running_loop()
    path = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH", "")) if part)
    single_threaded = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        _, child = await loop.subprocess_exec(
            VerifierChild,
            *command, "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=None,
            start_new_session=True, env={**os.environ, "PYTHONPATH": path, **single_threaded},
        )  # fmt: skip
    except OSError as exc:
        raise PeerLost(f"{command[0]} could not be started: {exc}") from exc
    is_ready = False
    try:
        await child.reply(START_DEADLINE_S)
        is_ready = True
    except PeerLost as exc:
        await child.kill()
        raise PeerLost(f"{child.epitaph()} before it was ready") from exc
    finally:
        if not is_ready:
            await asyncio.shield(child.kill())
    return child
