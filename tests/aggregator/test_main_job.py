"""The main job from outside: the assembled product, by its commands, its HTTP and its exit codes alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.cluster import AGGREGATOR, GATE_SECONDS, Cluster, ask, asked, release, release_node
from tests.aggregator.service import until

NODES = ("n1", "n2", "n3")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Of the test's own, with nothing started."""
    with Cluster(tmp_path) as one:
        yield one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("fleet"), checks=("memory_free", "proof", "matmul")) as one:
        one.fleet(*NODES)
        yield one


@pytest.fixture
def fleet(shared: Cluster) -> Iterator[Cluster]:
    """Three healthy nodes and an aggregator, given to each test as they were at the beginning: no job, no fault."""
    yield shared
    aggregator = shared.services["aggregator"]
    for name in NODES:
        release_node(aggregator.url, name)
    shared.prove(1.0)
    shared.healthd("fault", "clear", "--run-dir", str(shared.run_dir("n2")))
    shared.healthy(*NODES)


def url_of(fleet: Cluster) -> str:
    return fleet.services["aggregator"].url


def test_health_turns_503_200_503_200_as_curl_sees_it(cluster: Cluster) -> None:
    """Issue 2: not yet checked, checked, a fault set by the command line, cleared and checked again; real torch."""
    cluster.checks = ("memory_free", "matmul")
    node = cluster.node("n1").start()

    def curl() -> str:
        done = subprocess.run(
            ["curl", "-si", f"{node.url}/health"], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    first = curl()
    assert first.startswith("HTTP/1.1 503")
    assert "application/health+json" in first
    assert '"health": "unknown"' in first
    cluster.healthy("n1")
    assert curl().startswith("HTTP/1.1 200")
    run_dir = ("--run-dir", str(cluster.run_dir("n1")))
    said = cluster.healthd("fault", "set", "matmul@cpu:0=corrupt", *run_dir)
    assert (said.code, said.out) == (0, "active: matmul@cpu:0=corrupt\n")
    until(lambda: '"health": "unhealthy"' in curl())
    red = curl()
    assert red.startswith("HTTP/1.1 503")
    assert "WrongResult" in red
    assert "(injected)" in red
    assert cluster.healthd("fault", "clear", *run_dir).out == "cleared\n"
    cluster.healthy("n1")


@pytest.mark.thorough
def test_a_job_that_holds_a_device_past_the_evidences_age_keeps_the_node_green_and_suspended(cluster: Cluster) -> None:
    """Rival fault 22 too: no active run while the job is there; on release the quick tier is overdue at once."""
    # Evidence expires after a few seconds: the interval and its slack, all configured.
    node = cluster.node("n1")
    Path(cluster.folder / "n1.toml").write_text(
        (cluster.folder / "n1.toml").read_text().replace("[node.active]", '[node.active]\ninterval = "2s"')
    )
    node.start()
    cluster.healthy("n1")
    spec = {check["name"]: check for check in node.get("/v1/node").json()["checks"]}["proof"]
    assert spec["expires_seconds"] < 10

    def age() -> float:
        results = node.get("/v1/node").json()["results"]
        return float(next(r["age_seconds"] for r in results if r["check"] == "proof"))

    job = cluster.job(cluster.run_dir("n1") / "devices" / "cpu0")
    until(lambda: bool(node.get("/v1/node").json()["allocated"]))
    ran = node.get("/v1/results/proof").json()["results"]
    until(lambda: age() > spec["expires_seconds"] + 0.5)
    document = node.get("/health")
    assert document.status_code == 200
    assert "suspended" in document.text
    assert f"pid {job.pid}" in node.get("/v1/node").text
    assert node.health("?tier=quick&max_age=2") == 503
    assert len(node.get("/v1/results/proof").json()["results"]) == len(ran)
    job.kill()
    job.wait()
    until(lambda: age() < 2, 5)
    until(lambda: node.health("?tier=quick&max_age=60") == 200, 5)
    assert "suspended" not in node.get("/health").text


def test_gate_admits_rejects_by_name_takes_two_of_three_and_a_spare_from_the_pool(fleet: Cluster) -> None:
    url = url_of(fleet)
    admitted = fleet.gate(url, "one", *asked(NODES), "--hostfile-out", str(fleet.folder / "hosts"))
    assert (admitted.code, admitted.json["decision"]) == (0, "admit")
    assert (fleet.folder / "hosts").read_text().split() == list(NODES)
    assert all(node["evidence_age_seconds"] < 60 for node in admitted.json["nodes"])
    release(url, admitted.json["id"])
    said = fleet.healthd("fault", "set", "matmul@cpu:0=corrupt", "--run-dir", str(fleet.run_dir("n2")))
    assert said.code == 0
    fleet.aged("n2")
    rejected = fleet.gate(url, "two", *asked(NODES), "--max-age", "1s")
    assert (rejected.code, rejected.json["decision"]) == (75, "reject")
    first = rejected.json["reasons"][0]
    assert (first["node"], first["check"], first["target"], first["code"]) == ("n2", "matmul", "cpu:0", "WrongResult")
    assert first["injected"]
    some = fleet.gate(url, "three", *asked(NODES), "--min-nodes", "2")
    assert some.code == 0
    assert [node["node"] for node in some.json["nodes"]] == ["n1", "n3"]
    assert [node["node"] for node in some.json["excluded"]] == ["n2"]
    release(url, some.json["id"])
    pool = fleet.gate(url, "four", "--pool", "a", "--count", "2")
    assert pool.code == 0
    assert {node["node"] for node in pool.json["nodes"]} == {"n1", "n3"}
    for arguments in (("--pool", "b", "--count", "1"), ("--pool", "a", "--count", "4")):
        impossible = fleet.gate(url, f"five-{arguments[1]}", *arguments)
        assert (impossible.code, impossible.json["decision"]) == (1, "reject"), impossible
    usage = fleet.healthd("gate", "--aggregator", url, "--job", "six", "--count", "2")
    assert usage.code == 2
    assert "--count" in usage.line or "--node" in usage.line
    explained = fleet.healthd("fleet", "explain", "two", "--aggregator", url)
    assert "n2: WrongResult matmul cpu:0" in " ".join(explained.out.split())


@pytest.mark.thorough
def test_gate_holds_while_another_job_has_a_node_and_admits_after_the_release(fleet: Cluster) -> None:
    url = url_of(fleet)
    first = ask(url, "first", ["n1"], wait=10)
    assert first["decision"] == "admit"
    held = ask(url, "second", ["n1", "n2"])
    held = ask(url, "second", ["n1", "n2"], wait=0.5)
    assert held["decision"] == "hold"
    assert held["reasons"][0]["node"] == "n1"
    assert "job first attempt 0" in held["reasons"][0]["message"]
    release(url, first["id"])
    assert ask(url, "second", ["n1", "n2"], wait=10)["decision"] == "admit"
    expired = fleet.gate(url, "third", "--node", "n2", wait="1s")
    assert (expired.code, expired.json["decision"]) == (75, "reject")
    assert any("job second" in reason["message"] for reason in expired.json["reasons"])


@pytest.mark.thorough
def test_lease_with_a_process_ends_by_itself_when_the_process_does(fleet: Cluster) -> None:
    aggregator = fleet.services["aggregator"]
    job = fleet.job(fleet.folder / "n1.toml")  # it holds no device: the node goes by the process alone
    admitted = fleet.gate(aggregator.url, "process", "--node", "n1", "--workload", f"pid:{job.pid}")
    assert admitted.code == 0
    state = aggregator.get("/v1/nodes/n1").json()
    assert "process" in str(state)
    assert ask(aggregator.url, "after", ["n1"], wait=0.5)["decision"] == "hold"
    job.kill()
    job.wait()
    assert ask(aggregator.url, "after", ["n1"], wait=10)["decision"] == "admit"


@pytest.mark.thorough
def test_lost_answer_is_asked_for_again_and_is_the_same_decision(fleet: Cluster) -> None:
    url = url_of(fleet)
    first = ask(url, "lost", ["n1"], wait=10)
    again = ask(url, "lost", ["n1"], wait=10)
    assert again == first
    hook = fleet.gate(url, "lost", "--node", "n1", wait=f"{GATE_SECONDS:g}s")
    assert hook.code == 0
    assert hook.json["id"] == first["id"]
    other = fleet.gate(url, "lost", "--node", "n2", wait=f"{GATE_SECONDS:g}s")
    assert other.code == 2
    assert "lost" in other.line
    newer = ask(url, "lost", ["n1"], wait=10, attempt=1)
    assert newer["decision"] == "admit"
    assert newer["id"] != first["id"]


def test_quarantine_names_owner_and_reason_and_outlives_a_restart_and_a_time_out(fleet: Cluster) -> None:
    """Rival fault 19."""
    aggregator = fleet.services["aggregator"]
    url = aggregator.url
    said = fleet.healthd("fleet", "quarantine", "n1", "--reason", "link flaps", "--aggregator", url)
    assert said.code == 0, said.err
    for job in ("before", "restarted"):
        rejected = fleet.gate(url, job, *asked(("n1", "n2")))
        assert rejected.code == 75
        (out,) = rejected.json["excluded"]
        assert out["node"] == "n1"
        assert re.search(r"n1 is quarantined by \w+: link flaps", out["reasons"][0]["message"])
        timed_out = fleet.gate(url, f"{job}-only", "--node", "n1", wait="1s")
        assert timed_out.code == 75
        aggregator.kill()
        aggregator.start()
        until(lambda: aggregator.get("/v1/nodes/n2").json().get("health") == "healthy")
    assert fleet.healthd("fleet", "release", "n1", "--aggregator", url).code == 0
    assert fleet.gate(url, "free", *asked(("n1", "n2"))).code == 0


@pytest.mark.thorough
def test_observe_mode_admits_and_tells_what_it_would_have_said(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", config=AGGREGATOR + 'mode = "observe"\n')
    cluster.prove(0.5)
    cluster.aged("n1")
    said = cluster.gate(aggregator.url, "train", "--node", "n1", "--max-age", "1s")
    assert (said.code, said.json["decision"], said.json["would"]) == (0, "admit", "reject")
    assert any("proof" in reason["message"] for reason in said.json["reasons"])
    assert 'mode="observe"' in aggregator.get("/metrics").text


@pytest.mark.thorough
def test_override_admits_by_hand_and_shows(fleet: Cluster) -> None:
    aggregator = fleet.services["aggregator"]
    url = aggregator.url
    fleet.prove(0.5)
    fleet.aged("n1")
    assert fleet.gate(url, "override", "--node", "n1", "--max-age", "1s").code == 75
    words = ("--reason", "demo at ten", "--for", "1h", "--aggregator", url)
    assert fleet.healthd("override", "override", *words).code == 0
    said = fleet.gate(url, "override", "--attempt", "1", "--node", "n1", "--max-age", "1s")
    assert (said.code, said.json["decision"]) == (0, "admit")
    assert "demo at ten" in str(said.json["reasons"])
    assert "healthd_overrides_active 1.0" in aggregator.get("/metrics").text
    assert fleet.healthd("override", "override", *words, "--clear").code == 0
    assert "healthd_overrides_active 0.0" in aggregator.get("/metrics").text


@pytest.mark.thorough
def test_rival_fault_14_what_comes_up_after_the_daemon_is_found_without_a_restart(cluster: Cluster) -> None:
    """
    The part of the machine that the probes need is not there yet: their interpreter, on a file system mounted late.

    A CPU has no driver that could come up late; the daemon must find the devices all the same, by itself.
    """
    python = cluster.folder / "late" / "python"
    config = f'[probe]\npython = "{python}"\n'
    cluster.checks = ("matmul",)
    node = cluster.node("n1")
    file = cluster.folder / "n1.toml"
    file.write_text(file.read_text().replace("[probe]\n", config))
    python.parent.mkdir()
    # The catalogue of checks is read at the start, so the interpreter is there but cannot do anything on devices.
    python.write_text(f'#!/bin/sh\n[ -e "{cluster.folder}/up" ] && exec {sys.executable} "$@"\nexec {_plain()} "$@"\n')
    python.chmod(0o755)
    node.start()
    until(lambda: bool(node.get("/v1/node").json()["results"]))
    assert node.get("/v1/node").json()["health"] == "unknown"
    assert node.health() == 503
    (cluster.folder / "up").touch()
    cluster.healthy("n1")


def _plain() -> str:
    """An interpreter without torch: the one that the environment was made of."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
