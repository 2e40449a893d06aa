"""An asyncio loop whose clock jumps to the next timer instead of waiting: hours of simulated time in milliseconds.

Invariants: time moves only when nothing is ready; with nothing ready and no timer pending the run is a deadlock and
says which tasks wait. No threads, no sockets: whatever they would deliver never arrives here.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task is blocked and no timer is pending."""


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: it moves the clock of its loop by what it was asked to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                waiting = sorted(task.get_name() + ": " + _where(task) for task in asyncio.all_tasks(self.loop))
                raise Deadlock("every task is blocked and no timer is pending; " + "; ".join(waiting))
            self.now += max(0.0, timeout)
        return events

    loop: asyncio.AbstractEventLoop


def _where(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "done"


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that starts at time 0 and jumps."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._jumping.loop = self
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._jumping.now

    def pause(self, seconds: float) -> None:
        """Let time pass while nothing runs, as when the machine or the process was stopped."""
        self._jumping.now += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end under virtual time.

    Raises:
        Deadlock: nothing can move any more.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
