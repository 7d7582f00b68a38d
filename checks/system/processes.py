"""Processes that hang in the kernel, and zombies that nobody reaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Limit, Status, check
from checks.limits import within


@dataclass(frozen=True)
class Params:
    """Bounds."""

    max_stuck_count: int = 16  # a disk under load keeps a few waiting for moments
    max_zombies_count: int = 100  # each holds a process id and nothing else


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def processes(ctx: Context[Params]) -> Iterator[Finding]:
    """
    Few processes wait in the kernel without end, and zombies do not pile up.

    Reads:   /proc/*/stat (the state: D is uninterruptible, Z a zombie). Kernel threads do not count.
    Judges:  fail StuckProcesses (D), warn StuckProcesses (Z) | unknown NoData (no process seen).
    Cost:    2 ms for every thousand processes; harmless to jobs.
    """
    states: dict[str, list[str]] = {"D": [], "Z": []}
    seen = 0
    for entry in ctx.host.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            stat = ctx.host.read(f"/proc/{entry}/stat", max_bytes=4096)
        except OSError:  # it has ended meanwhile
            continue
        name, state, parent = parse_stat(stat)
        if state is None:
            continue
        seen += 1
        if state in states and parent != "2" and entry != "2":
            states[state].append(f"{name} ({entry})")
    for state, word, most, outside in (
        ("D", "waiting in the kernel", ctx.params.max_stuck_count, Status.FAIL),
        ("Z", "zombies", ctx.params.max_zombies_count, Status.WARN),
    ):
        found = states[state]
        who = f" ({', '.join(found[:5])})" if found else ""
        yield within(
            float(len(found)) if seen else None,
            name="processes_stuck_count" if state == "D" else "processes_zombie_count",
            target="node",
            limit=Limit(lower=None, upper=float(most), origin="default"),
            reason="StuckProcesses",
            subject=f"processes {word}{who}:",
            outside=outside,
        )


def parse_stat(text: str) -> tuple[str, str | None, str | None]:
    """Name, state and parent of `12 (a (b) c) S 1 ...`: the name may hold anything, so the last bracket counts."""
    head, bracket, rest = text.rpartition(")")
    words = rest.split()
    if not bracket or len(words) < 2:
        return "", None, None
    return head.partition("(")[2], words[0], words[1]
