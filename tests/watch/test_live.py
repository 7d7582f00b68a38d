"""A real Prometheus with our rules watches a real aggregator and two real nodes, found through the aggregator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from healthd.aggregator.identity.tokens import Scope
from tests.aggregator.cluster import AGGREGATOR, Cluster, ask
from tests.aggregator.secured import Secured, secure
from tests.aggregator.service import Service, until
from tests.watch.stand import (
    ALERTS,
    RECORDING,
    Prometheus,
    Receivers,
    marks,
    queries,
    raw_metrics,
    rules,
    start_alertmanager,
    start_prometheus,
)

pytestmark = [pytest.mark.system("prometheus", "prometheus-alertmanager")]

SMALL = "cpu_devices = 2\n[checks.all_reduce]\nsizes_bytes = [1048576]\n[checks.memory]\nmax_bytes = 4194304\n"
SMALL += "[checks.load]\nmax_load_per_core_ratio = 1000.0\n"  # how busy the machine of the tests is, is no fault here
# Nodes fall ill several times here, which is no reason to keep them from the next test.
NO_RULES = "rules_observe = ['soft', 'hard']\n"
OPENED = """[gate]
callers_may = ["lease", "mode"]

[screening]
tier = "deep"
pools = ["none"]
"""
"""
The gates of these tests leave the nodes free for the next one, and one of them only watches. Screening has its metrics,
and no node.
"""
VALUES = {
    "job": "healthd-node",
    "aggregator_job": "healthd-aggregator",
    "pool": ".*",
    "op": ".*",
    "size_bytes": ".*",
    "__rate_interval": "10s",
    "__range": "1m",
}

# Nobody sets the clock of a test machine, so a passive check of our own has the reading of a time.
LAG = '''
"""A check of a test."""
from __future__ import annotations

from collections.abc import Iterator

from pathlib import Path

from checks.contract import Context, Finding, Limit, NoParams, check
from checks.limits import within


@check(tier="passive", interval_seconds=1, timeout_seconds=10)
def lag(ctx: Context[NoParams]) -> Iterator[Finding]:
    """A time is within its limit."""
    most = Limit(lower=None, upper=1.0, origin="config")
    seconds = float(Path(__file__).with_name("lag").read_text())
    yield within(seconds, name="lag_seconds", target="node", limit=most, reason="ClockOffset", subject="lag")
'''


@dataclass(frozen=True)
class Stand:
    cluster: Cluster
    aggregator: Service
    prometheus: Prometheus
    secured: Secured
    alertmanager: str
    receivers: Receivers

    def lag(self, seconds: float) -> None:
        """A real fault on both nodes, beyond a second; none below."""
        file = self.cluster.folder / "checks" / "lag"
        file.with_suffix(".new").write_text(str(seconds))
        file.with_suffix(".new").replace(file)

    def inject(self, node: str, fault: str | None) -> None:
        """Begin a drill on a node, or end it."""
        words = ("clear",) if fault is None else ("set", fault)
        said = self.cluster.healthd("fault", *words, "--run-dir", str(self.cluster.run_dir(node)))
        assert said.code == 0, said.err

    def ask(self, job: str, nodes: list[str], **more: Any) -> dict[str, Any]:
        """A gate, as a hook asks it."""
        with self.secured.http(Scope.GATE) as http:
            return ask(self.aggregator.url, job, nodes, http=http, **more)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with Cluster(tmp_path_factory.mktemp("watch")) as cluster:
        passive = ("memory_free", "load", "disk_space", "processes")
        cluster.checks = (*passive, "lag", "proof", "matmul", "memory", "all_reduce")
        cluster.prove(2.0)
        (cluster.folder / "checks" / "lag.py").write_text(LAG)
        (cluster.folder / "checks" / "lag").write_text("0.5")
        (cluster.folder / "secured").mkdir()
        secured = secure(cluster.folder / "secured")
        aggregator = cluster.aggregator(*secured.aggregator, config=f"{AGGREGATOR}{NO_RULES}{OPENED}").start()
        for name in ("n1", "n2"):
            node = cluster.node(name, *secured.client(Scope.SYNC), aggregator=aggregator.url)
            file = cluster.folder / f"{name}.toml"
            file.write_text(file.read_text().replace("cpu_devices = 1\n", SMALL))
            node.start(ready=False)
        receivers = Receivers()
        alertmanager = start_alertmanager(cluster, receivers)
        prometheus = start_prometheus(cluster, aggregator.url, secured, alertmanager)
        cluster.healthy("n1", "n2", seconds=60)
        until(lambda: len(prometheus.query('healthd_node_health{health="healthy"} == 1')) == 2, 20, prometheus.log)
        yield Stand(cluster, aggregator, prometheus, secured, alertmanager, receivers)
        receivers.close()


def families(text: str) -> set[str]:
    """The families of a /metrics, also those that have no sample now."""
    return {name.removesuffix("_total") for name in re.findall(r"(?m)^# TYPE (\S+)", text)}


def test_every_metric_of_rules_and_dashboards_is_served(stand: Stand) -> None:
    with stand.secured.http(Scope.READ) as http:
        own = http.get(f"{stand.aggregator.url}/metrics").text
    served = families(own) | families(stand.cluster.services["n1"].get("/metrics").text)
    asked = set().union(
        *(raw_metrics(rule["expr"]) for rule in [*rules(RECORDING), *rules(ALERTS)]),
        *(raw_metrics(expression) for _, _, expression in queries()),
        *map(raw_metrics, marks()),
    )
    assert len(asked) > 25
    assert asked - served == set()


def test_nodes_have_their_names_and_pools_as_labels(stand: Stand) -> None:
    (row,) = stand.prometheus.query('healthd_node_info{node="n1"}')
    assert row["metric"]["pool"] == "a"
    assert not [label for label in row["metric"] if label.startswith("exported_")]


def test_fault_becomes_a_pending_then_a_firing_alert_and_clears(stand: Stand) -> None:
    stand.lag(5.0)
    seen: list[str] = []

    def state() -> str:
        found = [a for a in stand.prometheus.alerts("HealthdNodeUnhealthy") if a["labels"]["node"] == "n1"]
        word: str = found[0]["state"] if found else "none"
        if not seen or seen[-1] != word:
            seen.append(word)
        return word

    until(lambda: state() == "firing", 30, lambda: f"{seen}")
    assert "pending" in seen
    alert = next(a for a in stand.prometheus.alerts("HealthdNodeUnhealthy") if a["labels"]["node"] == "n1")
    assert alert["labels"]["severity"] == "warning"
    assert re.search(r"n1 is unhealthy.* lag on node: \w+\.", alert["annotations"]["description"])
    assert alert["annotations"]["runbook_url"].endswith("/docs/runbooks/HealthdNodeUnhealthy.md")
    until(lambda: ("team", "HealthdNodeUnhealthy", "n1", "firing") in stand.receivers.received, 20)
    stand.lag(0.5)
    until(lambda: state() == "none", 30, lambda: f"{seen}")


def test_drill_tells_those_who_hold_it_and_alarms_nobody_and_a_real_fault_beside_it_does(stand: Stand) -> None:
    """Wrong results are the worst of all alerts; these are injected. Then the same node has a real fault as well."""
    stand.receivers.received.clear()
    stand.inject("n1", "matmul=corrupt")
    drilled = stand.ask("drilled", ["n1"], wait=20, wait_seconds=60.0, max_age_seconds=0.1, lease=False)
    assert drilled["decision"] == "reject", drilled
    wrong = 'healthd_finding{node="n1",reason="WrongResult",injected="%s"}'
    until(lambda: bool(stand.prometheus.query(wrong % "true")), 20)
    assert not stand.prometheus.query(wrong % "false")
    until(lambda: bool(stand.prometheus.query('healthd_node_health{node="n1",health="unhealthy"} == 1')), 20)
    until(lambda: ("drills", "HealthdFaultInjected", "n1", "firing") in stand.receivers.received, 20)
    until(lambda: bool(stand.prometheus.query('healthd_fleet_nodes{health="unhealthy",injected="true"} == 1')), 20)
    assert not stand.prometheus.query("healthd:fleet_unfit:ratio > 0")

    stand.lag(5.0)
    until(lambda: ("team", "HealthdNodeUnhealthy", "n1", "firing") in stand.receivers.received, 30)
    (description,) = {a["annotations"]["description"] for a in firing(stand, "HealthdNodeUnhealthy") if of_n1(a)}
    assert "lag on node: ClockOffset" in description
    assert "WrongResult" not in description
    stand.lag(0.5)
    stand.inject("n1", None)
    until(lambda: not stand.prometheus.alerts("HealthdFaultInjected"), 30)
    until(lambda: ("drills", "HealthdFaultInjected", "n1", "resolved") in stand.receivers.received, 20)
    stand.cluster.healthy("n1", seconds=60)
    # From beginning to end: nothing was ever due for the wrong results, and nobody was called for the node. The real
    # fault was on both nodes of this fleet, which is a reason to call somebody.
    assert not stand.prometheus.query('last_over_time(ALERTS{alertname="HealthdWrongResults"}[1h])')
    assert {alert for receiver, alert, _, _ in stand.receivers.received if receiver == "on-call"} <= {
        "HealthdFleetDegraded"
    }


def of_n1(alert: dict[str, Any]) -> bool:
    return bool(alert["labels"]["node"] == "n1")


def test_what_follows_from_a_drill_is_kept_quiet_on_its_node_alone(stand: Stand) -> None:
    """Alertmanager's own word, given alerts of a drill on n7: what is known of n7 is little, and n8 has no drill."""
    names = (
        ("HealthdFaultInjected", "n7", "info"),
        ("HealthdNodeUnknown", "n7", "warning"),
        ("HealthdNodeUnknown", "n8", "warning"),
        ("HealthdWrongResults", "n7", "critical"),
    )
    given = [
        {"labels": {"alertname": name, "node": node, "instance": f"{node}:8080", "severity": severity}}
        for name, node, severity in names
    ]
    with httpx.Client(base_url=stand.alertmanager, trust_env=False) as http:
        assert http.post("/api/v2/alerts", json=given).status_code == 200

        def states() -> dict[tuple[str, str], str]:
            found = http.get("/api/v2/alerts", params={"filter": 'node=~"n7|n8"'}).json()
            return {(a["labels"]["alertname"], a["labels"]["node"]): a["status"]["state"] for a in found}

        wanted = {(name, node): "active" for name, node, _ in names}
        wanted["HealthdNodeUnknown", "n7"] = "suppressed"
        until(lambda: states() == wanted, 20, lambda: str(states()))
        until(lambda: ("team", "HealthdNodeUnknown", "n8", "firing") in stand.receivers.received, 20)
        assert ("team", "HealthdNodeUnknown", "n7", "firing") not in stand.receivers.received


