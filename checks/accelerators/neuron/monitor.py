"""
What neuron-monitor streams: one JSON object a period, of which the first is read. Nothing here judges.

Its counts are of the period alone, so they say nothing of what was before; groups whose `error` is not empty hold no
reading; members are missing, null or extra from version to version. What is not understood is None.

Source: neuron-monitor-user-guide of the Neuron SDK, and its neuron-monitor-prometheus.py, which adds the counts up.
Unverified on hardware: built on the documented objects.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from checks.host.machine import Host
from checks.json_text import parse_json

ECC_COUNTERS = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected")
PERIOD = "1s"  # whole units alone: "1.0s" is ignored, and five seconds are taken
MONITOR_CONFIG = json.dumps(
    {
        "period": PERIOD,
        "neuron_runtimes": [
            {"tag_filter": ".*", "metrics": [{"type": "neuroncore_counters"}, {"type": "execution_stats"}]}
        ],
        "system_metrics": [{"period": PERIOD, "type": "neuron_hw_counters"}],
    }
)

_MAX_DEVICES = 256
_MAX_INDEX = 4096
_MAX_RUNTIMES = 1024
_MAX_COUNT = 1 << 63


class Reading(NamedTuple):
    """
    One object of the stream.

    `ecc` are the events of the period by device and counter (None: there, and no count); None where the group is not
    there or cannot be read. `hardware_errors` are executions that failed by hardware, over all processes that run; None
    where one of them does not tell. `skipped` says which groups held an error.
    """

    period_seconds: float | None
    ecc: Mapping[int, Mapping[str, int | None]] | None
    hardware_errors: int | None
    skipped: tuple[str, ...]


def read_monitor(host: Host, *, timeout_seconds: float) -> Reading | None:
    """
    Start neuron-monitor, take its first object and end it; None where that is no object that can be understood.

    Raises HostError (MissingTool, Timeout, NoData). It opens the devices but takes no cores.
    """
    host.find_program("neuron-monitor")
    import tempfile  # slow to import, and few nodes come here

    with tempfile.TemporaryDirectory(prefix="healthd-") as folder:
        path = os.path.join(folder, "neuron-monitor.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(MONITOR_CONFIG)
        return parse_monitor(host.first_line(["neuron-monitor", "-c", path], timeout_seconds=timeout_seconds))


def parse_monitor(text: str) -> Reading | None:
    """The reading in one line of the stream; None where it is no JSON object with either of its two groups."""
    try:
        told = parse_json(text)
    except ValueError:
        return None
    if not isinstance(told, dict) or not ({"system_data", "neuron_runtime_data"} & told.keys()):
        return None
    skipped: list[str] = []
    counters = _group(told.get("system_data"), "neuron_hw_counters", skipped)
    runtimes = told.get("neuron_runtime_data")
    reports = list(_reports(runtimes, skipped))
    return Reading(
        period_seconds=_number(counters.get("period")) if counters is not None else None,
        ecc=None if counters is None else _ecc(counters.get("neuron_devices")),
        hardware_errors=_hardware_errors(reports, skipped) if isinstance(runtimes, list) else None,
        skipped=tuple(dict.fromkeys(skipped))[:8],
    )


def _group(parent: Any, name: str, skipped: list[str]) -> dict[str, Any] | None:
    """A group of metrics; None where it is not there, is null, or says that it could not be collected."""
    group = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(group, dict):
        return None
    if group.get("error"):
        skipped.append(f"{name}: {' '.join(str(group['error']).split())[:100]}")
        return None
    return group


def _ecc(devices: Any) -> dict[int, dict[str, int | None]] | None:
    """Events by device. None where the list is null or holds something that is no device."""
    if not isinstance(devices, list):
        return None
    found: dict[int, dict[str, int | None]] = {}
    for device in devices[:_MAX_DEVICES]:
        index = _count(device.get("neuron_device_index")) if isinstance(device, dict) else None
        if index is None or index >= _MAX_INDEX or index in found:
            return None
        found[index] = {name: _count(device[name]) for name in ECC_COUNTERS if name in device}
    return found


def _reports(runtimes: Any, skipped: list[str]) -> Iterator[Any]:
    """The report of each process that runs on the devices; None for one that has none."""
    for runtime in runtimes[:_MAX_RUNTIMES] if isinstance(runtimes, list) else ():
        yield None if _group({"runtime": runtime}, "runtime", skipped) is None else runtime.get("report")


def _hardware_errors(reports: list[Any], skipped: list[str]) -> int | None:
    """Their sum; None where one process does not say, unless the others say enough."""
    total, whole = 0, True
    for report in reports:
        stats = _group(report, "execution_stats", skipped)
        summary = stats.get("error_summary") if stats is not None else None
        count = _count(summary.get("hardware")) if isinstance(summary, dict) else None
        total, whole = total + (count or 0), whole and count is not None
    return total if whole or total else None


def _number(value: Any) -> float | None:
    """A number from 0 on; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MAX_COUNT:
        return None
    return float(value)


def _count(value: Any) -> int | None:
    """A whole number from 0 on; None for anything else."""
    number = _number(value)
    return int(number) if number is not None and math.isfinite(number) and number == int(number) else None
