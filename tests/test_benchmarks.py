"""The harness of the benchmarks; what they measure is never asserted here."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.contract import Status
from healthd.core.model import PROTOCOL, Lease, Order, SyncAnswer, SyncRequest
from healthd.core.wire import decode, encode
from tests import speed
from tests.aggregator.parts import result, spec, state
from tests.benchmarks.__main__ import BENCHES, main
from tests.benchmarks.bench_checks import active_results, union_seconds
from tests.benchmarks.bench_collectives import busbw_bytes_per_second
from tests.benchmarks.figures import SHORT, WHOLE, Bench, Figure, Reading, Scale, measure, verdict
from tests.benchmarks.localize.__main__ import main as localize
from tests.benchmarks.localize.__main__ import rows
from tests.benchmarks.processes import children, free_port, memory_bytes, own_cpu_seconds, service
from tests.benchmarks.simulated import SimulatedNode
from tests.every import every
from tests.patience import PATIENCE


@pytest.fixture(autouse=True)
def unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit of time is given, so that the harness does not measure it."""
    monkeypatch.setenv(speed.VARIABLE, "1.0")


FAST = Figure(name="fast", what="a trivial thing", unit="seconds", upper=1.0)
SLOW = Figure(name="slow", what="a slow thing", unit="seconds", upper=1.0)
SHARE = Figure(name="share", what="a share", unit="ratio", lower=0.95, upper=1.05)
PLAIN = Figure(name="plain", what="shown for its own sake", unit="bytes")


def trivial(_: Scale) -> Iterator[Reading]:
    yield Reading(figure="fast", value=0.25, ratio=0.5, beside="another thing", note="n=1")
    yield Reading(figure="slow", value=1.25)
    yield Reading(figure="share", value=float("nan"))
    yield Reading(figure="plain", value=1e6)


def failing(_: Scale) -> Iterator[Reading]:
    yield Reading(figure="fast", value=0.25)
    raise RuntimeError("the thing broke")


TRIVIAL = Bench(name="trivial", figures=(FAST, SLOW, SHARE, PLAIN), run=trivial, limit_seconds=5)
FAILING = Bench(name="failing", figures=(FAST, SLOW), run=failing, limit_seconds=5)


def test_every_figure_to_reach_is_there_with_its_aim() -> None:
    aims = {figure.name: (figure.lower, figure.upper) for bench in BENCHES for figure in bench.figures}
    assert (
        aims.items()
        >= {
            "passive_round": (None, 0.072),
            "passive_command": (None, 0.2),
            "neuron_passive_round": (None, 0.25),
            "quick_command": (None, 1.0),  # of 2.5 imports of torch and the measuring itself
            "daemon_memory": (None, 60e6),
            "daemon_cpu": (None, 0.002),
            "health_p99": (None, 0.005),
            "gate_10000": (None, 0.015),
            "gate_10000_postgresql": (None, 0.025),
            "sync_processor": (None, 0.25e-3),
            "node_memory": (None, 45e3),
            "bad_500": (None, 3.5),
            "flood_http_600": (None, 2.0),
            "flood_tls_20000": (None, 2.0),
            "flood_silent_nodes": (None, 0),
            "flood_log_lines": (None, 19),
            "postmortem_64": (None, 10.0),
            "postmortem_64_probes": (None, 60.0),
            "screening_plan": (None, 0.05),
            "hung_check": (None, 2.2),
            "hung_collective": (None, 10.0),
            "busbw_all_gather": (0.95, 1.05),
            "busbw_all_reduce": (0.95, 1.05),
            "busbw_reduce_scatter": (0.95, 1.05),
        }.items()
    )


def test_names_are_unique_and_each_bench_is_bounded() -> None:
    figures = [figure.name for bench in BENCHES for figure in bench.figures]
    assert len(set(figures)) == len(figures)
    assert all(0 < bench.limit_seconds <= 1500 for bench in BENCHES)


def test_a_trivial_bench_gives_one_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "b.json")], benches=(TRIVIAL,)) == 1  # NaN: not measured
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("figure", "aim", "measured", "ratio", "verdict", "250 ms", "0.50 x"))
    written = json.loads((tmp_path / "b.json").read_text())
    verdicts = {figure["name"]: figure["verdict"] for figure in written["figures"]}
    assert verdicts == {"fast": "met", "slow": "missed", "share": "unknown", "plain": "shown"}