def filled(expression: str, node: str) -> str:
    """The expression as Grafana would ask it."""
    for name, value in {**VALUES, "node": node}.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, expression
    return expression


def test_every_panel_has_data_and_no_rule_fails(stand: Stand) -> None:
    run_dir = str(stand.cluster.run_dir("n2"))
    together = stand.ask("together", ["n1", "n2"], wait=20, wait_seconds=60.0, lease=False)
    assert together["decision"] == "admit", together
    until(lambda: bool(stand.prometheus.query("healthd_validation_duration_seconds_count == 1")), 20)
    mismatch(stand, "n1")
    assert stand.ask("admitted", ["n1"], wait=10, mode="observe")["decision"] == "admit"
    said = stand.cluster.healthd("fault", "set", "memory_free=fail", "--run-dir", run_dir)
    assert said.code == 0, said.err
    until(lambda: bool(stand.prometheus.query('healthd_finding{node="n2",status="fail"}')), 20)
    assert stand.ask("watched", ["n2"], wait=10, wait_seconds=4.0, mode="observe")["would"] == "reject"
    assert stand.ask("stopped", ["n2"], wait=10, wait_seconds=4.0)["decision"] == "reject"
    kept = stand.cluster.healthd(
        *("fleet", "quarantine", "n2", "--reason", "a test", "--for", "1h", "--aggregator", stand.aggregator.url),
        *stand.secured.client(Scope.ADMIN),
    )
    assert kept.code == 0, kept.err
    until(lambda: bool(stand.prometheus.query("healthd_node_quarantined == 1")), 20)
    until(lambda: bool(stand.prometheus.query("increase(healthd_nodes_excluded_total[10s])")), 20)

    def empty() -> set[tuple[str, str]]:
        return {
            (name, title)
            for name, title, expression in queries()
            if not stand.prometheus.query(filled(expression, "n2" if name == "healthd-node" else ".*"))
        }

    until(lambda: not empty(), 20, lambda: f"without data: {sorted(empty())}")
    into_quarantine = next(one for one in marks() if "> (healthd_node_quarantined" in one)
    said_of = stand.prometheus.query(filled(into_quarantine.replace("offset 1m", "offset 2s"), ".*"))
    assert {one["metric"]["node"] for one in said_of} <= {"n2"}
    for expression in marks():
        stand.prometheus.query(filled(expression, ".*"))  # an error where Prometheus cannot read it
    assert stand.prometheus.ailing_rules() == []
    assert stand.cluster.healthd("fault", "clear", "--run-dir", run_dir).code == 0


def mismatch(stand: Stand, node: str) -> None:
    """A collective inside the node gives wrong values from now on, and a gate leaves it out for that."""
    run_dir = str(stand.cluster.run_dir(node))
    said = stand.cluster.healthd("fault", "set", "all_reduce=corrupt", "--run-dir", run_dir)
    assert said.code == 0, said.err
    wrong = stand.ask("wrong", [node], wait=20, wait_seconds=60.0, max_age_seconds=0.1, lease=False)
    assert wrong["excluded"][0]["reasons"][0]["code"] == "CollectiveMismatch", wrong


def test_daemon_that_is_gone_is_silent_and_not_healthy(stand: Stand) -> None:
    stand.cluster.services["n2"].kill()
    until(lambda: [a["labels"]["node"] for a in firing(stand, "HealthdNodeSilent")] == ["n2"], 20)
    assert not stand.prometheus.query('healthd_node_health{node="n2"} == 1')
    stand.cluster.services["n2"].start()
    stand.cluster.healthy("n2")
    until(lambda: not stand.prometheus.alerts("HealthdNodeSilent"), 20)


def firing(stand: Stand, name: str) -> list[dict[str, Any]]:
    return [alert for alert in stand.prometheus.alerts(name) if alert["state"] == "firing"]
