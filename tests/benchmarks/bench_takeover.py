"""
The leader of a large fleet is killed: how long until another one leads, decides a gate, and has every node back.

Two aggregators on a PostgreSQL of their own; the nodes are simulated in one process, each as `tests.drill.nodes` has
it: it finds the other aggregator by itself, with the pauses of a real daemon. As a program:

    python -m tests.benchmarks.bench_takeover --nodes 9000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from healthd.core.model import Decision, GateRequest
from healthd.core.wire import decode, encode
from tests.benchmarks.figures import Bench, Figure, Reading, Scale
from tests.benchmarks.processes import timed
from tests.drill.nodes import POOL, Node
from tests.drill.site import Site, port_of, site

CONFIG = """
[policy]
collective = false
rules = false
"""
HOLD_SECONDS = 25.0
OF_ONE_GATE = 64
LIMIT_SECONDS = 300.0

LEADS = Figure(
    name="takeover_leads", what="leader of 10,000 nodes killed: another one leads", unit="seconds", upper=8.0
)
DECIDES = Figure(name="takeover_decides", what="the same: it has admitted a gate of 64", unit="seconds", upper=10.0)
BACK = Figure(name="takeover_back", what="the same: every node has reported to it", unit="seconds", upper=30.0)


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """Seconds since the leader was killed."""

    nodes: int
    leads: float
    decides: float
    back: float


async def bench(fleet: Site, nodes: int) -> Takeover:
    """Start all of it, kill the leader, and look."""
    await fleet.start([Node(f"node-{number:05}", HOLD_SECONDS) for number in range(nodes)])
    leader = await fleet.quiet()
    asked = GateRequest(job="before", pool=POOL, count=OF_ONE_GATE)
    await fleet.asked("POST", "/v1/gates", params={"wait": "20"}, content=encode(asked))
    (other,) = (service for service in fleet.services if service is not leader)
    began = time.perf_counter()
    leader.signal(signal.SIGKILL)

    async def since(work: asyncio.Future[object]) -> float:
        await work
        return time.perf_counter() - began

    async def decides() -> None:
        again = GateRequest(job="after", pool=POOL, count=OF_ONE_GATE)
        while True:
            answer = await fleet.asked("POST", "/v1/gates", params={"wait": "20"}, content=encode(again))
            assert answer is not None
            if decode(answer.content, Decision, what="the decision").decision == "admit":
                return

    async def back() -> None:
        port = port_of(other)
        while not all(node.at == port for node in fleet.here):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    works = (fleet.leader(but=leader), decides(), back())
    leads, decided, everyone = await asyncio.gather(*(since(asyncio.ensure_future(work)) for work in works))
    await fleet.stop()
    return Takeover(nodes=nodes, leads=leads, decides=decided, back=everyone)


def takeover(scale: Scale) -> Iterator[Reading]:
    """Run the program: thousands of connections need a process of their own."""
    command = (sys.executable, "-m", "tests.benchmarks.bench_takeover", "--json", "--nodes", scale.of("9000", "200"))
    _, text = timed(command, seconds=LIMIT_SECONDS)
    run = decode(text.encode(), Takeover, what="the output of bench_takeover")
    note = f"{run.nodes} nodes, PostgreSQL with fsync off; killed by SIGKILL"
    for figure, seconds in ((LEADS, run.leads), (DECIDES, run.decides), (BACK, run.back)):
        yield Reading(figure=figure.name, value=seconds, note=note)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=9000)
    parser.add_argument("--json", action="store_true", help="for a program")
    arguments = parser.parse_args(argv)
    gc.disable()  # this process simulates
    with site(aggregators=2, nodes=arguments.nodes, config=CONFIG, executed=True) as fleet:
        run = asyncio.run(asyncio.wait_for(bench(fleet, arguments.nodes), LIMIT_SECONDS))
    if arguments.json:
        print(encode(run).decode())
        return
    print(f"{run.nodes} nodes; after the leader was killed another one")
    print(f"  leads after {run.leads:.1f} s, has admitted a gate of {OF_ONE_GATE} after {run.decides:.1f} s,")
    print(f"  and has heard every node after {run.back:.1f} s")


BENCHES = (Bench(name="takeover", figures=(LEADS, DECIDES, BACK), run=takeover, limit_seconds=LIMIT_SECONDS),)

if __name__ == "__main__":
    main()
