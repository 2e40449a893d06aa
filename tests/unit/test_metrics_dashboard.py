"""The dashboard and the alerts as files: built from source, in step with the catalogue, valid."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations

import promql_parser
import pytest

from metrics.catalogue import CATALOGUE, Series
from metrics.grafana.build import PATH, text
from metrics.grafana.rows import EMPTY_WHEN_HEALTHY, UNUSED

PROMETHEUS = PATH.parents[1] / "prometheus"
DASHBOARD = json.loads(PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
EXPOSED = {row.name + suffix: row for row in CATALOGUE for suffix in SUFFIXES.get(row.kind, ("",))}
TARGET_LABELS = {"instance", "job"}


def alert_queries() -> list[str]:
    """Every `expr` of the rules: the rest of its line, or the more indented lines after `|`."""
    found = re.findall(r"^ {8}expr: (?:(?!\|)(.+)|\|((?:\n {10}.*)+))$", (PROMETHEUS / "alerts.yml").read_text(), re.M)
    return [line or block for line, block in found]


def selectors(query: str) -> Iterator[promql_parser.VectorSelector]:
    """Every vector selector of a query."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "1m")), visit)
    yield from found


def unsatisfiable(query: str) -> list[str]:
    """What of a query no engine can ever match."""
    faults = []
    for selector in selectors(query):
        row = EXPOSED.get(selector.name)
        if row is None:
            faults.append(f"no series is called {selector.name}")
            continue
        for matcher in selector.matchers.matchers:
            faults += matcher_faults(row, matcher)
    return faults


def matcher_faults(row: Series, matcher: promql_parser.Matcher) -> list[str]:
    if matcher.name in TARGET_LABELS:
        return []
    if matcher.name not in row.labels:
        return [f"{row.name} has no label {matcher.name}"]
    values = row.labels[matcher.name]
    wanted = matcher.value.split("|")
    return [f"{row.name}: {matcher.name} is never {value!r}" for value in wanted if values and value not in values]


def test_the_committed_dashboard_is_what_its_source_builds():
    assert PATH.read_text() == text(), "run python -m metrics.grafana.build"


def test_every_query_can_match_what_the_catalogue_exposes():
    faults = {query: unsatisfiable(query) for query in QUERIES}
    assert {query: found for query, found in faults.items() if found} == {}


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(adastream_engine_token_total[1m])", "no series is called adastream_engine_token_total"),
        ("rate(adastream_engine_arm_samples[1m])", "no series is called adastream_engine_arm_samples"),
        ('adastream_engine_arms{stat="sampling"}', "adastream_engine_arms has no label stat"),
        (
            '1 + sum(adastream_engine_arms{state=~"sampling|sleeping"})',
            "adastream_engine_arms: state is never 'sleeping'",
        ),
    ],
)
def test_a_query_that_matches_nothing_is_found(query, fault):
    assert unsatisfiable(query) == [fault]


def test_every_series_is_drawn_or_listed_as_unused():
    drawn = {EXPOSED[selector.name].name for query in QUERIES for selector in selectors(query)}
    assert {row.name for row in CATALOGUE} - drawn == set(UNUSED)


def test_every_query_filters_by_the_chosen_engine():
    for query in QUERIES:
        for selector in selectors(query):
            assert any(m.name == "instance" and m.value == "$instance" for m in selector.matchers.matchers), query


def test_the_data_source_is_a_variable_and_nothing_has_a_fixed_uid():
    assert "uid" not in DASHBOARD
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]
    uids = re.findall(r'"uid": "([^"]*)"', PATH.read_text())
    assert set(uids) == {"${datasource}"}


def test_every_panel_says_what_it_shows_in_which_unit():
    for panel in PANELS:
        assert panel["title"], panel["id"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert set(EMPTY_WHEN_HEALTHY) <= {panel["title"] for panel in PANELS}


def test_panels_do_not_overlap_and_fit_the_width():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)


