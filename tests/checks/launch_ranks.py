"""
Runs groups of ranks for tests: one order a line on stdin, one answer a line on stdout.

Each rank is a fork of this process, so torch is imported once. It stands in for the runner: it
collects what they yield, kills what does not end, and says what is missing and in which order ranks ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checks.accelerators import cpu
from checks.contract import Context, Evidence, Finding, Group, Limit, Progress, Tier, load_params
from checks.discover import builtin_checks
from checks.host.machine import Host
from checks.worker.fault_injection import FaultyDevice


def be_a_rank(order: dict[str, Any], rank: int, output: int) -> None:
    """Run all checks of the order in one process group, one JSON line for each thing that they yield."""
    size, fault = order["size"], order["faults"].get(str(rank), {"kind": "none", "event": None})
    if fault["kind"] == "absent":
        strike("hang", output)
    inventory = cpu.find(Host(None), {"cpu_devices": size})
    device: Any = cpu.bind(f"cpu:{rank}", inventory, {})
    if fault["kind"] in ("corrupt", "slow"):
        places = fault.get("places", {})
        device = FaultyDevice(
            device, factor=fault.get("factor", 1.0), corrupt=fault["kind"] == "corrupt" and not places, places=places
        )
    for number, name in enumerate(order["checks"]):
        check = builtin_checks(("checks.collective",))[name]
        context: Context[Any] = Context(
            host=Host(None),
            params=load_params(check.params_type, order["params"]),
            tier=Tier.QUICK,
            device=device,
            group=Group(
                rank=rank,
                size=size,
                rendezvous=order["rendezvous"] + (f"-{number}" if order["fresh_groups"] else ""),
                interface=None,
                seed=7,
                timeout_seconds=order["timeout_seconds"],
                targets=tuple(f"cpu:{index}" for index in range(size)),
            ),
            previous=None,
            inventory=inventory,
            limits={key: Limit(**value) for key, value in order["limits"].items()},
        )
        for item in check(context):
            if isinstance(item, Progress) and [item.step, item.event] == fault["event"]:
                strike(fault["kind"], output)
            line = {"kind": type(item).__name__, "check": number, "item": dataclasses.asdict(item)}
            os.write(output, json.dumps(line).encode() + b"\n")


def strike(kind: str, output: int) -> None:
    if kind == "hang":
        os.write(output, b'{"kind": "hangs"}\n')
        time.sleep(3600)
    elif kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raise":
        raise ValueError("the check itself is broken")


def start(order: dict[str, Any], rank: int, others: list[int]) -> tuple[int, int]:
    """(pid, descriptor of what it says)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    for descriptor in (read, *others):
        os.close(descriptor)
    code = 1
    try:
        be_a_rank(order, rank, write)
        code = 0
    except Exception as error:  # noqa: BLE001  whatever it was, the test shall read it
        os.write(write, json.dumps({"kind": "raised", "item": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    finally:
        os._exit(code)


def collect(order: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks and read them until each has ended or is known to wait in vain, or the deadline has passed."""
    pids: list[int] = []
    pipes: list[int] = []
    for rank in range(order["size"]):
        pid, pipe = start(order, rank, pipes)
        pids.append(pid)
        pipes.append(pipe)
    said = dict.fromkeys(pipes, b"")
    ended: list[int] = []
    deadline = time.monotonic() + order["deadline_seconds"]
    while not all(one in ended or stands(said[one], order) for one in pipes) and time.monotonic() < deadline:
        ready, _, _ = select.select([p for p in pipes if p not in ended], [], [], max(0, deadline - time.monotonic()))
        for pipe in ready:
            chunk = os.read(pipe, 65536)
            said[pipe] += chunk
            if not chunk:
                ended.append(pipe)
    answer: dict[str, Any] = {"evidence": [[] for _ in order["checks"]], "missing": []}
    for rank, (pid, pipe) in enumerate(zip(pids, pipes, strict=True)):
        if pipe not in ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        lines = [json.loads(line) for line in said[pipe].splitlines()]
        found = [line for line in lines if line["kind"] in (Evidence.__name__, Finding.__name__)]
        for line in found:
            answer["evidence"][line["check"]].append(line["item"])
        if len(found) < len(order["checks"]):
            raised = [line["item"] for line in lines if line["kind"] == "raised"]
            reason = "Timeout" if pipe not in ended else "CheckError" if raised else "Crashed"
            missing = {
                "target": f"rank:{rank}",
                "reason": reason,
                "message": raised[0] if raised else f"wait status {status}",
                "progress": [line["item"] for line in lines if line["kind"] == Progress.__name__],
                "order": ended.index(pipe) if pipe in ended else None,
            }
            answer["missing"].append(missing)
    return answer


def stands(said: bytes, order: dict[str, Any]) -> bool:
    """Whether a rank hangs as it was told to, or is at the place where those that wait for such a one are."""
    items = [json.loads(line) for line in said[: said.rfind(b"\n") + 1].splitlines()]
    places = [[one["item"]["step"], one["item"]["event"]] for one in items if one["kind"] == Progress.__name__]
    return order["waits_at"] in places or any(one["kind"] == "hangs" for one in items)


def main() -> None:
    cpu._import_torch()
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.write(json.dumps(collect(order)) + "\n")
        sys.stdout.flush()
    os._exit(0)  # torch takes seconds to leave


if __name__ == "__main__":
    main()
