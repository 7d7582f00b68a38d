"""
Runs orders in child processes, all at once and bounded, and reads their reports.

A store that hangs holds the child, never the worker: the child is killed, and where the kernel does not let go of it,
it is left behind and not started again while it is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import checks
from checks.contract import NO_LIMIT, Context, Evidence, Finding, Limit, Status
from checks.host.machine import Host, HostError
from checks.json_text import parse_json
from checks.limits import within

_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
folder = sys.argv[1]
spec = spec_from_file_location("checks", folder + "/__init__.py", submodule_search_locations=[folder])
package = module_from_spec(spec)
sys.modules["checks"] = package
spec.loader.exec_module(package)
from checks.stores.program import main
main(sys.argv[2])
"""


@dataclass
class Told:
    """What one child said. `hung` is the step in which its time was up; empty when it ended."""

    root: str
    readings: dict[str, float] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: str = "start"
    step_at: float = 0.0
    """When the step began (CLOCK_MONOTONIC)."""
    step_seconds: float = 0.0
    """How long the step in which its time was up had lasted."""
    hung: str = ""
    pid: int = 0
    error: str = ""


def run_and_judge(
    ctx: Context[Any],
    orders: Sequence[Mapping[str, Any]],
    readings: Mapping[str, tuple[str, str]],
    *,
    seconds: float,
    nothing: str,
    lower: Mapping[str, float | None] | None = None,
) -> Iterator[Finding | Evidence]:
    """
    Run the orders of a check and judge what they say.

    `readings`: measurement -> how its sentence begins, and the reason when it is out of its limit. `lower` are bounds
    from the parameters, where no limit is set. `nothing` names the parameter without which there is no order.
    """
    if not orders or ctx.host.root is not None:
        text = f"none configured ({nothing})" if not orders else "recorded machines have no stores"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    stuck = still_stuck(ctx)
    for root, pid in stuck.items():
        text = f"{root}: process {pid} of an earlier run still hangs in it, so no new one was started"
        yield Finding(status=Status.FAIL, reason="StoreHangs", message=text, target=f"path:{root}")
    told = run_orders(ctx.host, [one for one in orders if one["root"] not in stuck], timeout_seconds=seconds)
    for one in told:
        target = f"path:{one.root}"
        yield from faults_of(one, target, seconds)
        more = "".join(f" ({note})" for note in one.notes) if not one.faults else ""
        for name, (subject, reason) in readings.items():
            if name in one.readings:
                limit = ctx.limit(name, target)
                bound = (lower or {}).get(name)
                if limit is NO_LIMIT and bound is not None:
                    limit = Limit(lower=bound, upper=None, origin="config")
                yield within(
                    one.readings[name],
                    name=name,
                    target=target,
                    limit=limit,
                    reason=reason,
                    subject=f"{one.root}: {subject}{more if name == 'checkpoint_load_bytes_per_second' else ''}",
                )
        if not (one.readings or one.faults or one.hung or one.error):
            yield Finding(status=Status.UNKNOWN, reason="NoData", message=f"{one.root}: no result", target=target)
    yield from stuck_evidence(told, stuck)


def run_orders(host: Host, orders: Sequence[Mapping[str, Any]], *, timeout_seconds: float) -> list[Told]:
    """One report for each order, in their order; all run at once, so the whole takes at most `timeout_seconds`."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=max(1, len(orders))) as threads:
        return list(threads.map(lambda order: _run(host, order, timeout_seconds), orders))


def _run(host: Host, order: Mapping[str, Any], timeout_seconds: float) -> Told:
    told = Told(root=order["root"])
    folder = os.path.dirname(os.path.abspath(checks.__file__))
    # Unlike the worker of the node, the child has site-packages: the libraries of object stores, and torch.
    argv = [sys.executable, "-I", "-c", _START, folder, json.dumps(dict(order))]
    try:
        done = host.run(argv, timeout_seconds=timeout_seconds, folder="/")
    except HostError as error:
        if error.reason != "Timeout":
            raise
        _read(told, error.output)
        told.hung, told.step_seconds = told.step, time.monotonic() - told.step_at
        if told.pid and _started(told.pid) is not None:
            told.notes.append(f"process {told.pid} was killed, but the kernel still holds it")
        return told
    ended = _read(told, done.stdout)
    if not ended:
        words = done.stderr.strip().rpartition("\n")[2][:300]
        told.error = f"its process exited before it finished ({told.step}; exit code {done.returncode}): {words}"
    return told


def _read(told: Told, text: str) -> bool:
    """Take in the lines of a report; whether it says that all is done."""
    ended = False
    for line in text.splitlines():
        try:
            said = parse_json(line)
        except ValueError:
            continue  # a library's own words
        if not isinstance(said, dict):
            continue
        if "step" in said:
            told.step, told.step_at = str(said["step"]), float(said["at"])
        elif "reading" in said:
            told.readings[str(said["reading"])] = float(said["value"])
        elif "fault" in said:
            told.faults.append((str(said["fault"]), str(said["message"])))
        elif "note" in said:
            told.notes.append(str(said["note"]))
        elif "pid" in said:
            told.pid = int(said["pid"])
        ended = ended or "done" in said
    return ended


def faults_of(told: Told, target: str, timeout_seconds: float) -> Iterator[Finding]:
    """The findings of what went wrong; none where all went well."""
    for reason, message in told.faults:
        status = Status.UNKNOWN if reason in ("MissingTool", "CheckError") else Status.FAIL
        yield Finding(status=status, reason=reason, message=f"{told.root}: {message}", target=target)
    if told.error:
        yield Finding(status=Status.UNKNOWN, reason="Crashed", message=f"{told.root}: {told.error}", target=target)
    if told.hung:
        more = "".join(f"; {note}" for note in told.notes)
        # Python's own start and imports are from the local disk: that they are slow says nothing of the store.
        mine = told.step in ("start", "open the store") or told.step.startswith("import ")
        # Most of the time went elsewhere, on a busy host or in steps before: it is not known that this one hangs.
        mine = mine or told.step_seconds < timeout_seconds / 2
        yield Finding(
            status=Status.UNKNOWN if mine else Status.FAIL,
            reason="Timeout" if mine else "StoreHangs",
            message=f"{told.root}: {told.hung}: did not finish within {timeout_seconds:g} s{more}",
            target=target,
        )


def still_stuck(ctx: Context[Any]) -> dict[str, int]:
    """Root -> process of an earlier run that the kernel still holds: starting another would only add to them."""
    if ctx.previous is None:
        return {}
    found: dict[str, int] = {}
    for evidence in ctx.previous.evidence:
        for root, (pid, started) in evidence.data.get("stuck", {}).items():
            if _started(int(pid)) == started:
                found[str(root)] = int(pid)
    return found


def stuck_evidence(reports: Sequence[Told], earlier: Mapping[str, int]) -> Iterator[Evidence]:
    """What a later run must know of the processes that are still there."""
    pids = {**earlier, **{told.root: told.pid for told in reports if told.hung and told.pid}}
    there = {root: [pid, started] for root, pid in pids.items() if (started := _started(pid)) is not None}
    if there or earlier:
        yield Evidence(target="node", key="node", data={"stuck": there})


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None where there is none, or it is but a corpse."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]
