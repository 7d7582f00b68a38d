"""
Nodes of the drill and the soak: each follows the leader as a real one does, runs its checks when it is told to, breaks,
mends and boots, and keeps the facts of all that. What an aggregator says of it is held against these facts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from checks.contract import Status, Tier
from healthd.core.backoff import Backoff
from healthd.core.wire import encode
from tests.aggregator.parts import result, spec, state
from tests.benchmarks.simulated import PASSIVE, QUICK, SimulatedNode

POOL = "bench"
SLACK_SECONDS = 10.0
"""A node takes an aggregator for gone that has not answered for so long beyond its hold."""
CONNECT_SECONDS = 5.0
BACKOFF = Backoff(0.5, 30.0)
"""As of real nodes."""
GONE_SECONDS = 12.0
"""When a node that has left must be known to be gone: the `silent` of CONFIG in `site`, and a turn of the engine."""
KEPT_FACTS = 200

QUICK_AGE = 111.25
BOOT = "@boot@"


class Kind(Enum):
    """What can happen to a node."""

    PASSED = "its checks passed"
    FAILED = "a check failed"
    BOOTED = "it booted, so that what it had run before is no evidence"
    LEFT = "it left"


@dataclass
class Fact:
    """Something that happened to a node; `told` is when an aggregator had answered that it knows it. Monotonic."""

    kind: Kind
    at: float
    told: float = math.inf


def fit_between(facts: Iterable[Fact], begin: float, end: float, max_age_seconds: float) -> bool:
    """
    Whether a node could rightly be taken for fit at any moment of that time: its checks had passed, not longer ago than
    `max_age_seconds`, and nothing was known that speaks against it. Facts in their order.
    """
    known = list(facts)
    for number, fact in enumerate(known):
        if fact.kind is not Kind.PASSED:
            continue
        against = min((later.told for later in known[number:] if later.kind is not Kind.PASSED), default=math.inf)
        if fact.at <= end and min(fact.at + max_age_seconds, against) >= begin:
            return True
    return False


class RefusedError(Exception):
    """No answer that a node can use. `leader`: the port of the leader, where known; `seconds`: for how long to wait."""

    def __init__(self, leader: int | None, seconds: float) -> None:
        super().__init__(leader, seconds)
        self.leader, self.seconds = leader, seconds


def _template(quick: Status | None) -> bytes:
    """A node named @; `quick` is the status of the first check of the quick tier, None where that tier has not run."""
    specs = [spec(n, tier=Tier.PASSIVE, expires=300.0) for n in PASSIVE] + [spec(n) for n in QUICK]
    results = [result(name, age=0.0, tier=Tier.PASSIVE) for name in PASSIVE]
    if quick is not None:
        results += [result(n, age=QUICK_AGE, status=quick if n == QUICK[0] else Status.PASS) for n in QUICK]
    return encode(state("@", pool=POOL, boot_id=BOOT, checks=tuple(specs), results=tuple(results)))


_TEMPLATES = {status: _template(status) for status in (None, Status.PASS, Status.FAIL)}
_PASSIVE_AGES = encode(dict.fromkeys(PASSIVE, 0.0))
_AGES = encode(dict.fromkeys(PASSIVE, 0.0) | dict.fromkeys(QUICK, QUICK_AGE))


_CONNECTING = asyncio.Semaphore(200)
"""Thousands of hosts ask as soon as they are connected; one process for all of them would come to it much later."""


class Node(SimulatedNode):
    """`twice` counts answers that left it with two leases; `at` is the port of the aggregator that answered last."""

    def __init__(self, name: str, sync_seconds: float, *, bad: bool = False) -> None:
        """`bad`: one of its checks fails from the beginning on."""
        super().__init__(name, 0, sync_seconds)
        self.ports: Sequence[int] = ()
        self.bad = bad
        self.at, self.twice, self.boots = 0, 0, 0
        self.facts: deque[Fact] = deque(maxlen=KEPT_FACTS)
        self.kept_out_since = math.inf
        """Since when an aggregator has confirmed a quarantine by a person that has not been taken back."""
        self.writer: asyncio.StreamWriter | None = None  # type: ignore[assignment]
        self._quick: tuple[Status, float] | None = None
        self._untold: list[Fact] = []
        self.run_checks()

    # --- what happens to it -------------------------------------------------------------------------------------------

    def run_checks(self) -> None:
        """Run the quick tier now."""
        now = time.monotonic()
        self._quick = (Status.FAIL if self.bad else Status.PASS, now)
        self._note(Kind.FAILED if self.bad else Kind.PASSED, now)

    def boot(self) -> None:
        """Boot, while it is not running: leases are over, and what was run before is no evidence."""
        self.boots += 1
        self.seq, self.answer = 0, None
        self.reports = {lease: {"status": "cancelled", "message": "the node has booted"} for lease in self.leases}
        self.leases, self._quick = {}, None
        self.ran.clear()
        self._note(Kind.BOOTED, time.monotonic())

    def leave(self) -> None:
        """It is cut off and tells nobody."""
        now = time.monotonic()
        self.facts.append(Fact(Kind.LEFT, now, told=now + GONE_SECONDS))
        self.at = 0

    def gone_since(self, moment: float) -> bool:
        """Whether it has booted or left since, with which a job there ends and so does its lease."""
        return any(fact.kind in (Kind.BOOTED, Kind.LEFT) and fact.at >= moment for fact in self.facts)

    def _note(self, kind: Kind, now: float) -> None:
        fact = Fact(kind, now)
        self.facts.append(fact)
        self._untold.append(fact)
        self.told = False

    # --- its line to the leader ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sync for ever, with whoever leads."""
        failures = 0
        while True:
            connected, pause = await self._connect()
            if connected:
                failures = 0
                with contextlib.suppress(RefusedError, OSError, asyncio.IncompleteReadError):
                    await self.live()
            else:
                failures += 1
                await asyncio.sleep(min(BACKOFF.after(failures), pause) * random.uniform(0.5, 1.0))
            self._close()

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    async def _connect(self) -> tuple[bool, float]:
        """Try all aggregators, and whom they name; whether one answers, else how long the node was asked to wait."""
        pause = math.inf
        for listed in self.ports:
            self.port = listed
            for _ in range(3):
                try:
                    async with _CONNECTING, asyncio.timeout(CONNECT_SECONDS):
                        await self.open()
                except RefusedError as refused:
                    self._close()
                    pause = min(pause, refused.seconds)
                    if refused.leader is None:
                        break
                    self.port = refused.leader
                except (OSError, asyncio.IncompleteReadError):
                    self._close()
                    break
                else:
                    return True, 0.0
        return False, pause

    async def sync(self, *, full: bool = False, used: bool = False, wait: float) -> None:
        assert self.writer is not None
        said = list(self._untold) if full else []
        body = self.body(full=full, used=used)
        head = f"POST /v1/nodes/{self.name}/sync?wait={wait:g} HTTP/1.1\r\nhost: a\r\n"
        head += f"x-healthd-node-key: {self.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        slack = min(SLACK_SECONDS, self.sync_seconds) if wait else SLACK_SECONDS
        async with asyncio.timeout(wait + slack):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
            answer = await self.reader.readexactly(int(headers["content-length"]))
        if lines[0].split()[1] != "200":
            leader = headers.get("leader")
            seconds = float(headers.get("retry-after", "inf"))
            raise RefusedError(None if leader is None else int(leader.rpartition(":")[2]), seconds)
        self.at = self.port
        now = time.monotonic()
        for fact in said:
            fact.told = now
        self._untold = [fact for fact in self._untold if fact.told == math.inf]
        self.heed(answer)
        self.twice += len(self.leases) > 1

    def heed(self, text: bytes) -> None:
        before = len(self.ran)
        super().heed(text)
        if len(self.ran) != before:
            self.run_checks()

    def state(self) -> bytes:
        """The whole state as it is now."""
        template = _TEMPLATES[None if self._quick is None else self._quick[0]]
        held = [{"by": "lease", "holder": lease["job"]} for lease in self.leases.values()]
        return (
            template.replace(b'"@"', f'"{self.name}"'.encode())
            .replace(BOOT.encode(), f"boot-{self.boots}".encode())
            .replace(str(QUICK_AGE).encode(), self._age())
            .replace(b'"allocated":[]', f'"allocated":{json.dumps(held)}'.encode())
            .replace(b'"leases":[]', f'"leases":{json.dumps(list(self.leases.values()))}'.encode())
        )

    def ages(self) -> bytes:
        """The age of each result."""
        return _PASSIVE_AGES if self._quick is None else _AGES.replace(str(QUICK_AGE).encode(), self._age())

    def incarnation(self) -> str:
        return f"i{self.boots}"

    def _age(self) -> bytes:
        since = time.monotonic() if self._quick is None else self._quick[1]
        return f"{time.monotonic() - since:.3f}".encode()


def trouble_with(node: Node, asked: float, answered: float, max_age_seconds: float) -> str | None:
    """Why an admission with this node, asked and answered then, is one without evidence; None where it is not."""
    if node.kept_out_since <= asked:
        return "a person keeps it out"
    if fit_between(node.facts, asked, answered, max_age_seconds):
        return None
    last = ", ".join(
        f"{fact.kind.value} {answered - fact.at:.1f} s before" for fact in itertools.islice(reversed(node.facts), 3)
    )
    return f"nothing that it ran speaks for it at that time; {last}"
