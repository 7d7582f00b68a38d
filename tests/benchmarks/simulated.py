"""
Simulated nodes for `bench_gate.py` and `bench_postmortem.py`: each keeps a connection, its sync held and sent again,
takes its leases, and has run its checks as soon as it is ordered to.

Nodes must cost less than the aggregator, so their JSON is put together from pieces; a test decodes it by the product's
own types.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import re
import ssl
import time
from typing import Any

from checks.contract import Status, Tier
from healthd.core.wire import encode
from tests.aggregator.parts import result, spec, state

PASSIVE, QUICK = [f"passive_{n}" for n in range(12)], [f"quick_{n}" for n in range(7)]


def state_template(*, bad: bool = False) -> bytes:
    """A node named @ with the checks of the quick tier, all passed just now, as JSON; `bad`: one of them has failed."""
    specs = [spec(n, tier=Tier.PASSIVE, expires=300.0) for n in PASSIVE] + [spec(n) for n in QUICK]
    failed = {QUICK[0]} if bad else set()
    results = [
        result(s.name, age=1.0, tier=s.tier, status=Status.FAIL if s.name in failed else Status.PASS) for s in specs
    ]
    return encode(state("@", labels={"pool": "bench"}, checks=tuple(specs), results=tuple(results)))


STATE = state_template()
AGES = encode(dict.fromkeys((*PASSIVE, *QUICK), 1.0))


class SimulatedNode:
    """
    One node on one connection. `sync_seconds` is how long it lets the aggregator hold a sync; `gap_seconds` is the
    longest time that lay between two answers.
    """

    def __init__(
        self,
        name: str,
        port: int,
        sync_seconds: float,
        tls: ssl.SSLContext | None = None,
        *,
        template: bytes = STATE,
    ) -> None:
        self.name, self.port, self.sync_seconds, self.tls = name, port, sync_seconds, tls
        self.template = template
        # One of its own: a key that many names share is that of one node which changed its name again and again.
        self.key = f"key-of-{name:-<32}"
        self.gap_seconds = 0.0
        self.seq, self.digest, self.received = 0, 0, 0.0
        self.answer: str | None = None
        self.leases: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}
        self.ran: set[str] = set()
        """Orders to run checks that it has carried out."""
        self.used = False
        """Whether only who uses it is to be told."""
        self.told = True
        """False when there is something that a held request would keep to itself."""

    async def open(self) -> None:
        """Connect, and be known to the aggregator."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20, ssl=self.tls)
        await self.sync(full=True, wait=0)
        await self.sync(wait=0)

    async def change(self, template: bytes) -> None:
        """
        Say at once that it is in another state, and sync for ever: by a second connection, as a daemon does, since the
        first one's request is held.
        """
        self.template, held = template, self.writer
        await self.open()
        held.close()
        await self.live()

    async def live(self) -> None:
        """
        Keep a sync held. The first ones are for a part of the time, so that the nodes of a fleet spread out: two,
        because the first one is answered at once where there is something to tell a node that is new.
        """
        early = [round(random.uniform(0, self.sync_seconds), 3) for _ in range(2)]
        while True:
            full, self.told = not self.told, True
            used, self.used = self.used, False
            wait = early.pop() if early else self.sync_seconds
            await self.sync(full=full, used=used, wait=0 if full or used else wait)

    async def sync(self, *, full: bool = False, used: bool = False, wait: float) -> None:
        """One request and its answer. An answer that is none ends the benchmark."""
        body = self.body(full=full, used=used)
        path = f"/v1/nodes/{self.name}/sync?wait={wait:g}"
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nx-healthd-node-key: {self.key}\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.heed((await read_answer(self.reader)).body)

    def body(self, *, full: bool, used: bool = False) -> bytes:
        """The next sync: with the whole state, with who uses it, or with the ages alone."""
        self.seq += 1
        use = b"null"
        if used and not full:
            held = [{"by": "lease", "holder": lease["job"]} for lease in self.leases.values()]
            said = {"since": str(self.digest), "allocated": held, "leases": list(self.leases.values()), "running": None}
            use = json.dumps(said).encode()
        self.digest += full or used
        since = json.dumps(time.monotonic() - self.received if self.answer else None)
        last = json.dumps(self.answer)
        known = (
            f'"incarnation":"{self.incarnation()}","seq":{self.seq},"last_answer":{last},"since_answer_seconds":{since}'
        )
        more = f'"digest":"{self.digest}","orders":{json.dumps(self.reports)},"issuer":null'
        state, ages = (self.state(), b"{}") if full else (b"null", self.ages())
        parts = (known.encode(), more.encode(), state, use, ages)
        return b'{"protocol":1,%s,%s,"state":%s,"use":%s,"ages":%s}' % parts

    def incarnation(self) -> str:
        """Which start of its daemon it is."""
        return "i1"

    def ages(self) -> bytes:
        """How old its results are, as JSON."""
        return AGES

    def state(self) -> bytes:
        """What it would report of itself."""
        held = [{"by": "lease", "holder": lease["job"]} for lease in self.leases.values()]
        return (
            self.template.replace(b'"node":"@"', f'"node":"{self.name}"'.encode())
            .replace(b'"age_seconds":1.0', b'"age_seconds":0.0' if self.ran else b'"age_seconds":1.0')
            .replace(b'"allocated":[]', f'"allocated":{json.dumps(held)}'.encode())
            .replace(b'"leases":[]', f'"leases":{json.dumps(list(self.leases.values()))}'.encode())
        )

    def heed(self, text: bytes) -> None:
        """Take the leases and run the checks that an answer orders, and end leases whose orders are withdrawn."""
        answer = json.loads(text)
        now = time.monotonic()
        if self.answer is not None:
            self.gap_seconds = max(self.gap_seconds, now - self.received)
        self.answer, self.received = answer["answer"], now
        self.reports = {i: r for i, r in self.reports.items() if i not in answer["acknowledged"]}
        if answer["send_all"]:
            self.told = False
        if answer["orders"] is None:
            return
        for order in answer["orders"]:
            order_id, withdrawn = order["id"], order["withdrawn"]
            if order["kind"] == "run" and not withdrawn and order_id not in self.ran:
                self.ran.add(order_id)
                self.reports[order_id] = {"status": "done"}
                self.told = False
            if order["kind"] != "lease" or withdrawn != (order_id in self.leases):
                continue
            if withdrawn:
                del self.leases[order_id]
            else:
                self.leases[order_id] = order["lease"]
            self.reports[order_id] = {"status": "cancelled" if withdrawn else "accepted"}
            self.used = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """
    A body, and what the aggregator says of a gate in it, in seconds: up to its leases on disk, of these for computing
    and in the database; nan where it says nothing.
    """

    body: bytes
    grant: float
    compute: float
    store: float


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer; an error ends the benchmark."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise SystemExit(f"{head.decode()}{body.decode()}")
    times = {m[1]: float(m[2]) / 1e3 for m in re.finditer(rb"(\w+);dur=([0-9.]+)", head)}
    return Answer(body=body, **{name: times.get(name.encode(), math.nan) for name in ("grant", "compute", "store")})
