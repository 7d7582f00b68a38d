"""Programs as checks: what they print and how they end, with real processes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Finding, Program, Status
from checks.host.machine import Completed
from checks.programs import MAX_PERFDATA, make_program_check, parse_perfdata, read_monitoring, read_npd
from tests.every import every
from tests.patience import PATIENCE

PLUGINS = Path("/usr/lib/nagios/plugins")


@pytest.fixture
def run_program(context: Callable[..., Any]) -> Callable[..., Finding]:
    """Run a program as a check; the one finding."""

    def run(*argv: str, protocol: str = "monitoring", timeout_seconds: float = 10.0) -> Finding:
        check = make_program_check("probe", Program(command=argv, protocol=protocol, timeout_seconds=timeout_seconds))
        (finding,) = check(context(check))
        assert isinstance(finding, Finding)
        return finding

    return run


def shell(script: str) -> tuple[str, str, str]:
    return ("sh", "-c", script)


# --- the protocols ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (0, Status.PASS, None),
        (1, Status.WARN, "ProgramFailed"),
        (2, Status.FAIL, "ProgramFailed"),
        (3, Status.UNKNOWN, "NoData"),
    ],
)
def test_monitoring_plugin_is_believed_by_its_exit_code(
    code: int, status: Status, reason: str | None, run_program: Any
) -> None:
    finding = run_program(*shell(f"echo 'FANS 3 turn | fans=3;;;0;'; exit {code}"))
    assert (finding.status, finding.reason, finding.message) == (status, reason, "FANS 3 turn")
    assert [(item.name, item.value) for item in finding.measurements] == [("probe_fans", 3.0)]


@pytest.mark.parametrize(
    ("code", "status"), [(0, Status.PASS), (1, Status.FAIL), (2, Status.UNKNOWN), (3, Status.UNKNOWN)]
)
def test_node_problem_detector_plugin_is_believed_by_its_exit_code(code: int, status: Status, run_program: Any) -> None:
    finding = run_program(*shell(f"echo 'ntp is'; echo 'running'; exit {code}"), protocol="npd")
    assert finding.status is status
    assert finding.message == "ntp is running"


@pytest.mark.parametrize("protocol", ["monitoring", "npd"])
def test_good_end_without_a_word_is_unknown_never_a_pass(protocol: str, run_program: Any) -> None:
    """Rival fault 2."""
    for script in ("exit 0", "echo", "printf '  \\n'"):
        finding = run_program(*shell(script), protocol=protocol)
        assert (finding.status, finding.reason) == (Status.UNKNOWN, "NoData")


@pytest.mark.parametrize("protocol", ["monitoring", "npd"])
@pytest.mark.parametrize("script", ["echo fine; kill -9 $$", "echo fine; kill -SEGV $$", "echo fine; exit 137"])
def test_killed_program_is_unknown_whatever_it_said(script: str, protocol: str, run_program: Any) -> None:
    """Rival fault 3."""
    assert run_program(*shell(script), protocol=protocol).status is Status.UNKNOWN


def test_signal_is_named_with_the_last_words() -> None:
    finding = read_monitoring("probe", Completed(-11, "fine", "first\ncannot open bus\n"))
    assert finding.reason == "Crashed"
    assert "signal 11" in finding.message
    assert "cannot open bus" in finding.message


@pytest.mark.parametrize("code", [4, 126, 127, 137, 255])
def test_exit_code_beyond_the_protocol_is_unknown_and_named(code: int) -> None:
    for read in (read_monitoring, read_npd):
        finding = read("probe", Completed(code, "", ""))
        assert finding.status is Status.UNKNOWN
        assert str(code) in finding.message


def test_only_the_first_line_of_a_monitoring_plugin_is_the_message(run_program: Any) -> None:
    assert run_program(*shell("echo first; echo second")).message == "first"


def test_program_that_is_missing_is_unknown_with_a_remedy(run_program: Any) -> None:
    finding = run_program("/no/such/program")
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")
    assert "/no/such/program" in finding.message


def gone(pid: int) -> bool:
    """Whether a process is no more, or a corpse that its new parent has not buried yet."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_program_that_hangs_ends_in_time_with_all_its_children(tmp_path: Path, run_program: Any) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ > {pids}; sleep 60 & echo $! >> {pids}; wait"
    start = time.monotonic()
    finding = run_program(*shell(script), timeout_seconds=1.0)
    assert time.monotonic() - start < 5 * PATIENCE
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "Timeout")
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_grandchild_that_keeps_the_pipe_is_not_waited_for_and_is_ended(tmp_path: Path, run_program: Any) -> None:
    pids = tmp_path / "pids"
    start = time.monotonic()
    finding = run_program(*shell(f"sleep 60 & echo $! > {pids}; echo fine"))
    assert time.monotonic() - start < 5 * PATIENCE
    assert (finding.status, finding.message) == (Status.PASS, "fine")
    assert gone(int(pids.read_text()))


def test_endless_output_is_cut_and_the_program_ended(run_program: Any) -> None:
    assert run_program("yes", timeout_seconds=1.0).reason == "Timeout"


