"""Every panel of the dashboard against a real Prometheus that scrapes a live engine.

Rendering in Grafana itself is not tested: the queries are, with Grafana's variables replaced.
"""

import dataclasses
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import promql_parser
import pytest

from metrics.catalogue import CATALOGUE, Series
from metrics.grafana.build import PATH
from metrics.grafana.rows import EMPTY_WHEN_HEALTHY

ROOT = Path(__file__).parents[2]
RATE_S = 5
SCRAPES = 12
DEADLINE_S = 90.0

STILL_WHEN_HEALTHY = {
    "adastream_engine_prompts_rejected_total",
    "adastream_worker_restarts_total",
    "adastream_verifier_queue_samples",
    # Simulated weights load at once and have no logprobs to differ; a simulated learner computes no loss.
    "adastream_weights_canary_nats",
    "adastream_learner_loss",
    "adastream_learner_entropy_nats",
    "adastream_learner_kl_behaviour_nats",
    "adastream_learner_clipped_ratio",
    "adastream_learner_grad_norm",
    "adastream_learner_learning_rate",
    *(row.name for row in CATALOGUE if row.name.startswith("adastream_learner_lag_")),
    "adastream_learner_kl_reference_nats",
    "adastream_learner_masked_ratio",
    "adastream_learner_mismatch_nats",
    "adastream_learner_mismatch_ratio",
}
"""Series that may stay at 0 while nothing goes wrong."""

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="the prometheus binary is not installed"),
]


@dataclass(frozen=True)
class Store:
    """A Prometheus with both runs in it."""

    url: str
    healthy: str
    """`instance` label of the healthy run."""
    faulty: str
    """`instance` label of the run in which things go wrong."""
    body: str
    """/metrics of the healthy run."""

    def range(self, query: str) -> list[float]:
        now = time.time()
        result = self._ask("query_range", query=query, start=now - 30, end=now, step=1)
        return [float(value) for series in result for _, value in series["values"]]

    def instant(self, query: str) -> list[float]:
        return [float(series["value"][1]) for series in self._ask("query", query=query)]

    def _ask(self, kind: str, **parameters: object) -> list[dict]:
        address = f"{self.url}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]["result"]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@contextmanager
def child(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def until_up(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer within {DEADLINE_S} s:\n{log.read_text()[-3000:]}")


@contextmanager
def simulated_run(tmp_path: Path) -> Iterator[str]:
    """A healthy run with simulated workers and learner; yields its base URL."""
    port = free_port()
    command = [sys.executable, "-m", "engine.serve", "--config", "configs/sim.toml", f"server.http_port={port}"]
    limits = ["run.max_steps=0", "run.max_train_s=300", f"run.folder={tmp_path}/runs", "server.live=plain"]
    log = tmp_path / "engine.log"
    with child([*command, *limits], log) as process:
        until_up(f"http://127.0.0.1:{port}/healthz", process, log)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def recorded_run(tmp_path: Path, *, faults: bool) -> Iterator[str]:
    """A made-up run that only feeds a recorder; yields its base URL."""
    port = free_port()
    log = tmp_path / f"recorded-{faults}.log"
    flags = ["--faults"] if faults else []
    with child([sys.executable, "-m", "tests.integration.recorded_run", str(port), *flags], log) as process:
        until_up(f"http://127.0.0.1:{port}/healthz", process, log)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def prometheus(tmp_path: Path, targets: list[str]) -> Iterator[str]:
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: adastream, static_configs: [{{targets: {json.dumps(targets)}}}]}}]\n"
    )
    log = tmp_path / "prometheus.log"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with child(command, log) as process:
        until_up(f"http://127.0.0.1:{port}/-/ready", process, log)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("dashboard")
    with ExitStack() as stack:
        healthy = stack.enter_context(simulated_run(folder))
        faulty = stack.enter_context(recorded_run(folder, faults=True))
        hosts = [url.removeprefix("http://") for url in (healthy, faulty)]
        url = stack.enter_context(prometheus(folder, hosts))
        until_scraped(Store(url, *hosts, body=""), folder)
        with urllib.request.urlopen(f"{healthy}/metrics", timeout=10) as answer:
            body = answer.read().decode()
        yield Store(url, *hosts, body=body)