def test_every_alert_can_match_what_the_catalogue_exposes():
    queries = alert_queries()
    assert len(queries) == 8
    names = {selector.name for query in queries for selector in selectors(query)}
    assert "instance:adastream_wasted_tokens:ratio_rate5m" in names
    own = [query for query in queries if "instance:adastream" not in query]
    assert [unsatisfiable(query) for query in own] == [[] for _ in own]


@pytest.mark.prometheus
def test_promtool_accepts_the_scrape_example_and_its_rules():
    checked = subprocess.run(
        ["promtool", "check", "config", PROMETHEUS / "prometheus.yml"], capture_output=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


CASES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'adastream_engine_tokens_total{{instance="a",fate="trained"}}', values: '0+60x60'}}
      - {{series: 'adastream_engine_tokens_total{{instance="a",fate="aborted"}}', values: '0+30x60'}}
      - {{series: 'adastream_engine_tokens_total{{instance="a",fate="failed"}}', values: '0+30x60'}}
      - {{series: 'adastream_engine_tokens_total{{instance="b",fate="trained"}}', values: '0+60x60'}}
      - {{series: 'adastream_engine_workers{{instance="a"}}', values: '2x10 0x50'}}
      - {{series: 'adastream_learner_last_step_timestamp_seconds{{instance="a"}}', values: '60x60'}}
      - {{series: 'adastream_learner_last_step_timestamp_seconds{{instance="b"}}', values: '0x60'}}
      - {{series: 'adastream_weights_updates_total{{instance="a",outcome="failed"}}', values: '0x28 1x32'}}
      - {{series: 'adastream_verifier_verdicts_total{{instance="a",verdict="timeout"}}', values: '0+6x60'}}
      - {{series: 'adastream_verifier_verdicts_total{{instance="a",verdict="correct"}}', values: '0+60x60'}}
      - {{series: 'adastream_engine_groups_total{{instance="a",outcome="sealed"}}', values: '0+60x60'}}
      - {{series: 'adastream_engine_groups_total{{instance="a",outcome="dropped_expired"}}', values: '0+3x60'}}
      - {{series: 'adastream_engine_loop_lag_seconds_bucket{{instance="a",le="0.3"}}', values: '0+10x60'}}
      - {{series: 'adastream_engine_loop_lag_seconds_bucket{{instance="a",le="1.0"}}', values: '0+60x60'}}
      - {{series: 'adastream_engine_loop_lag_seconds_bucket{{instance="a",le="+Inf"}}', values: '0+60x60'}}
    promql_expr_test:
      - expr: instance:adastream_wasted_tokens:ratio_rate5m
        eval_time: 30m
        exp_samples:
          - {{labels: 'instance:adastream_wasted_tokens:ratio_rate5m{{instance="a"}}', value: 0.5}}
      - expr: count by (alertname, instance) (ALERTS{{alertstate="firing"}})
        eval_time: 5m
        exp_samples: []
      - expr: count by (alertname, instance) (ALERTS{{alertstate="firing"}})
        eval_time: {minute}m
        exp_samples:
{expected}
"""
ALERTS = (
    "AdastreamGroupsDropped",
    "AdastreamLoopLag",
    "AdastreamNoStep",
    "AdastreamNoWorker",
    "AdastreamTokensWasted",
    "AdastreamVerifierFaults",
    "AdastreamWeightUpdateFailed",
)


def rules_test(folder, alerts, minute=32) -> subprocess.CompletedProcess:
    expected = "\n".join(f'          - {{labels: \'{{alertname="{a}",instance="a"}}\', value: 1}}' for a in alerts)
    cases = folder / "cases.yml"
    cases.write_text(CASES.format(rules=PROMETHEUS / "alerts.yml", minute=minute, expected=expected))
    return subprocess.run(["promtool", "test", "rules", cases], capture_output=True, timeout=30, check=False)


@pytest.mark.prometheus
def test_every_alert_fires_for_its_fault_and_for_no_other_engine(tmp_path):
    tested = rules_test(tmp_path, ALERTS)
    assert tested.returncode == 0, (tested.stdout + tested.stderr).decode()


@pytest.mark.prometheus
def test_an_alert_that_is_not_expected_fails_the_rules_test(tmp_path):
    assert rules_test(tmp_path, ALERTS[:-1]).returncode != 0