def test_only_what_is_asked_for_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "slow", "--list"], benches=(TRIVIAL, FAILING)) == 0
    assert capsys.readouterr().out.splitlines() == ["trivial: fast, slow, share, plain", "failing: fast, slow"]
    assert main(["--only", "trivial", "--list"], benches=(TRIVIAL, FAILING)) == 0
    assert capsys.readouterr().out.splitlines() == ["trivial: fast, slow, share, plain"]


def test_a_name_that_matches_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--only", "trivail"], benches=(TRIVIAL,))
    assert end.value.code == 2
    assert "trivail" in capsys.readouterr().err


def test_what_could_not_be_measured_is_unknown_never_met() -> None:
    fast, slow = measure(FAILING)
    assert verdict(FAST, fast) == "met"
    assert verdict(SLOW, slow) == "unknown"
    assert slow.note == "RuntimeError: the thing broke"


def test_a_bench_that_hangs_is_ended_by_its_limit() -> None:
    def hang(_: Scale) -> Iterator[Reading]:
        time.sleep(30 * PATIENCE)
        yield Reading(figure="fast", value=0.1)

    began = time.monotonic()
    (reading,) = measure(Bench(name="hangs", figures=(FAST,), run=hang, limit_seconds=0.1))
    assert time.monotonic() - began < 5 * PATIENCE
    assert (reading.value, reading.note) == (None, "TimeoutError: not done in 0.1 s")


@every(
    ("figure", "value", "expected"),
    [
        (SHARE, 0.95, "met"),
        (SHARE, 0.94, "missed"),
        (SHARE, 1.06, "missed"),
        (FAST, 1.0, "met"),
        (FAST, float("inf"), "unknown"),
        (FAST, None, "unknown"),
    ],
)
def test_verdicts(figure: Figure, value: float | None, expected: str) -> None:
    assert verdict(figure, Reading(figure=figure.name, value=value)) == expected


def test_spans_that_overlap_count_once() -> None:
    assert union_seconds([(10.0, 2.0), (11.0, 2.0), (11.5, 0.5), (20.0, 1.0)]) == 4.0
    assert union_seconds([]) == 0.0


def test_bandwidths_by_the_definitions_of_nccl_tests() -> None:
    assert busbw_bytes_per_second("all_reduce", 8_000_000, 4, 0.5) == pytest.approx(16e6 * 1.5)
    assert busbw_bytes_per_second("all_gather", 8_000_000, 4, 0.5) == pytest.approx(16e6 * 0.75)
    assert busbw_bytes_per_second("reduce_scatter", 8_000_000, 4, 0.5) == pytest.approx(16e6 * 0.75)


def test_a_short_run_says_whether_each_figure_can_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = []

    def measurable(scale: Scale) -> Iterator[Reading]:
        scales.append(scale)
        yield Reading(figure="slow", value=1.25)  # misses its aim, which matters in a whole run alone

    bench = Bench(name="measurable", figures=(SLOW,), run=measurable, limit_seconds=5)
    assert main(["--short", "--json", str(tmp_path / "b.json")], benches=(bench,)) == 0
    assert main(["--short"], benches=(bench, FAILING)) == 1
    assert main([], benches=(bench,)) == 1
    assert scales == [SHORT, SHORT, WHOLE]
    written = json.loads((tmp_path / "b.json").read_text())
    assert (written["short"], written["figures"][0]["verdict"]) == (True, "measured")
    assert "RuntimeError: the thing broke" in " ".join(capsys.readouterr().out.split())


def test_what_needs_root_is_skipped_without_and_must_be_measured_with() -> None:
    bench = Bench(name="nets", figures=(FAST, SLOW), run=failing, limit_seconds=5, needs_root=True)
    without = measure(bench, root=False)
    assert [(verdict(FAST, one), one.note) for one in without] == [("skipped", "nets needs root")] * 2
    assert [verdict(FAST, one) for one in measure(bench, root=True)] == ["met", "unknown"]


