"""The run as people see it in a terminal: a table that redraws itself, or one line a step.

Invariants: a view decides nothing and never ends a run (a closed terminal or pipe only silences it); it draws when it
is told to and starts no thread; plain lines are `key=value`, ASCII, one a step, so they can be searched and plotted.
"""

import logging
import os
from typing import Literal, TextIO, TypeAlias

from rich.console import Console
from rich.live import Live

from metrics.frame import History, draw
from metrics.progress import Progress

__all__ = ["LiveView", "Mode", "Progress", "plain_line"]

Mode: TypeAlias = Literal["auto", "rich", "plain", "none"]


class LiveView:
    """Draws `Progress` on a stream.

    Args:
        mode: `rich` = a table that redraws itself, `plain` = a line a step, `none` = nothing,
            `auto` = rich on a terminal that can draw it, plain elsewhere.
        stream: where to draw, e.g. `sys.stdout`.
    """

    def __init__(self, mode: Mode, stream: TextIO) -> None:
        self.mode: Mode = _resolve(mode, stream)
        self._stream = stream
        self._history = History()
        self._last_line = ("", -1)
        self._console: Console | None = None
        self._live: Live | None = None
        if self.mode == "rich":
            self._console = _Console(file=stream, force_terminal=True, highlight=False)

    def update(self, progress: Progress) -> None:
        """Draw this moment: rich redraws each time (the caller limits the rate), plain only on a new step or stage."""
        self._history.add(progress.step, progress.first_sample_reward)
        try:
            if self._console is not None:
                self._redraw(self._console, progress)
            elif self.mode == "plain" and self._last_line != (progress.stage, progress.step):
                self._last_line = (progress.stage, progress.step)
                self._write_line(plain_line(progress))
        except OSError:
            self._silence()

    def message(self, text: str) -> None:
        """A line for the reader, above the table."""
        try:
            if self._console is not None:
                self._console.print(text, markup=False, soft_wrap=True)
            elif self.mode == "plain":
                self._write_line(text)
        except OSError:
            self._silence()

    def handler(self) -> logging.Handler:
        """A log handler that writes through `message`, so that log lines do not tear the table."""
        return _ViewHandler(self)

    def close(self) -> None:
        """Leave the last table on the screen and give the terminal back; more calls do nothing."""
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except OSError:
                self._silence()

    def _redraw(self, console: Console, progress: Progress) -> None:
        if self._live is None:
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(draw(progress, self._history, console.width), refresh=True)

    def _write_line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _silence(self) -> None:
        self.mode = "none"
        self._console = None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process here; the view only falls silent.
        raise BrokenPipeError("the terminal is gone")


class _ViewHandler(logging.Handler):
    def __init__(self, view: LiveView) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.message(self.format(record))


def plain_line(progress: Progress) -> str:
    """One `key=value` line, ASCII, keys in a fixed order; a reward or accuracy that is not known is `-`."""
    total = f"/{progress.steps_total}" if progress.steps_total else ""
    fields = {
        "step": f"{progress.step}{total}",
        "stage": progress.stage.replace(" ", "_"),
        "elapsed_s": f"{progress.elapsed_s:.0f}",
        "first_sample_reward": _or_dash(progress.first_sample_reward),
        "useful_groups_per_min": f"{progress.useful_groups_per_min:.1f}",
        "arms": _counts(progress.arms),
        "samples_launched": f"{progress.budget_spent}",
        "samples_counted": f"{progress.samples_counted}",
        "tokens": _counts(progress.tokens),
        "staleness_mean": f"{progress.staleness_mean:.2f}",
        "staleness_max": f"{progress.staleness_max}",
        "generation_tokens_per_s": f"{progress.generation_tokens_per_s:.0f}",
        "learner_tokens_per_s": f"{progress.learner_tokens_per_s:.0f}",
        "weight_updates": f"{progress.weight_updates}",
        "accuracy_before": _or_dash(progress.accuracy_before),
    }
    return " ".join(f"{key}={value}" for key, value in fields.items())


def _counts(counts: dict[str, int]) -> str:
    return ",".join(f"{key}:{value}" for key, value in counts.items()) or "-"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _resolve(mode: Mode, stream: TextIO) -> Mode:
    if mode != "auto":
        return mode
    can_draw = (stream.encoding or "").lower().replace("-", "") == "utf8" and os.environ.get("TERM") != "dumb"
    return "rich" if stream.isatty() and can_draw else "plain"
