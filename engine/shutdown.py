"""Ctrl-C and SIGTERM: the first asks the run to finish, the second forces it.

Handlers are installed for the length of a context and the old ones restored.
"""

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(on_first: Callable[[str], None], on_second: Callable[[], None]) -> Generator[None]:
    """Call `on_first(name)` at the first signal and `on_second()` at every later one."""
    loop = asyncio.get_running_loop()
    seen: list[signal.Signals] = []

    def handle(number: signal.Signals) -> None:
        seen.append(number)
        if len(seen) == 1:
            on_first(number.name)
        else:
            on_second()

    for number in SIGNALS:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