def test_what_does_not_apply_here_is_no_failure_of_the_quick_figure() -> None:
    ran = [f"probe_{number}" for number in range(8)]
    specs = tuple(spec(name) for name in (*ran, "nccom"))
    results = tuple(result(name) for name in ran)
    skipped = result("nccom", status=Status.SKIP)
    node = state("n1", checks=specs, results=(*results, skipped))
    assert [one.check for one in active_results(node)] == ran
    unknown = result("nccom", status=Status.UNKNOWN)
    with pytest.raises(RuntimeError, match="not measured: nccom"):
        active_results(state("n1", checks=specs, results=(*results, unknown)))
    with pytest.raises(RuntimeError, match="7 active checks"):
        active_results(state("n1", checks=specs, results=(*results[1:], skipped)))


def test_a_simulated_node_says_and_heeds_what_the_product_does() -> None:
    """Its JSON is put together from pieces, so a member that the product renames must show here."""
    node = SimulatedNode("node-7", 0, 10.0)
    first = decode(node.body(full=True), SyncRequest, what="sync")
    assert first.state is not None
    assert (first.protocol, first.state.node, first.state.leases) == (PROTOCOL, "node-7", ())
    lease = Lease(
        id="l1",
        gate="g1",
        job="j",
        attempt=0,
        issuer="db",
        workload=None,
        grace_seconds=60.0,
        max_seconds=600.0,
        age_seconds=0.0,
    )
    order = Order(id="l1", kind="lease", deadline_seconds=30.0, lease=lease)
    node.heed(encode(_answer(order)))
    second = decode(node.body(full=True), SyncRequest, what="sync")
    assert second.state is not None
    assert (second.last_answer, second.orders["l1"].status) == ("a1", "accepted")
    assert [one.id for one in second.state.leases] == ["l1"]
    node.heed(encode(_answer(dataclasses.replace(order, withdrawn=True), acknowledged=("l1",))))
    third = decode(node.body(full=False), SyncRequest, what="sync")
    assert (third.state, third.orders["l1"].status) == (None, "cancelled")


def _answer(*orders: Order, acknowledged: tuple[str, ...] = ()) -> SyncAnswer:
    return SyncAnswer(
        answer="a1",
        seq=1,
        issuer="db",
        orders=orders,
        acknowledged=acknowledged,
        send_all=False,
        retry_after_seconds=1.0,
    )


def test_a_short_localisation_fails_where_not_every_fleet_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in rows() if row.kind == "always" and row.members == 4)
    assert localize(["--short"], [row]) == 0
    assert "50 fleets" in capsys.readouterr().out
    missed = dataclasses.replace(row, rounds=0)
    assert localize(["--short"], [missed]) == 1
    assert "always, 4 members, 1 culprits" in capsys.readouterr().err
    assert localize(["--scale", "0.01"], [missed]) == 1
    share = dataclasses.replace(row, exact=0.99, right=lambda fleet, _: fleet.seed % 20 > 0)
    assert localize(["--short"], [share]) == 0, "chance misses a share by that much"
    half = dataclasses.replace(row, exact=0.99, right=lambda fleet, _: fleet.seed % 2 > 0)
    assert localize(["--short"], [half]) == 1


def test_a_row_without_an_aim_says_shown_and_every_aim_can_be_missed(capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in rows() if row.kind == "always" and row.members == 4)
    shown = dataclasses.replace(row, rounds=None, exact=0.0, right=lambda *_: False)
    assert localize(["--scale", "0.01"], [shown]) == 0
    assert "| shown |" in capsys.readouterr().out
    assert [row.name for row in rows() if row.false > 0.05] == []


SERVER = """
import http.server, sys
class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Quiet).serve_forever()
"""


def test_a_service_is_measured_and_gone_afterwards(tmp_path: Path, port: int) -> None:
    argv = (sys.executable, "-S", "-c", SERVER, str(port))
    with service(argv, port, tmp_path / "s") as it:
        assert it.start_seconds > 0
        assert own_cpu_seconds(it.pid) > 0
        assert memory_bytes(it.pid, "Pss") <= memory_bytes(it.pid)
        assert any(str(port) in line for line in children(os.getpid()))
        assert it.connection().timed_get("/livez")[1] == 200
    assert not any(str(port) in line for line in children(os.getpid()))


def test_a_service_that_does_not_start_says_why(tmp_path: Path, port: int) -> None:
    argv = (sys.executable, "-S", "-c", "raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match="no such thing"), service(argv, port, tmp_path / "s"):
        pass


@pytest.fixture
def port() -> int:
    return free_port()
