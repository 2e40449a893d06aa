"""Rank 0 and the ranks that follow it: commands out, replies back, and one end for all.

Each follower holds one TCP connection to rank 0. Commands do not travel as collectives of torch.distributed: a follower
may wait for the next one as long as the engine likes, so a collective would need a deadline that is always too short or
too long, and neither gloo nor NCCL says which rank broke. A connection that closes names its rank at once.

Invariants:
- Every command goes to every rank, in one order, and each rank replies once; rank 0 takes part in its own commands.
- The first failure ends all ranks and its text names the rank that failed: by an exception there, by a death (the
  connection closes), or by silence past the deadline.
- A process whose work is stuck in a collective that nobody will finish ends by itself GRACE_S after the failure.

Pickles travel only over connections that have shown the key of the run. No torch here. Used by `learner.ranked`.
"""

import hmac
import logging
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, Protocol, TypeVar

from engine.core.errors import AdastreamError, DeadlineError

logger = logging.getLogger(__name__)

EXIT_RANK = 5
"""Exit code of a process that ended because another rank did."""
GRACE_S = 5.0
"""How long a process may take to end by itself after a failure."""
BLAME_S = 2.0
"""How long an error waits for the word of the rank that caused it: the death of a rank breaks collectives of others."""
_KEY_BYTES = 32
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A machine that is gone closes its connections within 25 s."""

Target = TypeVar("Target", contravariant=True)
Reply = TypeVar("Reply", covariant=True)
Answer = TypeVar("Answer")


class RankLost(AdastreamError):
    """Another rank failed or died; the text names it."""


class Command(Protocol[Target, Reply]):
    """Something that all ranks do at the same time; pickled, so a dataclass of plain values."""

    def run(self, target: Target) -> Reply:
        """Do it here; what comes back is pickled too."""
        ...


@dataclass(frozen=True, slots=True)
class _Failed:
    """Sent by a follower: what failed there. Sent by rank 0: which rank failed and how."""

    text: str


@dataclass(frozen=True, slots=True)
class _Done(Generic[Answer]):
    value: Answer


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where followers find rank 0."""

    host: str
    port: int
    key: bytes


