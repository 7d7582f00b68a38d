"""Processes that hang in the kernel, and zombies that are not reaped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from checks.contract import Context, Evidence, Finding, Previous, Status, check
from checks.host.machine import Host, HostError
from checks.limits import within
from checks.system.bounds import bound

MAX_REMEMBERED = 256
# Waiting there is no fault: frozen by the freezer of cgroup v1 (`docker pause`), or for a child of vfork.
_BY_DESIGN = ("__refrigerator", "kernel_clone", "wait_for_vfork_done")


class Process(NamedTuple):
    """One line of /proc/*/stat: `parent` is a process id, `started` counts clock ticks since boot."""

    name: str
    state: str
    parent: str
    started: str


@dataclass(frozen=True)
class Params:
    """Bounds."""

    stuck_seconds: float = 50.0  # seen at two looks, a minute apart by default; the kernel itself calls 120 s hung
    max_stuck_count: int = 0  # a process that has not moved for so long does not come back by itself
    max_zombies_count: int = 100  # each holds a process id and nothing else


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def processes(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    No process hangs in the kernel, and zombies do not accumulate.

    A process waits uninterruptibly (state D) for a moment whenever it reads a disk. It hangs if earlier runs found the
    same process in this state and it has not run once since. The first run has nothing to compare with and cannot tell.

    Reads:   /proc/*/stat; of processes in state D their context switches (/proc/*/status) and wchan. No kernel threads.
    Judges:  fail StuckProcesses (D), warn StuckProcesses (Z) | unknown NoData (no process seen).
    Cost:    2 ms for every thousand processes; harmless to jobs.
    """
    seen = read_processes(ctx.host)
    waiting: dict[str, dict[str, Any]] = {
        f"{pid} {process.started}": {"name": process.name, "switches": _switches(ctx.host, pid), "seconds": 0.0}
        for pid, process in seen.items()
        if process.state == "D" and not _by_design(ctx.host, pid)
    }
    add_seconds(waiting, ctx.previous, ctx.host.boot_id())
    stuck = [
        f"{entry['name']} ({key.split()[0]})"
        for key, entry in waiting.items()
        if entry["seconds"] >= ctx.params.stuck_seconds
    ]
    zombies = [f"{process.name} ({pid})" for pid, process in seen.items() if process.state == "Z"]
    yield within(
        float(len(stuck)) if seen else None,
        name="processes_stuck_count",
        target="node",
        limit=bound(ctx, "processes_stuck_count", upper="max_stuck_count"),
        reason="StuckProcesses",
        subject=f"{len(seen)} processes, {len(waiting)} waiting in the kernel, stuck there{_names(stuck)}:",
    )
    yield within(
        float(len(zombies)) if seen else None,
        name="processes_zombie_count",
        target="node",
        limit=bound(ctx, "processes_zombie_count", upper="max_zombies_count"),
        reason="StuckProcesses",
        subject=f"zombies{_names(zombies)}:",
        outside=Status.WARN,
    )
    longest = sorted(waiting.items(), key=lambda item: -item[1]["seconds"])[:MAX_REMEMBERED]
    yield Evidence(target="node", key="processes", data={"waiting": dict(longest)})


def add_seconds(waiting: dict[str, dict[str, Any]], previous: Previous | None, boot_id: str | None) -> None:
    """For how long each has been seen waiting without having run once since; 0 for what an earlier look did not see."""
    if previous is None or not previous.evidence or previous.boot_id != boot_id:
        return
    before = previous.evidence[-1].data.get("waiting", {})
    for key, entry in waiting.items():
        earlier = before.get(key)
        if earlier and entry["switches"] is not None and earlier["switches"] == entry["switches"]:
            entry["seconds"] = earlier["seconds"] + previous.elapsed_seconds


def read_processes(host: Host) -> dict[str, Process]:
    """Every process by its id, without kernel threads."""
    found = {}
    for entry in host.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            process = parse_stat(host.read(f"/proc/{entry}/stat", max_bytes=4096))
        except HostError:  # it has ended meanwhile
            continue
        if process is not None and process.parent != "2" and entry != "2":
            found[entry] = process
    return found


def parse_stat(text: str) -> Process | None:
    """`12 (a (b) c) S 1 ...`: the name may hold anything, so the last bracket counts. Source: proc_pid_stat(5)."""
    head, bracket, rest = text.rpartition(")")
    words = rest.split()
    if not bracket or len(words) < 20:
        return None
    return Process(name=head.partition("(")[2], state=words[0], parent=words[1], started=words[19])


def _switches(host: Host, pid: str) -> str | None:
    """How often a process has given up the processor so far; None where it is not told."""
    try:
        lines = host.read(f"/proc/{pid}/status", max_bytes=16384).splitlines()
    except HostError:
        return None
    counts = [line.partition(":")[2].strip() for line in lines if "ctxt_switches:" in line]
    return "+".join(counts) or None


def _by_design(host: Host, pid: str) -> bool:
    try:
        return host.read(f"/proc/{pid}/wchan", max_bytes=256).strip() in _BY_DESIGN
    except HostError:  # not everybody may read it
        return False


def _names(names: list[str]) -> str:
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""