def until_scraped(store: Store, folder: Path) -> None:
    """Wait until both targets were scraped often enough for rates, counted from their first optimizer step."""
    deadline = time.monotonic() + DEADLINE_S
    stepped = "adastream_learner_policy_version > 0"
    why = f"no {SCRAPES} scrapes of both runs within {DEADLINE_S} s"
    while time.monotonic() < deadline:
        counts = store.instant(f"count_over_time(({stepped})[2m:1s])")
        if len(counts) == 2 and min(counts) >= SCRAPES:
            return
        if 0.0 in store.instant("up"):
            why = "a run does not answer"
            break
        time.sleep(0.5)
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
    raise AssertionError(f"{why}\n{logs}")


def panels(dashboard: dict) -> Iterator[dict]:
    for panel in dashboard["panels"]:
        yield from (inner for inner in (panel, *panel.get("panels", ())) if inner["type"] != "row")


def load() -> dict:
    return json.loads(PATH.read_text())


def concrete(expr: str, instance: str) -> str:
    """The query as Grafana would send it."""
    text = expr.replace("$__rate_interval", f"{RATE_S}s").replace(
        "$instance", re.escape(instance).replace("\\", "\\\\")
    )
    assert "$" not in text, f"a variable is not replaced: {text}"
    promql_parser.parse(text)
    return text


def empty_panels(store: Store, dashboard: dict, instance: str) -> list[str]:
    """Panels of which any query has no finite value."""
    empty = []
    for panel in panels(dashboard):
        for target in panel["targets"]:
            query = concrete(target["expr"], instance)
            values = store.instant(query) if target["instant"] else store.range(query)
            if not any(math.isfinite(value) for value in values):
                empty.append(f"{panel['title']} [{target['refId']}]")
    return empty


def moves(store: Store, row: Series) -> bool:
    """Whether any series of the family ever left 0."""
    name = row.name + ("_count" if row.kind in ("histogram", "summary") else "")
    return any(store.range(f'{name}{{instance="{store.healthy}"}} != 0'))


def test_every_panel_shows_something_in_a_healthy_run(store):
    allowed = {f"{title} [A]" for title in EMPTY_WHEN_HEALTHY}
    assert set(empty_panels(store, load(), store.healthy)) - allowed == set()


def test_panels_that_a_healthy_run_leaves_empty_show_its_faults(store):
    assert empty_panels(store, load(), store.faulty) == []


@pytest.mark.parametrize(
    ("right", "typo"),
    [
        ("loop_lag_seconds_sum", "loop_lag_second_sum"),
        ('outcome="trained"', 'outcome="traned"'),
        ("sum by (tier, le)", "sum by (tier, lee)"),
    ],
)
def test_a_planted_typo_is_found(store, right, typo):
    dashboard = load()
    panel, target = next((p, t) for p in panels(dashboard) for t in p["targets"] if right in t["expr"])
    target["expr"] = target["expr"].replace(right, typo)
    assert empty_panels(store, dashboard, store.faulty) == [f"{panel['title']} [{target['refId']}]"]


def test_a_misspelt_query_language_is_found():
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        concrete("sum by (le (rate(x[$__rate_interval]))", "x")


def test_promtool_accepts_the_live_body(store):
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=store.body.encode(), capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, (checked.stdout + checked.stderr).decode()) == (0, "")


def test_every_series_moves_in_a_healthy_run_but_those_that_count_faults(store):
    still = {row.name for row in CATALOGUE if not moves(store, row)}
    assert still - STILL_WHEN_HEALTHY == set()


def test_every_series_moves_when_things_go_wrong(store):
    faulty = dataclasses.replace(store, healthy=store.faulty)
    assert {row.name for row in CATALOGUE if not moves(faulty, row)} == set()


def test_health_of_both_runs_is_ok(store):
    for host in (store.healthy, store.faulty):
        with urllib.request.urlopen(f"http://{host}/healthz", timeout=10) as answer:
            assert json.load(answer)["status"] == "ok"


def test_every_series_of_the_live_body_is_in_the_store(store):
    names = {line.split()[2] for line in store.body.splitlines() if line.startswith("# TYPE")}
    selector = f'count by (__name__) ({{__name__=~"adastream_.*", instance="{store.healthy}"}})'
    stored = {series["metric"]["__name__"] for series in store._ask("query", query=selector)}
    assert {name for name in names if not any(found.startswith(name) for found in stored)} == set()
