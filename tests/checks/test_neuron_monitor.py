"""The stream of neuron-monitor: every member may be missing, null, extra or of another kind."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators.neuron.monitor import ECC_COUNTERS, parse_monitor, read_monitor
from checks.host.machine import Host, HostError
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.patience import PATIENCE


def report() -> dict[str, Any]:
    """One object as documented, of two devices and one process."""
    return {
        "neuron_runtime_data": [
            {
                "pid": 4711,
                "address": "",
                "neuron_runtime_tag": "4711",
                "error": "",
                "report": {
                    "neuroncore_counters": {
                        "period": 1.0001,
                        "neuroncores_in_use": {
                            "0": {"neuroncore_utilization": 50.0, "effective_flops": 2.5e12},
                            "1": {"neuroncore_utilization": 100, "flops": 5},
                        },
                        "error": "",
                    },
                    "execution_stats": {
                        "period": 1.0,
                        "error_summary": {"generic": 1, "numerical": 0, "transient": 0, "model": 0, "hardware": 3},
                        "execution_summary": {"completed": 123, "timed_out": 0},
                        "latency_stats": {"total_latency": None, "device_latency": None},
                        "error": "",
                    },
                },
            }
        ],
        "system_data": {
            "neuron_hw_counters": {
                "period": 1.03,
                "neuron_devices": [
                    {"neuron_device_index": index, **dict.fromkeys(ECC_COUNTERS, index)} for index in (0, 1)
                ],
                "error": "",
            }
        },
        "instance_info": {"instance_type": "trn1.32xlarge", "error": ""},
        "neuron_hardware_info": {"neuron_device_count": 2, "neuroncore_per_device_count": 2, "error": ""},
    }


def change(path: str, value: Any) -> str:
    """The object with one member of it another one; `...` takes it away."""
    told = report()
    place: Any = told
    *parts, last = path.split(".")
    for part in parts:
        place = place[int(part) if isinstance(place, list) else part]
    key = int(last) if isinstance(place, list) else last
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return json.dumps(told)


def test_documented_object_is_read_whole() -> None:
    reading = parse_monitor(json.dumps(report()))
    assert reading is not None
    assert reading.period_seconds == 1.03
    assert reading.ecc == {0: dict.fromkeys(ECC_COUNTERS, 0), 1: dict.fromkeys(ECC_COUNTERS, 1)}
    assert reading.hardware_errors == 3
    assert reading.skipped == ()


def test_idle_node_has_no_process_and_no_errors() -> None:
    reading = parse_monitor(change("neuron_runtime_data", []))
    assert reading is not None
    assert reading.hardware_errors == 0


@every("value", [..., None, [], {}, "", 0, {"error": "no driver"}])
def test_counters_that_are_null_or_missing_are_unknown_never_zero(value: Any) -> None:
    reading = parse_monitor(change("system_data.neuron_hw_counters", value))
    assert reading is not None
    assert reading.ecc is None


@every("value", [..., None, {}, [None], [{}], [{"neuron_device_index": "0"}], 0])
def test_devices_in_a_shape_that_is_not_understood_are_unknown(value: Any) -> None:
    reading = parse_monitor(change("system_data.neuron_hw_counters.neuron_devices", value))
    assert reading is not None
    assert reading.ecc is None


@every("value", [None, "0", -1, 1.5, True, [], 10**30])
def test_count_that_is_none_is_unknown(value: Any) -> None:
    text = change("system_data.neuron_hw_counters.neuron_devices.1.mem_ecc_uncorrected", value)
    reading = parse_monitor(text)
    assert reading is not None
    assert reading.ecc is not None
    assert reading.ecc[1]["mem_ecc_uncorrected"] is None
    assert reading.ecc[0]["mem_ecc_uncorrected"] == 0


def test_counter_that_the_tool_does_not_have_is_not_there() -> None:
    reading = parse_monitor(change("system_data.neuron_hw_counters.neuron_devices.0.sram_ecc_corrected", ...))
    assert reading is not None
    assert reading.ecc is not None
    assert "sram_ecc_corrected" not in reading.ecc[0]


def test_device_told_twice_is_not_understood() -> None:
    assert (reading := parse_monitor(change("system_data.neuron_hw_counters.neuron_devices.1.neuron_device_index", 0)))
    assert reading.ecc is None


def test_group_with_an_error_is_skipped_and_said() -> None:
    reading = parse_monitor(change("system_data.neuron_hw_counters.error", "cannot\nread"))
    assert reading is not None
    assert reading.ecc is None
    assert reading.skipped == ("neuron_hw_counters: cannot read",)


@every("path", ["neuron_runtime_data.0.report", "neuron_runtime_data.0.report.execution_stats"])
@every("value", [None, ..., "x", {}])
def test_process_that_does_not_tell_its_errors_makes_their_number_unknown(path: str, value: Any) -> None:
    reading = parse_monitor(change(path, value))
    assert reading is not None
    assert reading.hardware_errors is None


def test_errors_of_all_processes_add_up() -> None:
    told = report()
    told["neuron_runtime_data"] += [copy.deepcopy(told["neuron_runtime_data"][0]), None]
    reading = parse_monitor(json.dumps(told))
    assert reading is not None
    assert reading.hardware_errors == 6  # the third does not tell, and what is known counts


@every("text", ["", "{", "[]", "null", "{}", "[" * 100_000, json.dumps(report())[:-40], "NaN", "1"])
def test_line_that_is_no_such_object_is_none(text: str) -> None:
    assert parse_monitor(text) is None


def leaves(value: Any, path: str = "") -> list[str]:
    """The paths of all members."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, member in items:
        below = f"{path}.{key}" if path else str(key)
        found += [below, *leaves(member, below)]
    return found


junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(leaves(report())), st.just(...) | junk)
def test_any_member_dropped_or_retyped_gives_a_right_reading_or_none(path: str, value: Any) -> None:
    reading = parse_monitor(change(path, value))
    if reading is None:
        return
    for index, counts in (reading.ecc or {}).items():
        for name, count in counts.items():
            changed = f"system_data.neuron_hw_counters.neuron_devices.{index}.{name}".startswith(path)
            assert count is None or count == index or changed or path.endswith("neuron_device_index")
    if not path.startswith("neuron_runtime_data"):
        assert reading.hardware_errors == 3


@given(st.integers(0, 1200))
def test_object_that_was_cut_off_is_none(length: int) -> None:
    text = json.dumps(report())
    assert (parse_monitor(text[:length]) is None) or length >= len(text)


@given(st.text(max_size=200) | junk.map(json.dumps))
def test_any_text_is_a_reading_or_none(text: str) -> None:
    parse_monitor(text)


@pytest.mark.parametrize("tools", ["new", "old"])
def test_first_object_of_the_tool_is_read_and_the_tool_ended(tools: str, tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "inf2.xlarge", tools=tools)
    machine.fault("ecc", "neuron:0", "mem_ecc_uncorrected=4")
    reading = read_monitor(machine.host, timeout_seconds=10)
    assert reading is not None
    assert reading.ecc is not None
    assert reading.ecc[0]["mem_ecc_uncorrected"] == 4
    assert reading.period_seconds == pytest.approx(1.0, abs=0.01)  # the configuration was taken


def program(root: Path, script: str) -> Host:
    (root / "bin").mkdir()
    (root / "bin/neuron-monitor").write_text(f"#!/bin/sh\n{script}\n")
    (root / "bin/neuron-monitor").chmod(0o755)
    return Host(root)


def test_stream_without_end_is_ended_with_its_children_after_the_first_line(tmp_path: Path) -> None:
    host = program(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; while :; do echo line; sleep 0.01; done")
    begun = time.monotonic()
    assert host.first_line(["neuron-monitor"], timeout_seconds=60) == "line"
    assert time.monotonic() - begun < 5 * PATIENCE
    child = int((tmp_path / "child").read_text())
    for _ in range(200):
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        raise AssertionError("a child was left behind")


@pytest.mark.parametrize(
    ("script", "reason", "words"),
    [
        ("sleep 30", "Timeout", "did not finish"),
        ("echo no driver >&2; exit 1", "NoData", "no driver"),
        ("printf half", "NoData", "printed nothing"),
        ("head -c 3000000 /dev/zero; sleep 30", "NoData", "printed nothing"),
    ],
)
def test_program_without_a_line_is_an_error_that_says_why(script: str, reason: str, words: str, tmp_path: Path) -> None:
    host = program(tmp_path, script)
    with pytest.raises(HostError, match=words) as caught:
        host.first_line(["neuron-monitor"], timeout_seconds=0.5 if reason == "Timeout" else 10)
    assert caught.value.reason == reason


def test_program_that_is_not_there_is_a_missing_tool(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        Host(tmp_path).first_line(["neuron-monitor-that-is-not"], timeout_seconds=1)
    assert caught.value.reason == "MissingTool"
