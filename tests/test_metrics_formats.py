"""Both `/metrics` as others read them: promtool, the OpenMetrics parser, and a real Prometheus that finds the nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from tests.aggregator.cluster import AGGREGATOR, Cluster, ask
from tests.aggregator.service import Service, free_port, until

# The contract: design, metrics. Samples as they are written, so a counter ends in _total.
OF_NODE = {
    "healthd_build_info",
    "healthd_node_info",
    "healthd_node_health",
    "healthd_node_allocated",
    "healthd_check_status",
    "healthd_check_runs_total",
    "healthd_check_last_run_timestamp_seconds",
    "healthd_check_duration_seconds",
    "healthd_finding",
    "healthd_findings_dropped",
    "healthd_injected_faults",
    "healthd_device_matmul_flops_per_second",
    "healthd_device_memory_bandwidth_bytes_per_second",
    "healthd_collective_bus_bandwidth_bytes_per_second",
    "healthd_collective_duration_seconds",
    "healthd_probe_device_seconds_total",
    "healthd_task_errors_total",
}
OF_AGGREGATOR = {
    "healthd_aggregator_loop_lag_seconds_count",
    "healthd_fleet_nodes",
    "healthd_fleet_nodes_heard",
    "healthd_gate_decisions_total",
    "healthd_gate_duration_seconds_bucket",
    "healthd_gate_device_seconds_total",
    "healthd_gates_holding",
    "healthd_nodes_excluded_total",
    "healthd_validation_duration_seconds_bucket",
    "healthd_quarantined_nodes",
    "healthd_overrides_active",
    "healthd_task_errors_total",
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as one:
        yield one


def samples(service: Service) -> dict[str, list[dict[str, str]]]:
    """Name -> the labels of its samples; by both parsers, which must agree."""
    plain = service.get("/metrics")
    opened = service.get("/metrics", headers={"Accept": OPENMETRICS})
    assert plain.headers["content-type"].startswith("text/plain")
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    found: dict[str, list[dict[str, str]]] = {}
    for family in parse_prometheus(plain.text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    names = {sample.name for family in parse_openmetrics(opened.text) for sample in family.samples}
    assert names == set(found)
    assert not any(name.endswith("_created") for name in names)
    return found


def lint(service: Service) -> str:
    """What promtool has to say; empty when it is content."""
    text = service.get("/metrics").text
    tool = ["promtool", "check", "metrics"]
    done = subprocess.run(tool, input=text, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout + done.stderr if done.returncode or done.stderr else ""


@pytest.mark.system("promtool")
def test_every_metric_of_the_contract_is_there_and_every_reader_is_content(cluster: Cluster) -> None:
    cluster.checks = ("memory_free", "proof", "matmul", "memory", "all_reduce")
    aggregator = cluster.aggregator().start()
    node = cluster.node("n1", aggregator=aggregator.url)
    file = cluster.folder / "n1.toml"
    small = "cpu_devices = 2\n[checks.all_reduce]\nsizes_bytes = [4096]\n[checks.memory]\nmax_bytes = 4194304\n"
    file.write_text(file.read_text().replace("cpu_devices = 1\n", small))
    cluster.prove(0.5)
    node.start()
    until(lambda: 'healthd_check_status{check="all_reduce",status="pass"} 1.0' in node.get("/metrics").text, 30)
    assert ask(aggregator.url, "train", ["n1"], wait=10, wait_seconds=5.0)["decision"] == "reject"
    found = samples(node)
    assert not OF_NODE - found.keys()
    assert {labels["health"] for labels in found["healthd_node_health"]} == {
        "healthy",
        "degraded",
        "unknown",
        "unhealthy",
    }
    assert {labels["dtype"] for labels in found["healthd_device_matmul_flops_per_second"]} == {"fp32", "bf16"}
    (finding,) = found["healthd_finding"]
    assert finding == {
        "check": "proof",
        "target": "node",
        "reason": "SlowDevice",
        "status": "fail",
        "injected": "false",
    }
    assert sum(map(len, found.values())) <= 500
    assert not OF_AGGREGATOR - samples(aggregator).keys()
    for service in (node, aggregator):
        assert lint(service) == ""


@pytest.mark.system("prometheus")
def test_prometheus_finds_the_nodes_through_the_aggregator_and_sees_their_health(cluster: Cluster) -> None:
    names = {"n1", "n2"}
    aggregator = cluster.fleet(*sorted(names), config=AGGREGATOR)
    until(lambda: len(aggregator.get("/v1/sd/prometheus").json()) == 2)
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {
                "job_name": "healthd",
                "http_sd_configs": [{"url": f"{aggregator.url}/v1/sd/prometheus", "refresh_interval": "1s"}],
            },
            {
                "job_name": "aggregator",
                "static_configs": [{"targets": [aggregator.url.removeprefix("http://")]}],
            },
        ],
    }
    file = cluster.folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # YAML is a superset
    url = f"http://127.0.0.1:{free_port()}"
    with (cluster.folder / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={cluster.folder / 'tsdb'}",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=log,
            env=cluster.env,
        )
    cluster.others.append(prometheus)

    def query(expression: str) -> list[dict[str, Any]]:
        assert prometheus.poll() is None, (cluster.folder / "prometheus.log").read_text()
        try:
            answer = httpx.get(
                f"{url}/api/v1/query", params={"query": expression}, trust_env=False, verify=False, timeout=30
            )
        except httpx.TransportError:
            return []
        rows: list[dict[str, Any]] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return [row["metric"] for row in rows]

    until(lambda: len(query('healthd_node_health{health="healthy"} == 1')) == 2, 20)
    found = query('healthd_node_health{health="healthy"} == 1')
    ports = {cluster.services[name].url.rpartition("/")[2] for name in names}
    assert {row["instance"] for row in found} == ports
    until(lambda: bool(query('healthd_fleet_nodes{health="healthy",injected="false"} == 2')), 10)
    targets = httpx.get(f"{url}/api/v1/targets", trust_env=False, verify=False, timeout=30).json()["data"][
        "activeTargets"
    ]
    assert {target["health"] for target in targets} == {"up"}
    assert names <= {value for row in found for value in row.values()} | {
        value for target in targets for value in target["labels"].values()
    }
