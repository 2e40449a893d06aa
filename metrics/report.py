"""The few lines that a run prints at its end, from its `summary.json`, with where to look next.

Invariants: pure; a figure that the summary lacks is left out, never guessed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

Summary = Mapping[str, Any]

_DASHBOARD = "metrics/grafana/sampling_budget.json"
_LEVELS_A_LINE = 4


def format_summary(summary: Summary, run_folder: Path | None = None) -> str:
    """Text of a finished run; empty, or lines that end with a newline.

    Args:
        summary: keys of `summary.json`; `accuracy_by_level` and `accuracy_by_level_before` are level -> share.
        run_folder: `runs/NAME`; None = no pointers to its files.
    """
    rows = [
        ("held-out", _accuracy(summary)),
        *_levels(summary),
        ("steps", _steps(summary)),
        ("groups", _groups(summary)),
        ("samples", _samples(summary)),
        ("tokens", _tokens(summary)),
        ("staleness", _staleness(summary)),
        ("weight updates", _updates(summary)),
        ("tokens/s", _speed(summary)),
    ]
    lines = [f"{name:<16}{value}".rstrip() for name, value in rows if value]
    if run_folder is not None:
        lines += ["", *_pointers(summary, run_folder)]
    return "".join(f"{line}\n" for line in lines)


def _accuracy(summary: Summary) -> str:
    parts = [_change(summary.get("accuracy_before"), summary.get("accuracy_after"))]
    greedy = _change(summary.get("accuracy_greedy_before"), summary.get("accuracy_greedy_after"))
    if greedy:
        parts.append(f"greedy {greedy}")
    return "   ".join(part for part in parts if part)


def _change(before: float | None, after: float | None) -> str:
    known = [f"{value:.3f}" for value in (before, after) if value is not None]
    ratio = f" ({after / before:.1f}x)" if before and after is not None else ""
    return " -> ".join(known) + ratio


def _levels(summary: Summary) -> list[tuple[str, str]]:
    after = cast("dict[str, float]", summary.get("accuracy_by_level") or {})
    before = cast("dict[str, float]", summary.get("accuracy_by_level_before") or {})
    items = [
        f"{level} {before[level]:.2f}->{share:.2f}" if level in before else f"{level} {share:.2f}"
        for level, share in after.items()
    ]
    chunks = [items[i : i + _LEVELS_A_LINE] for i in range(0, len(items), _LEVELS_A_LINE)]
    return [("" if i else "by level", "   ".join(chunk)) for i, chunk in enumerate(chunks)]


def _steps(summary: Summary) -> str:
    return _join(
        _count(summary, "steps", ""),
        _figure(summary, "wall_s", "in {:.0f} s"),
        _figure(summary, "setup_s", "(setup {:.0f} s)"),
        separator=" ",
    )


def _groups(summary: Summary) -> str:
    return _join(
        _count(summary, "groups_trained", "trained"),
        _count(summary, "groups_zero_signal", "without signal"),
        _figure(summary, "useful_groups_per_min", "{:.1f} useful a minute"),
    )


def _samples(summary: Summary) -> str:
    return _join(
        _count(summary, "samples_launched", "launched"),
        _count(summary, "samples_counted", "counted"),
        _count(summary, "samples_aborted", "aborted"),
    )


def _tokens(summary: Summary) -> str:
    total = summary.get("tokens_generated")
    if not total:
        return ""
    shares = [
        f"{fate} {summary[key] / total:.1%}"
        for fate, key in (("trained", "tokens_trained"), ("aborted", "tokens_aborted"))
        if key in summary
    ]
    return _join(f"{total:,} generated", *shares)


def _staleness(summary: Summary) -> str:
    return _join(
        _figure(summary, "max_staleness_seen", "max {} versions"), _count(summary, "expired_samples", "samples expired")
    )


def _updates(summary: Summary) -> str:
    return _join(
        _count(summary, "weight_updates", ""),
        _figure(summary, "weight_pause_s_p50", "pause {:.2f} s"),
        _figure(summary, "weight_update_s_p50", "all {:.2f} s (medians)"),
        _figure(summary, "canary_max_nats", "canary {:.3f} nats"),
    )


def _speed(summary: Summary) -> str:
    return _join(
        _figure(summary, "generation_tokens_per_s", "{:,.0f} generated"),
        _figure(summary, "learner_tokens_per_s", "{:,.0f} learned"),
    )


def _pointers(summary: Summary, run_folder: Path) -> list[str]:
    checkpoint = summary.get("checkpoint") or run_folder / "checkpoints"
    return [
        f"look next       {run_folder}/  (summary.json, events.jsonl, config.toml)",
        f"  samples       {run_folder}/samples.jsonl  (one row a counted sample)",
        f"  checkpoint    {checkpoint}  (HF format)",
        f"  dashboard     {_DASHBOARD}  (for Grafana)",
    ]


def _count(summary: Summary, key: str, words: str) -> str:
    return _figure(summary, key, "{:,} " + words).strip()


def _figure(summary: Summary, key: str, template: str) -> str:
    value = summary.get(key)
    return "" if value is None else template.format(value)


def _join(*parts: str, separator: str = " · ") -> str:
    return separator.join(part for part in parts if part)
