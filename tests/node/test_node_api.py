"""The node's TCP port over real HTTP: health, readiness, metrics and what people ask wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Scope, Status, Tier
from healthd.core import wire
from healthd.core.errors import BadInputError
from healthd.core.evidence import reason
from healthd.core.http import server
from healthd.core.http.server import exposition
from healthd.core.model import NodeState
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.http.health import parse_demand
from healthd.node.http.metrics import registry_of
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.state.store import NodeStore
from tests.node.node_api_kit import healthy, node
from tests.node.node_kit import (
    MovedClock,
    finding,
    info,
    lease,
    measured,
    result,
    run,
    settings,
    survey,
)


@contextlib.asynccontextmanager
async def served(book: NodeStore) -> AsyncIterator[httpx.AsyncClient]:
    sock = server.bind("127.0.0.1:0")
    async with (
        server.Server(NodeApi(book), [sock], limits=server.Limits(stop_seconds=0.1)),
        httpx.AsyncClient(base_url=f"http://{server.address_of(sock)}", trust_env=False, verify=False) as http,
    ):
        yield http


def ask(book: NodeStore, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with served(book) as http:
            return await http.request(method, path, **more)

    return run(main())


# --- /health ----------------------------------------------------------------------------------------------------------


def test_health_is_503_before_the_first_check_and_200_after(tmp_path: Path) -> None:
    answer = ask(node(tmp_path), "/health")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/health+json")
    assert answer.json()["output"].endswith("has not run yet")
    assert ask(node(tmp_path), "/health?verbose").json()["checks"]["matmul"][0]["status"] == "fail"
    answer = ask(healthy(tmp_path), "/health")
    assert (answer.status_code, answer.json()["status"], answer.json()["health"]) == (200, "pass", "healthy")
    assert answer.json()["expiresAt"] == "2023-11-14T22:31:35Z"  # disk expires first, 95 s after it ran


def test_health_shows_each_number_under_its_name_with_its_unit(tmp_path: Path) -> None:
    checks = ask(healthy(tmp_path), "/health?verbose").json()["checks"]
    assert checks["matmul:flops_per_second"] == [
        {
            "componentId": "cpu:0",
            "status": "pass",
            "time": "2023-11-14T22:30:00Z",
            "observedValue": 2e11,
            "observedUnit": "FLOP/s",
            "labels": {"dtype": "fp32"},
        }
    ]
    assert "disk" not in checks  # it does not concern this node


@pytest.mark.parametrize(
    ("status", "code", "word"),
    [(Status.WARN, 200, "warn"), (Status.UNKNOWN, 503, "fail"), (Status.FAIL, 503, "fail")],
)
def test_warn_is_200_and_unknown_is_fail(tmp_path: Path, status: Status, code: int, word: str) -> None:
    book = healthy(tmp_path)
    book.record(result("load", finding(status)))
    answer = ask(book, "/health")
    assert (answer.status_code, answer.json()["status"]) == (code, word)
    assert ask(book, "/health?verbose").json()["checks"]["load"][0]["status"] == word


def test_job_suspends_evidence_and_who_asks_with_a_demand_gets_the_strict_answer(tmp_path: Path) -> None:
    time = MovedClock()
    book = healthy(tmp_path, time)
    book.set_survey(survey(holders=("cpu:0: pid 7 (python)",)))
    time.move(3 * 3600)
    book.record(result("disk", finding(Status.SKIP, "NotApplicable")))
    book.record(result("load"))
    answer = ask(book, "/health?verbose")
    assert (answer.status_code, answer.json()["counts"]) == (200, {"skip": 1, "pass": 1, "suspended": 1, "notRun": 1})
    said = answer.json()["checks"]["matmul:flops_per_second"][0]["output"]
    assert said == "suspended while cpu:0: pid 7 (python) uses the devices, 3.0 h old"
    strict = ask(book, "/health?tier=quick&max_age=60")
    assert (strict.status_code, strict.json()["demand"]) == (503, {"tier": "quick", "max_age_seconds": 60.0})
    strict = ask(book, "/health?tier=quick&max_age=60&verbose")
    assert strict.json()["checks"]["matmul:flops_per_second"][0]["output"] == "stale, 3.0 h old"
    assert ask(book, "/health?tier=quick&max_age=4h").status_code == 200


def many_devices(folder: Path, status: Status) -> NodeStore:
    """A node of 32 devices with 20 checks on each of them."""
    named = {f"check_{number:02}": info(f"check_{number:02}", Tier.QUICK, scope=Scope.DEVICE) for number in range(20)}
    chosen = enabled_checks(named, settings(folder))
    book = node(folder, chosen=chosen)
    for spec in chosen:
        each = [finding(status, target=f"cpu:{device}") for device in range(32)]
        book.record(result(spec.name, *each, tier=Tier.QUICK))
    return book


def test_health_of_a_large_node_is_short_and_verbose_has_every_finding(tmp_path: Path) -> None:
    answer = ask(many_devices(tmp_path, Status.PASS), "/health", headers={"User-Agent": "curl/7.88.1"})
    assert len(answer.content) < 1000
    assert answer.json()["counts"] == {"pass": 20}
    whole = ask(many_devices(tmp_path, Status.PASS), "/health?verbose").json()
    assert sum(map(len, whole["checks"].values())) == 20 * 32
    bad = ask(many_devices(tmp_path, Status.FAIL), "/health").json()
    assert (len(bad["reasons"]), bad["reasonsLeftOut"], bad["counts"]) == (16, 20 * 32 - 16, {"fail": 20})


def test_health_is_indented_for_a_person_who_types_curl_and_for_nobody_else(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    seen = ask(book, "/health", headers={"User-Agent": "curl/7.88.1"})
    assert seen.text.startswith('{\n  "status": "pass",\n  "serviceId": "n1",\n')
    assert seen.text.endswith("}\n")
    told = ask(book, "/health", headers={"User-Agent": "curl/7.88.1", "Accept": "application/json"})
    assert told.text.count("\n") == 0
    assert told.json() == seen.json() == ask(book, "/health").json()
    assert seen.headers["vary"] == "accept, user-agent"


def test_injected_results_are_marked(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    book.set_faults(("matmul=fail",))
    book.record(result("matmul", finding(Status.FAIL), injected=True))
    body = ask(book, "/health?verbose").json()
    assert body["injectedFaults"] == ["matmul=fail"]
    assert body["checks"]["matmul"][0]["injected"] is True


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("tier=fast", "tier='fast' is not a tier; choose from: passive, quick, deep, soak"),
        ("max_age=soon", "max_age: 'soon' is not a duration; write 2s, 10m or 1h"),
        ("max_age=-1", "is not a duration"),
        ("max_age=nan", "is not a duration"),
        ("maxage=10", "unknown query parameter 'maxage'; /health has: tier, max_age, verbose"),
        ("tier=quick&tier=deep", "tier is given 2 times"),
        ("&".join(f"a{n}=1" for n in range(40)), "the query cannot be read"),
        ("tier=%ff", "the query cannot be read"),
    ],
)
def test_question_that_makes_no_sense_is_a_400_in_one_sentence(tmp_path: Path, query: str, said: str) -> None:
    answer = ask(healthy(tmp_path), f"/health?{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert said in answer.json()["detail"]


def test_ages_are_written_as_seconds_or_durations() -> None:
    assert parse_demand({"max_age": ["10m"]}) == parse_demand({"max_age": ["600"]})
    assert parse_demand({}) is None
    with pytest.raises(BadInputError):
        parse_demand({"max_age": ["inf"]})


# --- the other paths --------------------------------------------------------------------------------------------------


def test_livez_says_nothing_about_devices(tmp_path: Path) -> None:
    answer = ask(node(tmp_path), "/livez")
    assert (answer.status_code, answer.text) == (200, "ok\n")


def test_readyz_says_why_not_in_words(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    assert ask(book, "/readyz").text == "n1 is ready\n"
    book.set_leases(((lease(), 1000.0),))
    answer = ask(book, "/readyz")
    assert answer.status_code == 503
    assert answer.text == "allocated: taken by job train attempt 0 (gate g1)\nn1 is not ready\n"
    assert ask(book, "/readyz?exclude=allocated").status_code == 200
    book.set_leases(())
    book.record(result("load", finding(Status.FAIL)))
    assert ask(book, "/readyz").text.startswith("load: load node: it is fail")
    verbose = ask(book, "/readyz?verbose").text
    assert "[+] matmul ok\n" in verbose
    assert "[-] load failed: load node: it is fail\n" in verbose
    assert "[ ] load excluded\n" in ask(book, "/readyz?verbose&exclude=load").text
    assert ask(book, "/readyz?exclude=load").status_code == 200
    assert ask(book, "/readyz?exclude=nonsense").status_code == 400


def test_readyz_and_health_tell_one_truth(tmp_path: Path) -> None:
    book = node(tmp_path)  # nothing has run yet
    assert (ask(book, "/health").status_code, ask(book, "/readyz").status_code) == (503, 503)
    lines = ask(book, "/readyz?verbose").text
    assert "[-] matmul failed: " in lines
    assert "[+] health" not in lines
    assert "[!] health unknown: " in lines
    assert "[+] health ok\n" in ask(healthy(tmp_path), "/readyz?verbose").text


def test_readyz_calls_ok_what_has_passed_and_nothing_else(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    lines = ask(book, "/readyz?verbose").text.splitlines()
    assert "[ ] disk not applicable: it is skip" in lines, "skipped"
    assert "[ ] burn has not run" in lines
    assert {line for line in lines if line.endswith(" ok")} == {
        *("[+] load ok", "[+] matmul ok", "[+] health ok", "[+] allocated ok", "[+] leases ok", "[+] quarantine ok")
    }
    book.record(result("load", finding(Status.WARN)))
    lines = ask(book, "/readyz?verbose").text.splitlines()
    assert "[!] load warn LowMemory: it is warn" in lines
    assert lines[-2] == "n1 is ready"
    assert set(re.findall(r"\[.\]", "".join(lines[:-2]))) <= set(re.findall(r"\[.\]", lines[-1])), "each is explained"
    assert ask(book, "/readyz").text == "n1 is ready\n", "who does not ask for signs gets none"


def test_accusation_by_a_validation_is_a_warning_and_no_obstacle(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    book.set_accused(reason("CollectiveFault", "gate g-1 of job train: n1 fails with n2", status=Status.WARN))
    answer = ask(book, "/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "warn")
    assert [(one["code"], "gate g-1" in one["message"]) for one in answer.json()["reasons"]] == [
        ("CollectiveFault", True)
    ]
    ready = ask(book, "/readyz")
    assert (ready.status_code, "CollectiveFault: gate g-1" in ready.text) == (200, True)
    assert "[!] accused CollectiveFault" in ask(book, "/readyz?verbose").text
    book.set_accused(None)
    assert ask(book, "/health").json()["reasons"] == []


def test_state_travels_whole(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    assert wire.decode(ask(book, "/v1/node").content, NodeState, what="state") == book.snapshot()
    assert [one["name"] for one in ask(book, "/v1/checks").json()["checks"]] == ["disk", "load", "matmul", "burn"]


def test_results_of_a_check_and_the_nearest_name_for_one_that_is_not(tmp_path: Path) -> None:
    body = ask(healthy(tmp_path), "/v1/results/load").json()
    assert (body["check"], body["current"]["status"], len(body["results"])) == ("load", "pass", 1)
    answer = ask(healthy(tmp_path), "/v1/results/matmull")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "no check 'matmull' is enabled on n1; did you mean 'matmul'?"


def test_head_works_and_unknown_paths_and_methods_are_problems(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    answer = ask(book, "/health", "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")
    answer = ask(book, "/healthz")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert "this daemon has no path" in answer.json()["detail"], "to whoever took it for the aggregator"
    assert "/health, /livez" in answer.json()["detail"]
    assert ask(book, "/").status_code == 404
    answer = ask(book, "/health", "POST")
    assert (answer.status_code, answer.headers["content-type"]) == (405, "application/problem+json")


def test_body_is_bounded_and_half_a_body_holds_nobody_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(healthy(tmp_path)) as http:
            answer = await http.request("GET", "/health", content=b"x" * 100_000)
            assert (answer.status_code, answer.headers["connection"]) == (413, "close")
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nhalf")
            assert (await asyncio.wait_for(reader.read(15), 2)).startswith(b"HTTP/1.1 200")
            writer.close()
            assert (await http.get("/livez")).status_code == 200

    run(main())


# --- /metrics ---------------------------------------------------------------------------------------------------------


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_rival_fault_10_unknown_is_visible_as_itself(tmp_path: Path) -> None:
    found = samples(ask(node(tmp_path), "/metrics").text)
    assert found['healthd_node_health{health="unknown"}'] == 1
    assert found['healthd_node_health{health="healthy"}'] == 0
    assert found['healthd_check_status{check="matmul",status="unknown"}'] == 1
    assert found['healthd_check_status{check="matmul",status="pass"}'] == 0
    never = 'check="matmul",injected="false",reason="NotYetRun",status="unknown",target="node"'
    assert found[f"healthd_finding{{{never}}}"] == 1


def test_metrics_tell_what_health_tells(tmp_path: Path) -> None:
    book = healthy(tmp_path)
    found = samples(ask(book, "/metrics").text)
    assert found['healthd_node_health{health="healthy"}'] == 1
    assert found["healthd_node_allocated"] == 0
    assert found['healthd_check_runs_total{status="pass"}'] == 2
    assert found['healthd_device_matmul_flops_per_second{device="cpu:0",dtype="fp32"}'] == 2e11
    assert found['healthd_check_last_run_timestamp_seconds{check="load"}'] == 1_700_001_000
    assert found["healthd_probe_device_seconds_total"] == 0
    assert not [name for name in found if "_created" in name]


def test_openmetrics_is_given_to_who_asks_for_it(tmp_path: Path) -> None:
    accept = "application/openmetrics-text;version=1.0.0"
    answer = ask(healthy(tmp_path), "/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    plain = ask(healthy(tmp_path), "/metrics")
    assert plain.headers["content-type"].startswith("text/plain")


def large(folder: Path) -> NodeStore:
    """32 cores with 30 checks, each speed and size measured, and more faults than anybody wants to see."""
    names = ["matmul", "memory", "all_gather", "all_reduce", "reduce_scatter"]
    catalogue = {name: info(name, Tier.QUICK, scope=Scope.DEVICE) for name in names}
    catalogue |= {f"check_{number}": info(f"check_{number}") for number in range(25)}
    book = node(folder, chosen=enabled_checks(catalogue, settings(folder)))
    cores = [f"neuroncore:{number}" for number in range(32)]
    book.record(
        result(
            "matmul", *(measured("matmul_flops_per_second", 1.0, c, dtype=d) for c in cores for d in ("fp32", "bf16"))
        )
    )
    book.record(result("memory", *(measured("memory_bandwidth_bytes_per_second", 1.0, core) for core in cores)))
    for op in names[2:]:
        numbers = [
            measured(f"{op}_{kind}", 1.0, size_bytes=str(size))
            for size in (1024, 2**20, 2**23)
            for kind in ("busbw_bytes_per_second", "duration_seconds", "algbw_bytes_per_second")
        ]
        book.record(result(op, *numbers))
    for number in range(25):
        faults = [finding(Status.FAIL if number == 24 else Status.WARN, target=core) for core in cores]
        book.record(result(f"check_{number}", *faults))
    return book


def test_findings_of_a_drill_are_marked_and_hide_no_real_ones(tmp_path: Path) -> None:
    """More targets fail by injected faults than findings have series; the one that is real is among them."""
    catalogue = {name: info(name) for name in ("a_drill", "z_real")}
    book = node(tmp_path, chosen=enabled_checks(catalogue, settings(tmp_path)))
    faults = [finding(Status.FAIL, target=f"cpu:{number}") for number in range(60)]
    book.record(dataclasses.replace(result("a_drill", *faults), injected=True))
    book.record(result("z_real", finding(Status.FAIL, target="cpu:7")))
    found = [name for name in samples(ask(book, "/metrics").text) if 'status="fail"' in name]
    assert [name for name in found if 'injected="false"' in name] == [
        'healthd_finding{check="z_real",injected="false",reason="WrongResult",status="fail",target="cpu:7"}'
    ]
    assert len([name for name in found if 'injected="true"' in name]) == 47


def test_at_most_500_series_at_32_cores_and_the_worst_findings_are_kept(tmp_path: Path) -> None:
    found = samples(ask(large(tmp_path), "/metrics").text)
    assert len(found) <= 500
    findings = [name for name in found if name.startswith("healthd_finding{")]
    assert len(findings) == 48
    assert sum('status="fail"' in name for name in findings) == 32
    assert found["healthd_findings_dropped"] == 25 * 32 - 48
    assert len([name for name in found if name.startswith("healthd_collective_")]) == 18


@pytest.mark.system("promtool")
@pytest.mark.parametrize("make", [node, healthy, large])
def test_promtool_is_content(tmp_path: Path, make: Any) -> None:
    text, _ = exposition(registry_of(make(tmp_path), {}), "text/plain")
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    assert done.stderr == b""
