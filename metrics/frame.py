"""One frame of the terminal table: `Progress` in, a rich renderable out.

Invariants: pure; fits 80 columns (one column of rows) and uses 110 or more (two columns).
"""

from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from metrics.progress import Progress

_WIDE_COLUMNS = 110
_BLOCKS = "▁▂▃▄▅▆▇█"
_FATE_STYLES = {"trained": "green", "counted": "cyan", "aborted": "yellow", "failed": "red", "evaluated": "magenta"}
_MAX_POINTS = 4096


class History:
    """First-sample reward by step, for the sparkline; bounded."""

    def __init__(self) -> None:
        self._step = 0
        self.values: list[float] = []

    def add(self, step: int, reward: float | None) -> None:
        """Remember the reward of a new step; further calls of the same step are ignored."""
        if reward is None or step <= self._step:
            return
        self._step = step
        self.values.append(reward)
        if len(self.values) > _MAX_POINTS:
            del self.values[: _MAX_POINTS // 2]


def sparkline(values: list[float], width: int) -> str:
    """The whole series in at most `width` block characters: means of equal runs, from 0 to the greatest mean."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(means)
    if top <= 0.0:
        return _BLOCKS[0] * count
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(max(0.0, mean) / top * last)] for mean in means)


def draw(progress: Progress, history: History, columns: int) -> RenderableType:
    """The table for a terminal of `columns` columns."""
    wide = columns >= _WIDE_COLUMNS
    half = (columns - 4) // 2 if wide else columns - 4
    left = [_reward(progress, history, half - 30), _useful(progress), _arms(progress), _budget(progress)]
    right = [_speed(progress), _staleness(progress), _updates(progress), _held_out(progress)]
    if wide:
        body = Table.grid(expand=True, padding=(0, 2, 0, 0))
        body.add_column(ratio=1)
        body.add_column(ratio=1)
        body.add_row(_rows(left), _rows(right))
    else:
        body = _rows(left + right)
    return Panel(
        Group(_steps(progress, columns - 4), body, *_tokens(progress, columns - 4)),
        title=Text.assemble(("adastream", "bold"), "  ", progress.stage),
        title_align="left",
        border_style="dim",
        padding=(0, 1),
    )


def _rows(rows: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, width=14)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _steps(progress: Progress, width: int) -> Text:
    seconds = int(progress.elapsed_s)
    clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if not progress.steps_total:
        return Text.assemble(("step ", "dim"), (f"{progress.step}", "bold"), (f"  after {clock}", "dim"))
    label = f"step {progress.step}/{progress.steps_total}"
    bar = max(0, width - len(label) - len(clock) - 4)
    done = round(bar * min(1.0, progress.step / progress.steps_total))
    return Text.assemble(
        (label, "bold"), "  ", ("━" * done, "green"), ("─" * (bar - done), "dim"), "  ", (clock, "dim")
    )


def _reward(progress: Progress, history: History, width: int) -> tuple[str, Text]:
    reward = progress.first_sample_reward
    text = Text("waiting for the first step", style="dim") if reward is None else Text(f"{reward:.3f} ", style="bold")
    text.append(sparkline(history.values, min(40, width)), style="green")
    return "first reward", text


def _useful(progress: Progress) -> tuple[str, Text]:
    return "useful", Text.assemble((f"{progress.useful_groups_per_min:.1f}", "bold"), " groups a minute")


def _arms(progress: Progress) -> tuple[str, Text]:
    return "arms", Text(" · ".join(f"{count:,} {state}" for state, count in progress.arms.items()) or "none yet")


def _budget(progress: Progress) -> tuple[str, Text]:
    text = f"{progress.budget_spent:,} samples launched · {progress.samples_counted:,} counted"
    return "budget", Text(text)


def _speed(progress: Progress) -> tuple[str, Text]:
    text = f"{progress.generation_tokens_per_s:,.0f} generated · {progress.learner_tokens_per_s:,.0f} learned"
    return "tokens/s", Text(text)


def _staleness(progress: Progress) -> tuple[str, Text]:
    return "staleness", Text(f"mean {progress.staleness_mean:.2f} · max {progress.staleness_max} versions")


def _updates(progress: Progress) -> tuple[str, Text]:
    return "weight updates", Text(f"{progress.weight_updates:,}")


def _held_out(progress: Progress) -> tuple[str, Text]:
    before = progress.accuracy_before
    return "held-out", Text("not measured" if before is None else f"{before:.3f} right before training")


def _tokens(progress: Progress, width: int) -> list[Text]:
    """A bar of all tokens by fate, and its legend."""
    total = sum(progress.tokens.values())
    if not total:
        return []
    bar = Text()
    items = [Text(f"{total:,} tokens", style="dim")]
    end, running = 0, 0
    for fate, count in progress.tokens.items():
        if not count:
            continue
        style = _FATE_STYLES.get(fate, "white")
        running += count
        start, end = end, round(width * running / total)
        bar.append("━" * (end - start), style=style)
        items.append(Text.assemble(("■ ", style), f"{fate} {_percent(count / total)}"))
    return [bar, *_flow(items, width)]


def _flow(items: list[Text], width: int) -> list[Text]:
    """Lines of at most `width` columns that break between items only."""
    lines = [items[0]]
    for item in items[1:]:
        if lines[-1].cell_len + 2 + item.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", item)
        else:
            lines.append(item)
    return lines


def _percent(share: float) -> str:
    return "<1%" if 0.0 < share < 0.005 else f"{share:.0%}"