class Line:
    """A connection between rank 0 and a follower; any thread may send, one receives."""

    def __init__(self, peer: socket.socket) -> None:
        """Take over a connected socket."""
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if peer.family != socket.AF_UNIX:
            for option, value in _KEEPALIVE:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connection = Connection(peer.detach())
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Raises OSError when the other side is gone."""
        with self._lock:
            self.connection.send(message)

    def try_to_send(self, message: object) -> None:
        """Send unless the other side is gone; its end was or will be seen by the reader."""
        try:
            self.send(message)
        except OSError as exc:
            logger.debug("not sent: %s", exc)

    def shut_down(self) -> None:
        """End the connection under its readers, which then see its end."""
        try:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as peer:
                peer.shutdown(socket.SHUT_RDWR)
        except OSError as exc:
            logger.debug("was closed: %s", exc)


class _Fate:
    """The first failure that this process heard of, and its end."""

    def __init__(self, on_failure: Callable[[], None], end_process: Callable[[int], None]) -> None:
        self.text = ""
        self.happened = threading.Event()
        self._on_failure, self._end_process = on_failure, end_process
        self._lock = threading.Lock()

    def fail(self, text: str) -> bool:
        """Note it; False if there was one before."""
        with self._lock:
            if self.text:
                return False
            self.text = text
        logger.error("%s", text)
        self.set_deadline()
        self.happened.set()
        self._on_failure()
        return True

    def set_deadline(self) -> None:
        """End the process after GRACE_S if nothing else does."""
        timer = threading.Timer(GRACE_S, self._end_process, [EXIT_RANK])
        timer.daemon = True
        timer.start()


class Leader:
    """Rank 0's side. Commands are given by one thread at a time."""

    def __init__(
        self,
        followers: Mapping[int, Line],
        deadline_s: float,
        on_failure: Callable[[], None] = lambda: None,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Take over the lines to all other ranks.

        Args:
            followers: Rank to line.
            deadline_s: Longest wait for a rank's reply after rank 0 has finished its own part.
            on_failure: Called once, from another thread, when a rank fails.
            end_process: Called with an exit code when the process did not end by itself.
        """
        self._followers = dict(followers)
        self._deadline_s = deadline_s
        self._fate = _Fate(on_failure, end_process)
        self._replies: dict[int, queue.Queue[_Done[object] | None]] = {rank: queue.Queue() for rank in followers}
        self._is_closing = False
        self._reader = threading.Thread(target=self._read, name="followers", daemon=True)
        self._reader.start()

    @property
    def failure(self) -> str:
        """Which rank failed and how; empty while all is well."""
        return self._fate.text

    def everywhere(self, commands: Sequence[Command[Target, Answer]], target: Target) -> list[Answer]:
        """Let every rank run its command; `commands[0]` runs here, on `target`.

        Returns:
            One reply a rank.

        Raises:
            RankLost: another rank failed; the text names it.
            DeadlineError: a rank did not reply in time.
        """
        for rank, line in self._followers.items():
            try:
                line.send(commands[rank])
            except OSError as exc:
                raise self.blame(exc) from exc
        try:
            own = commands[0].run(target)
        except Exception as exc:  # whatever it is, the other ranks must hear of it
            raise self.blame(exc) from exc
        return [own, *(self._await(rank, commands[rank]) for rank in self._followers)]

    def close(self, commands: Sequence[Command[Target, Answer]], target: Target) -> None:
        """Run the followers' last command everywhere, and let them go."""
        self._is_closing = True
        self.everywhere(commands, target)
        self._hang_up()

    def abandon(self, text: str) -> None:
        """End the followers, because rank 0 ends with `text`."""
        self._is_closing = True
        self._tell(f"rank 0 failed: {text}")
        if self._followers:
            # A collective of this process may wait for them for ever.
            self._fate.set_deadline()
        self._hang_up()

    def _await(self, rank: int, command: object) -> Answer:  # type: ignore[type-var]  (the reply to this command)
        try:
            done = self._replies[rank].get(timeout=self._deadline_s)
        except queue.Empty:
            name = type(command).__name__
            text = f"rank {rank} did not finish {name} within {self._deadline_s:g} s of rank 0"
            self._fate.fail(text)
            self._tell(text)
            raise DeadlineError(text) from None
        if done is None:
            raise RankLost(self._fate.text or f"rank {rank} died at the end of the run")
        return done.value  # type: ignore[return-value]

    def blame(self, error: Exception) -> Exception:
        """What to raise for `error`: the failure of the rank that caused it, or itself, of which all then hear."""
        if self._fate.happened.wait(BLAME_S):
            return RankLost(self._fate.text)
        self._tell(f"rank 0 failed: {_said(error)}")
        return error

    def _read(self) -> None:
        ranks = {line.connection: rank for rank, line in self._followers.items()}
        while ranks:
            for connection in wait(list(ranks)):
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    del ranks[connection]
                    self._replies[rank].put(None)
                    self._fail(f"rank {rank} died: its connection closed")
                    continue
                match message:
                    case _Failed(text):
                        self._fail(f"rank {rank} failed: {text}")
                    case _:
                        self._replies[rank].put(message)

    def _fail(self, text: str) -> None:
        if self._is_closing or not self._fate.fail(text):
            return
        self._tell(text)
        for replies in self._replies.values():
            replies.put(None)

    def _tell(self, text: str) -> None:
        for line in self._followers.values():
            line.try_to_send(_Failed(text))

    def _hang_up(self) -> None:
        for line in self._followers.values():
            line.shut_down()
        self._reader.join(GRACE_S)


class Follower:
    """The side of every other rank."""

    def __init__(self, leader: Line, last: type, end_process: Callable[[int], None] = os._exit) -> None:
        """Take over the line to rank 0.

        Args:
            leader: The line.
            last: After a command of this type rank 0 may end.
            end_process: Called with an exit code when the process did not end by itself after a failure.
        """
        self._leader = leader
        self._last = last
        self._fate = _Fate(lambda: None, end_process)
        self._commands: queue.Queue[object] = queue.Queue(1)
        """Rank 0 waits for the reply to a command before it gives the next one, so one waits at most."""
        threading.Thread(target=self._read, name="rank-0", daemon=True).start()

    def follow(self, target: object) -> None:
        """Run what rank 0 says, up to and with the last command.

        Raises:
            RankLost: another rank failed, or rank 0 is gone.
        """
        while True:
            command = self._commands.get()
            if command is None:
                raise RankLost(self._fate.text)
            try:
                value = command.run(target)  # type: ignore[attr-defined]  (the queue holds commands)
            except Exception as exc:  # whatever it is, the other ranks must hear of it
                raise self.blame(exc) from exc
            self._leader.try_to_send(_Done(value))
            if isinstance(command, self._last):
                return

    def blame(self, error: Exception) -> Exception:
        """What to raise for `error`: the failure of the rank that caused it, or itself, of which rank 0 then hears."""
        if self._fate.happened.wait(BLAME_S):
            return RankLost(self._fate.text)
        self._leader.try_to_send(_Failed(_said(error)))
        return error

    def _read(self) -> None:
        while True:
            try:
                message = self._leader.connection.recv()
            except (EOFError, OSError):
                message = _Failed("rank 0 died: its connection closed")
            if isinstance(message, _Failed):
                self._fate.fail(message.text)
                self._commands.put(None)
                return
            self._commands.put(message)
            if isinstance(message, self._last):
                return


def open_meeting(host: str) -> tuple[socket.socket, Meeting]:
    """Listen on a free port of `host`; rank 0, first."""
    listener = socket.create_server((host, 0))
    return listener, Meeting(host, listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES))


def gather_followers(
    listener: socket.socket, meeting: Meeting, num_followers: int, deadline_s: float
) -> dict[int, Line]:
    """Accept all followers and stop listening; rank to line.

    Raises:
        DeadlineError: not all came in time.
    """
    found: dict[int, Line] = {}
    with listener:
        while len(found) < num_followers:
            listener.settimeout(deadline_s)
            try:
                peer, _ = listener.accept()
                peer.settimeout(deadline_s)
                greeting = _receive(peer, _KEY_BYTES + 4)
            except TimeoutError as exc:
                missing = [rank for rank in range(1, num_followers + 1) if rank not in found]
                raise DeadlineError(f"ranks {missing} did not come to rank 0 within {deadline_s:g} s") from exc
            if not hmac.compare_digest(greeting[:_KEY_BYTES], meeting.key):
                peer.close()
                continue
            found[struct.unpack("!I", greeting[_KEY_BYTES:])[0]] = Line(peer)
    return dict(sorted(found.items()))


def find_leader(rank: int, meeting: Meeting, deadline_s: float) -> Line:
    """Connect to rank 0.

    Raises:
        DeadlineError: it does not answer.
    """
    try:
        peer = socket.create_connection((meeting.host, meeting.port), timeout=deadline_s)
        peer.sendall(meeting.key + struct.pack("!I", rank))
    except OSError as exc:
        raise DeadlineError(f"rank {rank} cannot reach rank 0 at {meeting.host}:{meeting.port}: {exc}") from exc
    return Line(peer)


def _receive(peer: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size and (part := peer.recv(size - len(parts))):
        parts += part
    return parts


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
