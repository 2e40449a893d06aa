"""Verifier pool: verdicts from killable child processes, one request in flight each.

Invariants: every `grade` gets a verdict or raises; the deadline counts from the moment the request is handed to an
idle, ready child, never the time in the queue; a child over it is killed with its process group and replaced; a
time-out, crash or death is tried again, up to `max_attempts`, before it is reported, and is never a wrong answer.
The queue is first in, first out, and bounded: a full one makes the caller wait. No child outlives the pool.

The rest of the engine sees `Grader`; simulations use `InlineGrader`.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self, cast

from configs.inputs import Verifier
from engine.core.errors import DeadlineError, PeerLost, RunError
from engine.verifier_child import VerifierChild, start_child
from engine.wire import GradeReply, GradeRequest, Verdict

log = logging.getLogger(__name__)

QUEUE_PER_PROCESS: Final = 256
"""Requests that wait for one process: about the slots of a few workers finishing at once, at most 2 MB of text."""
RECYCLE_AFTER: Final = 50_000
"""Verdicts of one child before it is replaced: symbolic caches and fragmented memory never grow without end."""
START_ATTEMPTS: Final = 3
"""Starts of one replacement before the run ends: a machine short of memory may refuse one fork."""
ALARM_SHARE: Final = 0.7
"""The child's own alarm as a share of the deadline, so that most slow verdicts need no kill."""


class Grader(Protocol):
    """What judges responses."""

    async def grade(self, text: str, answer: str) -> Verdict:
        """Verdict on response `text` given the reference `answer`."""
        ...


class InlineGrader:
    """A pure function as a grader, judged at once on the loop: for simulations, never for text of a real model."""

    def __init__(self, function: Callable[[str, str], Verdict]) -> None:
        self._function = function

    async def grade(self, text: str, answer: str) -> Verdict:
        """Verdict of the function."""
        return self._function(text, answer)


@dataclass(frozen=True, slots=True)
class VerifierStatistics:
    """Counts since the pool began."""

    verdicts: dict[Verdict, int]
    """Reported verdicts."""
    work_s: float
    """Time in which children worked, failed attempts included."""
    retries: int
    """Attempts after the first of a request."""
    kills: int
    """Children killed because they passed the deadline."""
    deaths: int
    """Children that died by themselves."""
    queue_length: int
    """Requests that wait now."""
    busy: int
    """Children that work now."""


@dataclass(slots=True)
class _Job:
    request: GradeRequest
    verdict: asyncio.Future[Verdict]


@dataclass(slots=True)
class _Slot:
    """Place of one child; None = it has to be replaced."""

    child: VerifierChild | None = None


@dataclass(slots=True)
class _Counts:
    verdicts: Counter[Verdict] = field(default_factory=Counter[Verdict])
    work_s: float = 0.0
    retries: int = 0
    kills: int = 0
    deaths: int = 0
    busy: int = 0


