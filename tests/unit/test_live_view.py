"""What the terminal shows: frames, plain lines, and that a broken terminal never ends a run."""

import dataclasses
import io
import logging

import pytest
from rich.console import Console

from metrics.frame import History, draw, sparkline
from metrics.live import LiveView, Progress, plain_line

PROGRESS = Progress(
    elapsed_s=3671.4,
    stage="train",
    step=12,
    steps_total=30,
    first_sample_reward=0.2134,
    useful_groups_per_min=36.15,
    arms={"sampling": 23, "waiting": 4, "training": 16},
    samples_counted=12120,
    budget_spent=12900,
    tokens={"trained": 51000, "counted": 112000, "aborted": 9000, "failed": 100, "evaluated": 12000},
    staleness_mean=0.81,
    staleness_max=2,
    generation_tokens_per_s=464.2,
    learner_tokens_per_s=327.0,
    weight_updates=12,
    accuracy_before=0.103,
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Pipe(io.StringIO):
    encoding = "utf-8"


class BrokenPipe(Pipe):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class BrokenTerminal(BrokenPipe):
    def isatty(self) -> bool:
        return True


def frame(columns: int, progress: Progress = PROGRESS, rewards: tuple[float, ...] = (0.1, 0.2)) -> str:
    history = History()
    for step, reward in enumerate(rewards, 1):
        history.add(step, reward)
    console = Console(file=io.StringIO(), width=columns, force_terminal=False)
    console.print(draw(progress, history, columns))
    return console.file.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_frame_shows_every_figure_and_fits_the_terminal(columns):
    text = frame(columns)
    assert max(len(line) for line in text.splitlines()) <= columns
    for figure in (
        "train",
        "step 12/30",
        "1:01:11",
        "0.213",
        "36.1 groups a minute",
        "23 sampling · 4 waiting · 16 training",
        "12,900 samples launched · 12,120 counted",
        "464 generated · 327 learned",
        "mean 0.81 · max 2 versions",
        "0.103 right before training",
        "184,100 tokens",
        "■ counted 61%",
        "■ failed <1%",
    ):
        assert figure in text
    assert "…" not in text


def test_a_wide_terminal_gets_two_columns():
    assert len(frame(120).splitlines()) < len(frame(80).splitlines())


def test_a_run_without_steps_tokens_or_reward_has_a_frame():
    start = dataclasses.replace(
        PROGRESS, step=0, steps_total=0, first_sample_reward=None, tokens={}, arms={}, accuracy_before=None
    )
    text = frame(80, start, rewards=())
    assert "waiting for the first step" in text
    assert "none yet" in text
    assert "not measured" in text


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([0.5], 0, ""),
        ([0.0, 0.0], 10, "▁▁"),
        ([0.0, 1.0], 10, "▁█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([-1.0, 1.0], 2, "▁█"),
    ],
)
def test_a_sparkline_is_the_whole_series_in_the_width(values, width, expected):
    assert sparkline(values, width) == expected


def test_history_takes_one_reward_a_step_and_stays_bounded():
    history = History()
    history.add(1, None)
    for step in range(1, 20_001):
        history.add(step, step / 20_000)
        history.add(step, 9.0)
    assert max(history.values) == 1.0
    assert len(history.values) <= 4096


def test_plain_writes_one_ascii_line_a_step():
    stream = Pipe()
    view = LiveView("plain", stream)
    for step in (1, 1, 1, 2):
        view.update(dataclasses.replace(PROGRESS, step=step))
    view.message("worker w0 restarted")
    view.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["step=1/30", "step=2/30", "worker"]
    assert lines[0].isascii()


def test_a_plain_line_is_key_value_pairs():
    pairs = dict(pair.split("=", 1) for pair in plain_line(PROGRESS).split())
    assert pairs["first_sample_reward"] == "0.213"
    assert pairs["arms"] == "sampling:23,waiting:4,training:16"
    assert pairs["samples_launched"] == "12900"
    assert pairs["elapsed_s"] == "3671"
    unknown = plain_line(dataclasses.replace(PROGRESS, first_sample_reward=None, steps_total=0, stage="warm up"))
    assert unknown.startswith("step=12 stage=warm_up")
    assert "first_sample_reward=- " in unknown


def test_auto_is_rich_on_a_terminal_and_plain_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert LiveView("auto", Terminal()).mode == "rich"
    assert LiveView("auto", Pipe()).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert LiveView("auto", Terminal()).mode == "plain"


def test_none_writes_nothing():
    stream = Terminal()
    view = LiveView("none", stream)
    view.update(PROGRESS)
    view.message("text")
    view.close()
    assert stream.getvalue() == ""


def test_rich_redraws_writes_messages_and_gives_the_cursor_back():
    stream = Terminal()
    view = LiveView("rich", stream)
    view.update(PROGRESS)
    view.message("[worker] w0 restarted")
    view.update(dataclasses.replace(PROGRESS, step=13))
    view.close()
    view.close()
    text = stream.getvalue()
    assert "step 13/30" in text
    assert "[worker] w0 restarted" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize(("mode", "stream"), [("plain", BrokenPipe()), ("rich", BrokenTerminal())])
def test_a_closed_stream_silences_the_view_and_nothing_else(mode, stream):
    view = LiveView(mode, stream)
    view.update(PROGRESS)
    assert view.mode == "none"
    view.update(dataclasses.replace(PROGRESS, step=13))
    view.message("text")
    view.close()


def test_log_records_go_through_the_view():
    stream = Pipe()
    handler = LiveView("plain", stream).handler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.handle(logging.LogRecord("engine", logging.WARNING, __file__, 1, "worker %s lost", ("w0",), None))
    assert stream.getvalue() == "WARNING worker w0 lost\n"