def test_message_is_bounded(run_program: Any) -> None:
    assert len(run_program(*shell("head -c 100000 /dev/zero | tr '\\0' x")).message) <= 500


# --- performance data -------------------------------------------------------------------------------------------------


@every(
    ("text", "expected"),
    [
        ("time=0.5s", [("p_time_seconds", 0.5)]),
        ("time=500ms;1;2;0;", [("p_time_seconds", 0.5)]),
        ("t=5us", [("p_t_seconds", 5e-6)]),
        ("used=25%;80;90", [("p_used_ratio", 0.25)]),
        ("/=1GB;2;3;0;4", [("p_root_bytes", 1e9)]),
        ("m=2MiB k=1KB", [("p_m_bytes", 2.0 * 2**20), ("p_k_bytes", 1e3)]),
        ("in=7c", [("p_in_total", 7.0)]),
        ("'a label'=1 b=2", [("p_a_label", 1.0), ("p_b", 2.0)]),
        ("temp=-4.5", [("p_temp", -4.5)]),
        ("x=U", [("p_x", None)]),
        ("x=1e999", [("p_x", None)]),
        ("x=--", [("p_x", None)]),
        ("", []),
        ("no numbers here", []),
        ("=5", []),
    ],
)
def test_performance_data_becomes_measurements_in_base_units(text: str, expected: list[Any]) -> None:
    found = parse_perfdata("p", text)
    assert [item.name for item in found] == [name for name, _ in expected]
    assert [item.value for item in found] == [
        None if value is None else pytest.approx(value, rel=1e-12) for _, value in expected
    ]


def test_number_of_measurements_is_bounded() -> None:
    assert len(parse_perfdata("p", " ".join(f"a{i}=1" for i in range(1000)))) == MAX_PERFDATA


def test_long_garbage_is_read_in_a_moment() -> None:
    start = time.monotonic()
    parse_perfdata("p", "a" * 100_000)
    parse_perfdata("p", "' " * 50_000)
    assert time.monotonic() - start < 5 * PATIENCE


@given(st.text(alphabet="ab'=0123456789.eE+-%;U sBMK,\x00\u0663", max_size=80))
def test_any_text_is_finite_numbers_or_none_under_names_that_metrics_may_have(text: str) -> None:
    for item in parse_perfdata("p", text):
        assert item.value is None or math.isfinite(item.value)
        assert re.fullmatch(r"p_[a-z0-9_]+", item.name)


@given(
    st.integers(-64, 255),
    st.text(alphabet="ab|='0 \n\x00\udcff", max_size=40).map(lambda text: text.encode("utf-8", "replace").decode()),
)
def test_whatever_a_program_says_only_exit_0_with_words_passes(code: int, text: str) -> None:
    for read in (read_monitoring, read_npd):
        if read("p", Completed(code, text, "")).status is Status.PASS:
            assert code == 0
            assert text.strip()


@pytest.mark.parametrize(
    ("name", "command", "words"),
    [
        ("probe", (), "has no command"),
        ("a-b", ("true",), "letters, digits and underscores"),
    ],
)
def test_program_that_cannot_be_meant_is_refused_when_it_is_configured(
    name: str, command: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_program_check(name, Program(command=command))


# --- the real thing ---------------------------------------------------------------------------------------------------

needs_plugins = pytest.mark.system(str(PLUGINS / "check_dummy"))


@needs_plugins
@pytest.mark.parametrize(
    ("code", "status"), [(0, Status.PASS), (1, Status.WARN), (2, Status.FAIL), (3, Status.UNKNOWN)]
)
def test_real_check_dummy(code: int, status: Status, run_program: Any) -> None:
    finding = run_program(str(PLUGINS / "check_dummy"), str(code), "as told")
    assert finding.status is status
    assert "as told" in finding.message


@needs_plugins
@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("check_disk", "-w", "1", "-c", "1", "-p", "/"), "probe_root_bytes"),
        (("check_load", "-w", "9999,9999,9999", "-c", "9999,9999,9999"), "probe_load15"),
        (("check_procs", "-c", "1:1000000"), "probe_procs"),
    ],
)
def test_real_plugins_pass_with_a_number(argv: tuple[str, ...], name: str, run_program: Any) -> None:
    finding = run_program(str(PLUGINS / argv[0]), *argv[1:])
    assert finding.status is Status.PASS, finding.message
    values = {item.name: item.value for item in finding.measurements}
    assert values[name] is not None
    assert values[name] >= 0


@needs_plugins
def test_real_plugin_beyond_its_threshold_fails_with_its_words(run_program: Any) -> None:
    finding = run_program(str(PLUGINS / "check_procs"), "-c", "0:0")
    assert (finding.status, finding.reason) == (Status.FAIL, "ProgramFailed")
    assert "CRITICAL" in finding.message


def test_npd_plugin_that_dies_without_a_word_blames_nobody(run_program: Any) -> None:
    finding = run_program(*shell("echo 'Traceback ...' >&2; exit 1"), protocol="npd")
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "NoData")
