"""
A hundred thousand nodes in the memory of one aggregator, without sockets: what decisions and the page cost there.

    python -m tests.benchmarks.bench_memory --nodes 100000
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from healthd.aggregator.application import make_app
from healthd.aggregator.engine import Engine, steady_clock
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.store import Store
from healthd.aggregator.validation import advance, begin
from healthd.core.model import GateRequest, NodeState, SyncRequest
from healthd.core.wire import decode, encode
from tests.aggregator.application import parts_of_test
from tests.aggregator.parts import enrol_anybody
from tests.benchmarks.bench_gate import resident_bytes
from tests.benchmarks.figures import Bench, Figure, Reading, Scale
from tests.benchmarks.processes import timed
from tests.benchmarks.simulated import state_template

LIMIT_SECONDS = 300.0
OF_ONE_GATE = 64
OF_ONE_VALIDATION = 1000
ROUNDS = 5

DECISION = Figure(name="decision_100000", what="gate for 64 of 100,000 nodes in memory", unit="seconds", upper=0.1)
PLAN = Figure(
    name="plan_100000", what="first groups of a validation of 1,000 of these nodes", unit="seconds", upper=1.0
)
PAGE = Figure(name="page_100000", what="the page of these nodes", unit="seconds", upper=0.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """Seconds; bytes of a node."""

    nodes: int
    decision: tuple[float, ...]
    plan: tuple[float, ...]
    first_page: float
    page: tuple[float, ...]
    node_bytes: float


async def bench(folder: Path, nodes: int) -> MemoryRun:
    """Let the nodes sync, then ask."""
    store = Store.open(f"sqlite:///{folder}/aggregator.db")
    try:
        clock = steady_clock()
        fleet = Fleet(
            issuer=store.store_id, enrol=enrol_anybody, silent_seconds=3600.0, max_nodes=nodes + 1, clock=clock
        )
        policy = Policy(
            tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, collective=False, silent_seconds=3600.0
        )
        engine = Engine(store=store, registry=fleet, policy=policy, clock=clock)
        parts = parts_of_test(folder, store=store, fleet=fleet, engine=engine)
        template = decode(state_template(), NodeState, what="a state")
        gc.collect()
        before = resident_bytes(os.getpid())
        for number in range(nodes):
            await _join(fleet, dataclasses.replace(template, node=f"node-{number:06}"))
        gc.collect()
        gc.freeze()
        node_bytes = (resident_bytes(os.getpid()) - before) / nodes
        await engine.run_once()
        decision = [await _asked(engine, f"small-{n}", OF_ONE_GATE) for n in range(ROUNDS)]
        plan = [_planned(fleet, policy, clock()) for _ in range(2)]
        transport = httpx.ASGITransport(make_app(parts))
        pages = []
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60.0) as http:
            for _ in range(ROUNDS):
                began = time.perf_counter()
                (await http.get("/")).raise_for_status()
                pages.append(time.perf_counter() - began)
    finally:
        store.close()
    return MemoryRun(
        nodes=nodes,
        decision=tuple(decision),
        plan=tuple(plan),
        first_page=pages[0],
        page=tuple(pages[1:]),
        node_bytes=node_bytes,
    )


def _planned(fleet: Fleet, policy: Policy, now: float) -> float:
    """The seconds in which a validation of a thousand of them is begun and its first groups are chosen."""
    names = fleet.names()[:OF_ONE_VALIDATION]
    nodes = {name: node for name in names if (node := fleet.node(name, now)) is not None}
    began = time.perf_counter()
    validation = begin(now, "bench", tuple(nodes), nodes, policy, deadline=now + 600.0)
    advance(now, validation, nodes, policy, lambda _count: ())
    return time.perf_counter() - began


async def _join(fleet: Fleet, state: NodeState) -> None:
    first = SyncRequest(
        protocol=1,
        incarnation="i1",
        seq=1,
        last_answer=None,
        since_answer_seconds=None,
        state=state,
        digest="d1",
        ages={},
        orders={},
        issuer=None,
    )
    answer = await fleet.sync(state.node, f"key-of-{state.node}", first, 0.0)
    ages = {result.check: 1.0 for result in state.results}
    again = dataclasses.replace(
        first, seq=2, state=None, last_answer=answer.answer, since_answer_seconds=0.0, ages=ages
    )
    await fleet.sync(state.node, f"key-of-{state.node}", again, 0.0)


async def _asked(engine: Engine, job: str, count: int) -> float:
    """The seconds of the pass that decides it: from the request to its leases on disk."""
    request = GateRequest(job=job, pool="bench", count=count, lease=False)
    began = time.perf_counter()
    asked = asyncio.create_task(engine.ask(request))
    await asyncio.sleep(0)
    await engine.run_once()
    gate = await asked
    seconds = time.perf_counter() - began
    if gate.decision is None or gate.decision.decision != "admit":
        raise RuntimeError(f"{job}: {[] if gate.decision is None else gate.decision.reasons[:1]}")
    return seconds


def memory(scale: Scale) -> Iterator[Reading]:
    """Run the program: its memory is its own."""
    command = (sys.executable, "-m", "tests.benchmarks.bench_memory", "--json", "--nodes", scale.of("100000", "500"))
    _, text = timed(command, seconds=LIMIT_SECONDS)
    run = decode(text.encode(), MemoryRun, what="the output of bench_memory")
    yield Reading(figure=DECISION.name, value=statistics.median(run.decision), note=f"{run.nodes} nodes; SQLite")
    yield Reading(figure=PLAN.name, value=statistics.median(run.plan), note=f"{run.nodes} nodes")
    note = f"{run.nodes} nodes, {run.node_bytes / 1e3:.1f} kB each; the first view {PAGE.shown(run.first_page)}"
    yield Reading(figure=PAGE.name, value=statistics.median(run.page), note=note)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="for a program")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        run = asyncio.run(bench(Path(folder), arguments.nodes))
    if arguments.json:
        print(encode(run).decode())
        return
    print(f"{run.nodes} nodes, {run.node_bytes / 1e3:.1f} kB each")
    for name, seconds in (
        ("gate for 64", run.decision),
        ("plan of a validation", run.plan),
        ("the first page", (run.first_page,)),
        ("the page again", run.page),
    ):
        print(f"  {name:22}{1e3 * statistics.median(seconds):8.0f} ms")


BENCHES = (Bench(name="memory", figures=(DECISION, PLAN, PAGE), run=memory, limit_seconds=LIMIT_SECONDS),)

if __name__ == "__main__":
    main()
