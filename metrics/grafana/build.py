"""Builds `sampling_budget.json`: `python -m metrics.grafana.build` rewrites it, a test compares the two.

Invariants: every query filters by the dashboard's `instance` variable and names series of the catalogue only; the data
source is a template variable, no uid is fixed; panels of a row are laid out left to right, and never overlap.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from metrics.grafana.rows import ROWS
from metrics.grafana.spec import Panel, Query, Row

PATH = Path(__file__).with_name("sampling_budget.json")
Json: TypeAlias = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHT = 8
_STAT_HEIGHT = 4


def dashboard() -> Json:
    """The whole dashboard, schema version 39 (Grafana 11)."""
    return {
        "title": "adastream: sampling budget",
        "description": "Where the samples and tokens of an adaptive sampling run go, and what they buy.",
        "tags": ["adastream"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_numbered(ROWS)),
    }


def _variables() -> list[Json]:
    instances = "label_values(adastream_engine_slots, instance)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Engine",
            "type": "query",
            "datasource": _SOURCE,
            "definition": instances,
            "query": {"query": instances, "refId": "instances"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _numbered(rows: tuple[Row, ...]) -> Iterator[Json]:
    number, y = 1, 0
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        }
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            height = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
            yield {"id": number, "gridPos": {"x": x, "y": y, "w": panel.width, "h": height}, **_panel(panel)}
            number, x, tallest = number + 1, x + panel.width, max(tallest, height)
        y += tallest


def _panel(panel: Panel) -> Json:
    instant = panel.kind == "table"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        **({"transformations": _TABLE} if instant else {}),
    }


def _target(query: Query, index: int, panel: Panel) -> Json:
    instant = panel.kind == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": instant,
        "range": not instant,
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit}
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": True,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
        "yAxis": {"axisPlacement": "left"},
        "tooltip": {"mode": "single"},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}
_TABLE = [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True}}}]


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
