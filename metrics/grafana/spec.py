"""The words in which panels are written: a panel, its queries, and short forms of PromQL."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["timeseries", "stat", "heatmap", "table"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the name of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `width` in Grafana's 24 columns."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def series(name: str, **labels: str) -> str:
    """Selector of a series of the chosen engines; a label value with `|` is a choice of several."""
    matchers = ['instance=~"$instance"']
    matchers += [f'{label}{"=~" if "|" in value else "="}"{value}"' for label, value in labels.items()]
    return f"{name}{{{', '.join(matchers)}}}"


def rate(name: str, by: str = "", **labels: str) -> str:
    """Increase a second, summed over everything but `by`."""
    return f"sum{_by(by)} (rate({series(name, **labels)}[$__rate_interval]))"


def per_minute(name: str, by: str = "", **labels: str) -> str:
    """Increase a minute, summed over everything but `by`."""
    return f"60 * {rate(name, by, **labels)}"


def mean(name: str, by: str = "") -> str:
    """Mean of what a histogram or summary observed."""
    return f"{rate(name + '_sum', by=by)} / {rate(name + '_count', by=by)}"


def quantile(level: float, name: str, by: str = "") -> str:
    """Quantile of what a histogram observed, interpolated inside its buckets."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({level}, {rate(name + '_bucket', by=labels)})"


def buckets(name: str) -> str:
    """Observations by bucket, for a heat map."""
    return f"sum by (le) (increase({series(name + '_bucket')}[$__rate_interval]))"


def spread(name: str) -> tuple[Query, ...]:
    """Median, 99th percentile and mean of a histogram."""
    return (
        Query(quantile(0.5, name), "median"),
        Query(quantile(0.99, name), "p99"),
        Query(mean(name), "mean"),
    )


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
