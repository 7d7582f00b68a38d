"""The harness of the benchmarks; what they measure is never asserted here."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import BENCHES, main
from tests.benchmarks.bench_checks import union_seconds
from tests.benchmarks.bench_collectives import busbw_bytes_per_second
from tests.benchmarks.bench_fleet import gate_times
from tests.benchmarks.figures import Bench, Figure, Reading, measure, verdict
from tests.benchmarks.processes import children, memory_bytes, own_cpu_seconds, service

FAST = Figure(name="fast", what="a trivial thing", unit="seconds", upper=1.0)
SLOW = Figure(name="slow", what="a slow thing", unit="seconds", upper=1.0)
SHARE = Figure(name="share", what="a share", unit="ratio", lower=0.95, upper=1.05)
PLAIN = Figure(name="plain", what="shown for its own sake", unit="bytes")


def trivial() -> Iterator[Reading]:
    yield Reading(figure="fast", value=0.25, ratio=0.5, beside="another thing", note="n=1")
    yield Reading(figure="slow", value=1.25)
    yield Reading(figure="share", value=float("nan"))
    yield Reading(figure="plain", value=1e6)


def failing() -> Iterator[Reading]:
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
            "neuron_passive_round": (None, 0.25),
            "quick_command": (None, 1.0),  # of 2.5 imports of torch and the measuring itself
            "daemon_memory": (None, 60e6),
            "daemon_cpu": (None, 0.002),
            "health_p99": (None, 0.005),
            "gate_10000": (None, 0.020),
            "hung_check": (None, 2.2),
            "busbw_all_gather": (0.95, 1.05),
            "busbw_all_reduce": (0.95, 1.05),
            "busbw_reduce_scatter": (0.95, 1.05),
        }.items()
    )


def test_names_are_unique_and_each_bench_is_bounded() -> None:
    figures = [figure.name for bench in BENCHES for figure in bench.figures]
    assert len(set(figures)) == len(figures)
    assert all(0 < bench.limit_seconds <= 120 for bench in BENCHES)


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
    def hang() -> Iterator[Reading]:
        time.sleep(30)
        yield Reading(figure="fast", value=0.1)

    began = time.monotonic()
    (reading,) = measure(Bench(name="hangs", figures=(FAST,), run=hang, limit_seconds=0.1))
    assert time.monotonic() - began < 5
    assert (reading.value, reading.note) == (None, "TimeoutError: not done in 0.1 s")


@pytest.mark.parametrize(
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


def test_the_output_of_the_gate_program_is_read_or_the_figure_is_unknown() -> None:
    text = (
        "nodes 10000, joined in 9.1 s; gates of 64: 99 in 15 s\n"
        "                                         p50       p99       max\n"
        "gate up to its leases on disk, ms        7.5      13.0      14.5\n"
        "gate as its caller sees it, ms          41.0      80.5     101.0\n"
        "syncs 1000/s; aggregator: 55% of one core, 400 MB; nodes lost: 0\n"
    )
    grant, whole = gate_times(text)
    assert grant == pytest.approx({"p50": 0.0075, "p99": 0.013, "max": 0.0145})
    assert whole["p99"] == pytest.approx(0.0805)
    with pytest.raises(RuntimeError, match="did not print"):
        gate_times("nothing of the kind")


SERVER = """
import http.server, sys
class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Quiet).serve_forever()
"""


def test_a_service_is_measured_and_gone_afterwards(tmp_path: Path, free_port: int) -> None:
    argv = (sys.executable, "-S", "-c", SERVER, str(free_port))
    with service(argv, free_port, tmp_path / "s") as it:
        assert it.start_seconds > 0
        assert own_cpu_seconds(it.pid) > 0
        assert memory_bytes(it.pid, "Pss") <= memory_bytes(it.pid)
        assert any(str(free_port) in line for line in children(os.getpid()))
        assert it.connection().timed_get("/livez")[1] == 200
    assert not any(str(free_port) in line for line in children(os.getpid()))


def test_a_service_that_does_not_start_says_why(tmp_path: Path, free_port: int) -> None:
    argv = (sys.executable, "-S", "-c", "raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match="no such thing"), service(argv, free_port, tmp_path / "s"):
        pass


@pytest.fixture
def free_port() -> int:
    from tests.benchmarks.processes import free_port

    return free_port()
