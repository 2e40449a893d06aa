"""Rank 0 and the ranks that follow it: commands out, replies back, and one end for all.

Each follower holds one TCP connection to rank 0. Commands do not travel as collectives of torch.distributed: a follower
may wait for the next one as long as the engine likes, so a collective would need a deadline that is always too short or
too long, and neither gloo nor NCCL says which rank broke. A connection that closes names its rank at once.

Invariants:
- Every command goes to every rank, in one order, and each rank replies once; rank 0 takes part in its own commands.
- The first failure ends all ranks and its text names the rank that failed: by an exception there, by a death (the
  connection closes), or by silence past the deadline.
- A rank answers pings from a thread of its own, whatever it computes or waits for. So one that is stopped is told from
  those that wait for it in a collective, and a command may last as long as it needs while all answer.
- A process whose work is stuck in a collective that nobody will finish ends by itself GRACE_S after the failure.

No torch here. Used by `learner.ranked`.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, Protocol, TypeVar

from engine.core.errors import AdastreamError, DeadlineError
from learner.meeting import Line

logger = logging.getLogger(__name__)

EXIT_RANK = 5
"""Exit code of a process that ended because another rank did."""
GRACE_S = 5.0
"""How long a process may take to end by itself after a failure."""
BLAME_S = 2.0
"""How long an error waits for the word of the rank that caused it: the death of a rank breaks collectives of others."""
PING_S = 5.0
"""Between two pings of a follower; shorter where the deadline is short."""
_PINGS_A_DEADLINE = 4
_MISSED_PINGS = 3
"""So many without an answer, and an error that nobody owns up to is blamed on the rank that is silent."""

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
class _Ping:
    """Rank 0 asks whether a follower lives."""


@dataclass(frozen=True, slots=True)
class _Pong:
    """It does."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Sent by a follower: what failed there. Sent by rank 0: which rank failed and how."""

    text: str


@dataclass(frozen=True, slots=True)
class _Done(Generic[Answer]):
    value: Answer


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
            deadline_s: Longest wait for a rank's reply after rank 0 has finished its own part, and longest silence of a
                rank at any time.
            on_failure: Called once, from another thread, when a rank fails.
            end_process: Called with an exit code when the process did not end by itself.
        """
        self._followers = dict(followers)
        self._deadline_s = deadline_s
        self._fate = _Fate(on_failure, end_process)
        self._replies: dict[int, queue.Queue[_Done[object] | None]] = {rank: queue.Queue() for rank in followers}
        self._is_closing = False
        self._ping_s = min(PING_S, deadline_s / _PINGS_A_DEADLINE)
        self._heard_at = dict.fromkeys(followers, time.monotonic())
        self._hung_up = threading.Event()
        self._reader = threading.Thread(target=self._read, name="followers", daemon=True)
        self._reader.start()
        threading.Thread(target=self._ping, name="pings", daemon=True).start()

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
            except BlockingIOError as exc:
                self._fail(f"rank {rank} takes no commands: it is stopped, or its machine is gone")
                raise self.blame(exc) from exc
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
        if self._followers:
            # A collective of this process may wait for them for ever.
            self._fate.set_deadline()
        self._tell(f"rank 0 failed: {text}")
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
        if self._is_one_silent(_MISSED_PINGS * self._ping_s):
            logger.error("rank 0 failed after that: %s", _said(error))  # in case it was by itself
            return RankLost(self._fate.text)
        self._tell(f"rank 0 failed: {_said(error)}")
        return error

    def _ping(self) -> None:
        while not self._hung_up.wait(self._ping_s) and not self._is_one_silent(self._deadline_s):
            for line in self._followers.values():
                line.try_to_send(_Ping())

    def _is_one_silent(self, limit_s: float) -> bool:
        """Whether a rank was not heard for so long; it is then the one that failed."""
        silences = [(time.monotonic() - at, rank) for rank, at in self._heard_at.items()]
        silence_s, rank = max(silences, default=(0.0, 0))
        if silence_s > limit_s:
            self._fail(f"rank {rank} has not answered for {silence_s:.0f} s: it is stopped, or its machine is gone")
        return bool(self._fate.text)

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
                self._heard_at[rank] = time.monotonic()
                match message:
                    case _Failed(text):
                        self._fail(f"rank {rank} failed: {text}")
                    case _Pong():
                        pass
                    case _:
                        self._replies[rank].put(message)

    def _fail(self, text: str) -> None:
        if self._is_closing or not self._fate.fail(text):
            return
        for replies in self._replies.values():
            replies.put(None)
        self._tell(text)

    def _tell(self, text: str) -> None:
        for line in self._followers.values():
            line.try_to_send(_Failed(text))

    def _hang_up(self) -> None:
        self._hung_up.set()
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
            if isinstance(message, _Ping):
                self._leader.try_to_send(_Pong())
                continue
            self._commands.put(message)
            if isinstance(message, self._last):
                return


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
