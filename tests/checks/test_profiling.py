"""Profiles of slow probes: real steps under torch's profiler, their sentences and traces, and their way in lines."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.contract import MAX_PROFILE_BYTES, PROFILE_FORMAT, Finding, Limit, Profile, Profiling, Status
from checks.device.matmul import matmul
from checks.device.memory import memory
from checks.device.transfer import transfer
from checks.profiling.operations import in_words, packed, with_profile
from checks.training.train_step import train_step
from checks.worker.commands import ResultWriter
from checks.worker.fault_injection import faulty
from checks.worker.faults import parse_fault
from checks.worker.profiles import MAX_PROFILES, PROFILE_ID, ProfileParts, split
from checks.worker.protocol import MAX_LINE_BYTES, ProtocolError, encode
from tests.every import every

SHORT: dict[str, Any] = {"repeats": 2, "parity_steps": 0, "timed": 1, "dtypes": ["bf16"]}
TOO_FAST = Limit(lower=1e30, upper=None, origin="config")
OPERATION = re.compile(r"; in one more run, most time was spent in \w+::\w+ \d+ %(, \w+::\w+ \d+ %){0,2}$")


def profiling(*, always: bool = False, left: float = 3600.0) -> Profiling:
    return Profiling(always=always, until=time.monotonic() + left)


def profiles(items: Sequence[Any]) -> list[Profile]:
    return [item for item in items if isinstance(item, Profile)]


def slow(items: Sequence[Any]) -> list[Finding]:
    return [item for item in items if isinstance(item, Finding) and item.reason == "SlowDevice"]


def trace(profile: Profile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(profile.content))
    return found


def test_a_slow_step_is_profiled_once_and_its_findings_name_profile_and_operation(
    context: Any, cpu_device: Any
) -> None:
    limits = {"train_step_steps_per_second": TOO_FAST, "train_step_tokens_per_second": TOO_FAST}
    said = list(train_step(context(train_step, device=cpu_device, limits=limits, profiling=profiling(), **SHORT)))
    (profile,) = profiles(said)
    found = slow(said)
    assert [one.profile for one in found] == [profile.id] * 2
    assert all(OPERATION.search(one.message) for one in found)
    assert said.index(profile) < said.index(found[0])
    assert PROFILE_ID.fullmatch(profile.id)
    assert profile.id.startswith("train_step-bf16-small-cpu-0-")
    held = trace(profile)
    assert (held["otherData"]["target"], held["otherData"]["said"]) == ("cpu:0", profile.said)
    names = {event["name"] for event in held["traceEvents"]}
    assert {"aten::mm", "aten::gelu", "aten::embedding"} <= names
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in held["traceEvents"])


@pytest.mark.parametrize(
    ("check", "measurement", "params", "operation"),
    [
        (matmul, "matmul_flops_per_second", {"dtypes": ["fp32"], "sizes": [64]}, "aten::mm"),
        (memory, "memory_bandwidth_bytes_per_second", {"max_bytes": 2**20}, "aten::bitwise_not"),
        (transfer, "transfer_bytes_per_second/host_to_device", {"size_bytes": 2**20}, "aten::copy_"),
    ],
)
def test_each_probe_that_is_timed_says_what_took_its_time(
    context: Any, cpu_device: Any, check: Any, measurement: str, params: dict[str, Any], operation: str
) -> None:
    limits = {measurement: TOO_FAST}
    said = list(check(context(check, device=cpu_device, limits=limits, profiling=profiling(), **params)))
    (profile,), (found,) = profiles(said), slow(said)
    assert found.profile == profile.id
    assert OPERATION.search(found.message)  # which comes first is chance on a busy machine
    assert operation in {event["name"] for event in trace(profile)["traceEvents"]}


def test_what_is_fast_is_profiled_on_demand_alone_and_its_finding_stays_as_it_is(context: Any, cpu_device: Any) -> None:
    options: dict[str, Any] = {"device": cpu_device, "dtypes": ["fp32"], "sizes": [64], "seed": 1}
    assert not profiles(list(matmul(context(matmul, profiling=profiling(), **options))))
    profile, found = matmul(context(matmul, profiling=profiling(always=True), **options))
    assert isinstance(profile, Profile)
    assert isinstance(found, Finding)
    assert (found.status, found.profile) == (Status.PASS, profile.id)
    assert "most time was spent" not in found.message


@pytest.mark.parametrize("left", [None, 0.0, 20.0], ids=["off", "no time left", "little time"])
def test_nothing_is_profiled_where_nobody_wants_it_or_the_time_limit_is_near(
    context: Any, cpu_device: Any, left: float | None
) -> None:
    wanted = None if left is None else profiling(left=left)
    limits = {"matmul_flops_per_second": TOO_FAST}
    options: dict[str, Any] = {"device": cpu_device, "limits": limits, "dtypes": ["fp32"], "sizes": [64]}
    (found,) = matmul(context(matmul, profiling=wanted, **options))
    assert isinstance(found, Finding)
    assert (found.reason, found.profile) == ("SlowDevice", None)


def _many_events(device: Any) -> None:
    for _ in range(60_000):
        device.torch.is_tensor(device.torch.empty(0))


def _fails(device: Any) -> None:
    raise RuntimeError("CUPTI is not there")


@pytest.mark.parametrize("operation", [_many_events, _fails])
def test_a_profile_that_fails_or_has_too_many_events_leaves_the_finding_as_it_is(
    context: Any, cpu_device: Any, operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checks.profiling.operations._event", lambda event: pytest.fail("events were read"))
    found = Finding(status=Status.FAIL, reason="SlowDevice", message="slow", target="cpu:0")
    ctx = context(matmul, device=cpu_device, profiling=profiling())
    assert list(with_profile(ctx, cpu_device, "matmul", lambda: operation(cpu_device), 0.001, [found])) == [found]


def test_a_device_that_records_its_work_has_no_profile_of_operations(context: Any, tampering: Any) -> None:
    device = tampering(fallbacks=tuple)
    limits = {"matmul_flops_per_second": TOO_FAST}
    (found,) = matmul(context(matmul, device=device, limits=limits, profiling=profiling(), dtypes=["fp32"], sizes=[64]))
    assert isinstance(found, Finding)
    assert found.profile is None


def test_a_wrong_result_is_not_profiled(context: Any, cpu_device: Any) -> None:
    fault = parse_fault("matmul@cpu:0=corrupt", {"matmul": "device"})
    limits = {"matmul_flops_per_second": TOO_FAST}
    device = faulty(cpu_device, [fault])
    said = list(
        matmul(context(matmul, device=device, limits=limits, profiling=profiling(), dtypes=["fp32"], sizes=[64]))
    )
    assert [(type(one), one.reason) for one in said if isinstance(one, Finding)] == [(Finding, "WrongResult")]
    assert not profiles(said)


def test_wrappers_of_autograd_are_no_operations_and_take_no_place_in_the_sentence() -> None:
    """Seen on a busy machine: what the engine waits for made its wrapper the first of the three."""
    times = {
        "autograd::engine::evaluate_function: ToCopyBackward0": 29.0,
        "ToCopyBackward0": 5.0,
        "aten::sum": 29.0,
        "aten::mm": 8.0,
        "aten::add": 0.1,
        "aten::empty": 0.0,
    }
    assert in_words(times) == "in one more run, most time was spent in aten::sum 78 %, aten::mm 22 %"
    assert in_words({"autograd::engine::evaluate_function: MmBackward0": 3.0, "cudaLaunchKernel": 1.0}) == ""


def test_a_trace_that_is_too_large_keeps_its_longest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    chance = random.Random(1)
    events: list[dict[str, Any]] = [
        {"name": f"{chance.getrandbits(1600):0400x}", "ph": "X", "ts": float(at), "dur": float(at % 997)}
        for at in range(12_000)
    ]
    content = packed({"target": "cpu:0"}, events)
    assert len(content) <= MAX_PROFILE_BYTES
    held = json.loads(gzip.decompress(content))
    kept = held["traceEvents"]
    assert 0 < len(kept) < len(events)
    assert held["otherData"]["events_left_out"] == len(events) - len(kept)
    assert min(event["dur"] for event in kept) >= sorted(event["dur"] for event in events)[-len(kept)]
    assert [event["ts"] for event in kept] == sorted(event["ts"] for event in kept)


# --- in lines of the protocol -----------------------------------------------------------------------------------------


def made(content: bytes = b"x", **changed: Any) -> Profile:
    told: dict[str, Any] = {"id": "matmul-1", "target": "cpu:0", "said": "s", "format": PROFILE_FORMAT, **changed}
    return Profile(content=content, **told)


@pytest.mark.parametrize("size", [0, 1, 36 * 1024, 36 * 1024 + 1, MAX_PROFILE_BYTES])
def test_a_profile_of_any_size_arrives_as_it_was_sent(size: int) -> None:
    sent = made(bytes(at % 251 for at in range(size)))
    parts = ProfileParts()
    for part in split(sent):
        assert len(encode({"kind": "profile", "id": 1, "profile": part})) <= MAX_LINE_BYTES
        parts.add(part)
    assert parts.whole == [sent]


def test_profiles_above_the_bounds_are_left_out_and_the_findings_arrive(tmp_path: Path) -> None:
    found = Finding(status=Status.FAIL, reason="SlowDevice", message="slow", target="cpu:0")
    fitting = [made(id=f"matmul-{at}") for at in range(MAX_PROFILES + 1)]
    with (tmp_path / "lines").open("wb") as lines:
        sent = [made(id="../x"), made(b"x" * (MAX_PROFILE_BYTES + 1)), *fitting, found]
        assert ResultWriter(lines.fileno()).stream(sent) == 0
    events = [json.loads(line) for line in (tmp_path / "lines").read_bytes().splitlines()]
    taken = ProfileParts()
    for event in events[:-1]:
        taken.add(event["profile"])
    assert taken.whole == fitting[:MAX_PROFILES]
    assert events[-1]["finding"]["reason"] == "SlowDevice"


def _too_many() -> list[Any]:
    return [part for at in range(MAX_PROFILES + 1) for part in split(made(id=f"matmul-{at}"))]


@every(
    "parts",
    [
        lambda: [None],
        lambda: [{}],
        lambda: split(made(id="../../etc/passwd")),
        lambda: split(made(id="a" * 200)),
        lambda: split(made(format="elf")),
        lambda: [{**next(split(made())), "data": "%"}],
        lambda: [{**next(split(made())), "data": 1}],
        lambda: split(made(b"x" * (MAX_PROFILE_BYTES + 1))),
        lambda: [{**next(split(made())), "last": False}, *split(made(id="matmul-2"))],
        _too_many,
    ],
)
def test_what_is_no_profile_or_too_much_is_garbage(parts: Callable[[], Any]) -> None:
    taken = ProfileParts()

    def add_all() -> None:
        for part in parts():
            taken.add(part)

    with pytest.raises(ProtocolError):
        add_all()