class VerifierPool:
    """`config.processes` verifier children behind one queue.

    Use it as an async context manager; a failure that cannot be repaired (no child can be started) ends the block
    with a `RunError`.
    """

    def __init__(
        self,
        config: Verifier,
        python: str = sys.executable,
        recycle_after: int = RECYCLE_AFTER,
        observe: Callable[[Verdict, float], None] | None = None,
    ) -> None:
        """Nothing starts before the context is entered.

        Args:
            config: Grader, number of processes, deadline and attempts.
            python: Interpreter of the children.
            recycle_after: Verdicts of one child before it is replaced.
            observe: Called with every reported verdict and the work it took, all attempts, seconds.
        """
        alarm_s = ALARM_SHARE * config.deadline_s
        self._command = (python, "-m", "workers.verifier", "--grader", config.name, "--alarm-s", f"{alarm_s:.6g}")
        self._config = config
        self._recycle_after = recycle_after
        self._observe = observe
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(QUEUE_PER_PROCESS * config.processes)
        self._counts = _Counts()
        self._tasks = asyncio.TaskGroup()
        self._slots: list[_Slot] = []
        self._serving: list[asyncio.Task[None]] = []
        self._is_closed = False

    async def __aenter__(self) -> Self:
        """Start the children and wait until each has passed its self-test.

        Raises:
            RunError: one did not start.
        """
        await self._start_all()
        await self._tasks.__aenter__()
        self._serving = [self._tasks.create_task(self._serve(slot)) for slot in self._slots]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the children. Raises RunError when a child could not be replaced."""
        self._is_closed = True
        for task in self._serving:
            task.cancel()
        if not isinstance(error, asyncio.CancelledError):
            kind = error = trace = None  # the block's own error goes its way; a group would wrap it
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            failure, rest = group.split(RunError)
            if failure is None or rest is not None:
                raise
            raise _first(failure) from None
        finally:
            while not self._queue.empty():
                _fail(self._queue.get_nowait())
            await asyncio.shield(self._end_all())

    async def grade(self, text: str, answer: str) -> Verdict:
        """Verdict on response `text` given the reference `answer`; waits while the queue is full.

        Raises:
            RunError: the pool was closed before the verdict.
        """
        # A lone surrogate is no UTF-8; it must not cost the sample its verdict.
        sendable = text.encode(errors="replace").decode()
        job = _Job(GradeRequest(sendable, answer), asyncio.get_running_loop().create_future())
        await self._queue.put(job)
        if self._is_closed:  # nobody serves the queue any more
            _fail(job)
        return await job.verdict

    def statistics(self) -> VerifierStatistics:
        """Counts until now."""
        counts = self._counts
        return VerifierStatistics(
            verdicts=dict(counts.verdicts),
            work_s=counts.work_s,
            retries=counts.retries,
            kills=counts.kills,
            deaths=counts.deaths,
            queue_length=self._queue.qsize(),
            busy=counts.busy,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the living children."""
        return tuple(slot.child.pid for slot in self._slots if slot.child is not None)

    async def _end_all(self) -> None:
        # Here and not in the slots' tasks: a task that is cancelled before its first step runs no line of its own.
        for slot in self._slots:
            await _end(slot)

    async def _start_all(self) -> None:
        self._slots = [_Slot() for _ in range(self._config.processes)]

        async def start(slot: _Slot) -> None:
            slot.child = await start_child(self._command)

        try:
            async with asyncio.TaskGroup() as starting:
                for slot in self._slots:
                    starting.create_task(start(slot))
        except BaseExceptionGroup as group:
            await asyncio.shield(self._end_all())
            raise RunError(f"verifier {self._config.name!r} did not start: {_first(group)}") from group
        except asyncio.CancelledError:
            await asyncio.shield(self._end_all())
            raise

    async def _serve(self, slot: _Slot) -> None:
        """Consumes jobs, waits for its child, is unblocked by reply, death or deadline; ends when cancelled."""
        job: _Job | None = None
        try:
            while True:
                if slot.child is None:
                    slot.child = await self._replace()
                job = await self._queue.get()
                if job.verdict.done():  # its caller went away
                    continue
                self._counts.busy += 1
                verdict = await self._judge(slot, job.request)
                self._counts.busy -= 1
                if not job.verdict.done():
                    job.verdict.set_result(verdict)
                await self._recycle(slot)
        finally:
            if job is not None:
                _fail(job)

    async def _judge(self, slot: _Slot, request: GradeRequest) -> Verdict:
        """Verdict after at most `max_attempts`."""
        verdict: Verdict = "crashed"
        work_s = 0.0
        for attempt in range(1, self._config.max_attempts + 1):
            if slot.child is None or slot.child.is_dead:
                await _end(slot)
                slot.child = await self._replace()
            reply = await self._attempt(slot, slot.child, request)
            work_s += reply.work_s
            self._counts.retries += attempt > 1
            verdict = reply.verdict
            if verdict not in ("timeout", "crashed"):
                break
            log.warning(
                "verifier %s: %s (attempt %d of %d): %s",
                self._config.name, verdict, attempt, self._config.max_attempts, reply.error,
            )  # fmt: skip
        self._counts.work_s += work_s
        self._counts.verdicts[verdict] += 1
        if self._observe is not None:
            self._observe(verdict, work_s)
        return verdict

    async def _recycle(self, slot: _Slot) -> None:
        # Its first reply was the ready one.
        if slot.child is not None and slot.child.num_replies > self._recycle_after:
            await _end(slot)

    async def _attempt(self, slot: _Slot, child: VerifierChild, request: GradeRequest) -> GradeReply:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            return await child.ask(request, self._config.deadline_s)
        except DeadlineError as exc:
            self._counts.kills += 1
            await _end(slot)
            return GradeReply("timeout", loop.time() - began_at, str(exc))
        except PeerLost:
            self._counts.deaths += 1
            await _end(slot)
            return GradeReply("crashed", loop.time() - began_at, child.epitaph())

    async def _replace(self) -> VerifierChild:
        cause = ""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return await start_child(self._command)
            except (PeerLost, DeadlineError) as exc:
                cause = str(exc)
                log.warning("verifier %s: start %d of %d failed: %s", self._config.name, attempt, START_ATTEMPTS, cause)
        raise RunError(f"verifier {self._config.name!r} could not be started again: {cause}")


async def _end(slot: _Slot) -> None:
    """Kill the slot's child, if it has one."""
    if slot.child is not None:
        await slot.child.kill()
        slot.child = None


def _fail(job: _Job) -> None:
    """Tell a caller whose job will not be judged."""
    if not job.verdict.done():
        job.verdict.set_exception(RunError("the verifier pool was closed before the verdict"))


def _first(error: BaseException) -> BaseException:
    """The first cause inside nested groups."""
    if isinstance(error, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return error
