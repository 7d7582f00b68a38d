"""
How fast is the gate over a large fleet? A real aggregator process, and thousands of simulated nodes in this one.

Every node keeps a connection, its sync held for ten seconds and sent again, so that a fleet of 10,000 makes 1,000 syncs
a second. Meanwhile gates for 64 nodes of one pool are asked one after the other. Printed: the time of a gate from its
arrival to its leases on disk (before the lease's round trip), the whole time as its caller sees it, and the syncs.

    python tests/benchmarks/bench_gate.py --nodes 10000 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from checks.contract import Tier  # noqa: E402
from healthd.fleet.app import run_aggregator  # noqa: E402
from healthd.fleet.policy import Policy  # noqa: E402
from healthd.fleet.settings import AggregatorSettings  # noqa: E402
from healthd.wire import encode  # noqa: E402
from tests.fleet.parts import result, spec, state  # noqa: E402

KEY = "0123456789abcdef0123456789abcdef"
PASSIVE, QUICK = [f"passive_{n}" for n in range(12)], [f"quick_{n}" for n in range(7)]
SYNC_SECONDS = 10.0
JOINING_AT_ONCE = 200


def state_template() -> bytes:
    """A node named @ with the checks of the quick tier, all passed a moment ago, as JSON."""
    specs = [spec(n, tier=Tier.PASSIVE, expires=300.0) for n in PASSIVE] + [spec(n) for n in QUICK]
    results = [result(s.name, age=1.0, tier=s.tier) for s in specs]
    return encode(state("@", pool="bench", checks=tuple(specs), results=tuple(results)))


# Nodes must cost less than the aggregator: their JSON is put together from pieces.
STATE = state_template()
AGES = encode(dict.fromkeys((*PASSIVE, *QUICK), 1.0))


class Node:
    """One simulated node on one connection."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.seq, self.digest, self.answer, self.received = 0, 0, None, 0.0
        self.leases: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        await self.sync(full=True, wait=0)
        await self.sync(wait=0)

    async def sync(self, *, full: bool = False, wait: float = SYNC_SECONDS) -> None:
        self.seq += 1
        self.digest += full
        since = json.dumps(time.monotonic() - self.received if self.answer else None)
        last = json.dumps(self.answer)
        said = f'"incarnation":"i1","seq":{self.seq},"last_answer":{last},"since_answer_seconds":{since}'
        more = f'"digest":"{self.digest}","orders":{json.dumps(self.reports)},"issuer":null'
        state, ages = (self.state(), b"{}") if full else (b"null", AGES)
        body = b'{"protocol":1,%s,%s,"state":%s,"ages":%s}' % (said.encode(), more.encode(), state, ages)
        head = f"POST /v1/nodes/{self.name}/sync?wait={wait:.0f} HTTP/1.1\r\nhost: a\r\nx-healthd-node-key: {KEY}\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = json.loads((await read_answer(self.reader))[1])
        self.answer, self.received = answer["answer"], time.monotonic()
        self.reports = {i: r for i, r in self.reports.items() if i not in answer["acknowledged"]}
        if answer["orders"] is not None:
            self.take({order["id"]: order for order in answer["orders"]})

    fresh = True
    """False when there is something that a held request would keep to itself."""

    def state(self) -> bytes:
        held = [{"by": "lease", "holder": lease["job"]} for lease in self.leases.values()]
        return (
            STATE.replace(b'"node":"@"', f'"node":"{self.name}"'.encode())
            .replace(b'"allocated":[]', f'"allocated":{json.dumps(held)}'.encode())
            .replace(b'"leases":[]', f'"leases":{json.dumps(list(self.leases.values()))}'.encode())
        )

    def take(self, orders: dict[str, Any]) -> None:
        for order_id, order in orders.items():
            if order["kind"] == "lease" and order_id not in self.leases:
                self.leases[order_id] = order["lease"]
                self.reports[order_id] = {"status": "accepted"}
                self.fresh = False
        for order_id in set(self.leases) - set(orders):
            del self.leases[order_id]
            self.reports[order_id] = {"status": "cancelled"}
            self.fresh = False

    async def live(self) -> None:
        await asyncio.sleep(random.uniform(0, SYNC_SECONDS))
        while True:
            full, self.fresh = not self.fresh, True
            await self.sync(full=full, wait=0 if full else SYNC_SECONDS)


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The milliseconds up to the grant (nan where none is told) and the body; an error ends the benchmark."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise SystemExit(f"{head.decode()}{body.decode()}")
    return head.partition(b"server-timing: grant;dur=")[2].split(b"\r\n")[0] or b"nan", body


