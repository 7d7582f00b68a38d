"""Device and group checks for the tests of the runner."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.contract import Context, Evidence, Finding, Missing, NoParams, Progress, Status, check


@dataclass(frozen=True)
class Where:
    """What to do on which target."""

    target: str = ""
    folder: str = ""


def passed(message: str, target: str) -> Finding:
    return Finding(status=Status.PASS, reason=None, message=message, target=target)


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="device")
def present(ctx: Context[NoParams]) -> Iterator[Finding]:
    assert ctx.device is not None
    yield passed(f"pid {os.getpid()}", ctx.device.target)


@check(tier="quick", interval_seconds=60, timeout_seconds=3, scope="device")
def hangs_there(ctx: Context[Where]) -> Iterator[Finding]:
    assert ctx.device is not None
    if ctx.device.target == ctx.params.target:
        time.sleep(600)
    yield passed("done", ctx.device.target)


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="device")
def dies_once(ctx: Context[Where]) -> Iterator[Finding]:
    assert ctx.device is not None
    marker = os.path.join(ctx.params.folder, "died")
    if ctx.device.target == ctx.params.target and not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)
    yield passed("done", ctx.device.target)


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="device")
def surroundings_there(ctx: Context[Where]) -> Iterator[Finding]:
    """Writes what the process has been given into a file named by its device."""
    assert ctx.device is not None
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    guard = os.getppid()
    kinds = [stat.S_IFMT(os.stat(f"/proc/self/fd/{number}").st_mode) for number in opened_descriptors()]
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))
    found = {
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "threads": int(status["Threads"]),
        "signals": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "torch threads": ctx.device.torch.get_num_threads(),
        "priorities": [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, guard)],
        "oom scores": [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in ("self", guard)],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name},
        "leads session": [os.getsid(0) == guard, os.getpgid(0) == guard],
        "descriptors": sorted(kinds),
        "descriptors of the guard": os.listdir(f"/proc/{guard}/fd"),
        "signal at the guard's end": death.value,
        "isolated": sys.flags.isolated,
        "path": sys.path,
        "umask": os.umask(0o22),
    }
    with open(os.path.join(ctx.params.folder, ctx.device.target), "w") as file:
        json.dump(found, file)
    yield passed("written", ctx.device.target)


def opened_descriptors() -> list[str]:
    """Those of this process, without that of the look itself."""
    return [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]


def judge_met(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    """Tells who was there, where and as which process, and of each that was not all that is known."""
    for item in evidence:
        yield passed(f"{item.data['rendezvous']} pid {item.data['pid']} of {item.data['targets']}", item.target)
    for lost in missing:
        seen = ", ".join(f"{progress.event} {progress.step}" for progress in lost.progress)
        text = f"{lost.reason}; order {lost.order}; seen {seen}"
        yield Finding(status=Status.FAIL, reason="RankDied", message=text, target=lost.target)


def meet(ctx: Context[NoParams], name: str) -> Iterator[Evidence | Progress]:
    """A meeting by files: each rank leaves one and waits for those of all others."""
    assert ctx.group is not None
    group = ctx.group
    base = f"{group.rendezvous.removeprefix('file://')}-{name}"
    yield Progress(step=name, event="joined", monotonic_seconds=time.monotonic())
    yield Progress(step=name, event="entered", monotonic_seconds=time.monotonic())
    with open(f"{base}.{group.rank}", "w"):
        pass
    while not all(os.path.exists(f"{base}.{rank}") for rank in range(group.size)):
        time.sleep(0.005)
    yield Progress(step=name, event="left", monotonic_seconds=time.monotonic())
    data = {"pid": os.getpid(), "rendezvous": base.split("/")[-1].split("-")[1], "targets": " ".join(group.targets)}
    yield Evidence(target=f"rank:{group.rank}", key="", data=data)


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="group", judge=judge_met)
def meets(ctx: Context[NoParams]) -> Iterator[Evidence | Progress]:
    yield from meet(ctx, "meets")


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="group", judge=judge_met)
def meets_again(ctx: Context[NoParams]) -> Iterator[Evidence | Progress]:
    yield from meet(ctx, "again")


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="group", judge=judge_met)
def rank_dies_once(ctx: Context[Where]) -> Iterator[Evidence | Progress]:
    assert ctx.device is not None
    marker = os.path.join(ctx.params.folder, "died")
    if ctx.device.target == ctx.params.target and not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)
    yield from meet(ctx, "once")


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="group", judge=judge_met)
def walks(ctx: Context[NoParams]) -> Iterator[Evidence | Progress]:
    """More steps than anybody keeps, and then one that is not left."""
    for step in range(1000):
        yield Progress(step=f"step {step}", event="joined" if step == 0 else "entered", monotonic_seconds=0.0)
    time.sleep(600)


@check(tier="quick", interval_seconds=60, timeout_seconds=2, scope="device")
def traced_device(ctx: Context[Where]) -> Iterator[Finding]:
    """As the node check of that name: once killed, the worker is a corpse that cannot be reaped."""
    assert ctx.device is not None
    if ctx.device.target == ctx.params.target:
        place = os.path.join(ctx.params.folder, str(os.getpid()))
        open(place, "w").close()
        while not os.path.exists(f"{place}.seized"):
            time.sleep(0.01)
        time.sleep(600)
    yield passed("done", ctx.device.target)


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="group", judge=judge_met)
def meets_later(ctx: Context[NoParams]) -> Iterator[Evidence | Progress]:
    yield from meet(ctx, "later")