async def ask(port: int, number: int, count: int) -> tuple[float, float]:
    """One gate: milliseconds up to the grant, and as its caller sees it; its nodes are given back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=16 << 20)
    body = json.dumps({"job": f"job-{number}", "pool": "bench", "count": count}).encode()
    began = time.perf_counter()
    writer.write(b"POST /v1/gates?wait=25 HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    grant, answer = await read_answer(reader)
    whole = 1000 * (time.perf_counter() - began)
    decision = json.loads(answer)
    if decision["decision"] != "admit":
        raise SystemExit(f"gate {number}: {decision['decision']}: {[r['message'] for r in decision['reasons']][:3]}")
    writer.write(f"DELETE /v1/gates/{decision['id']}/lease HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await read_answer(reader)
    writer.close()
    return float(grant), whole


async def bench(arguments: argparse.Namespace, port: int, pid: int) -> None:
    nodes = [Node(f"node-{number:05}", port) for number in range(arguments.nodes)]
    began = time.perf_counter()
    for start in range(0, len(nodes), JOINING_AT_ONCE):
        await asyncio.gather(*(node.open() for node in nodes[start : start + JOINING_AT_ONCE]))
    joined = time.perf_counter() - began
    tasks = [asyncio.create_task(node.live()) for node in nodes]
    await asyncio.sleep(SYNC_SECONDS + 0.5)  # from here on every node has a request held
    syncs, cpu, begin = sum(n.seq for n in nodes), cpu_seconds(pid), time.perf_counter()
    grants, wholes = [], []
    while time.perf_counter() - begin < arguments.seconds:
        grant, whole = await ask(port, len(grants), arguments.count)
        grants.append(grant)
        wholes.append(whole)
        await asyncio.sleep(arguments.pause)
    seconds = time.perf_counter() - begin
    rate = (sum(n.seq for n in nodes) - syncs) / seconds
    used = (cpu_seconds(pid) - cpu) / seconds
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    print(f"nodes {len(nodes)}, joined in {joined:.1f} s; gates of {arguments.count}: {len(grants)} in {seconds:.0f} s")
    print(f"{'':34}{'p50':>10}{'p99':>10}{'max':>10}")
    for name, values in (("gate up to its leases on disk, ms", grants), ("gate as its caller sees it, ms", wholes)):
        p99 = statistics.quantiles(values, n=100, method="inclusive")[98]
        print(f"{name:34}{statistics.median(values):10.1f}{p99:10.1f}{max(values):10.1f}")
    print(f"syncs {rate:.0f}/s; nodes lost: {len(broken)}")
    print(f"aggregator: {used:.0%} of one core, {resident_bytes(pid) / 1e6:.0f} MB resident")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Its resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(state_dir: str) -> None:
    """The aggregator, in a process of its own."""
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=Path(state_dir))
    policy = Policy(settle_seconds=0.0, recovery_seconds=0.0, collective=False)
    asyncio.run(run_aggregator(settings, policy, on_ready=lambda address: print(address, flush=True)))


def main() -> None:
    """Start the aggregator, run the benchmark, end the aggregator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=64, help="nodes of one gate")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two gates")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    gc.disable()  # this process simulates: its pauses are not the aggregator's
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, arguments.nodes + 1000) if hard > 0 else soft, hard))
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        command = [sys.executable, __file__, "--serve", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            asyncio.run(asyncio.wait_for(bench(arguments, port, process.pid), 55))
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    main()
