"""
A job of 64 nodes dies: how long from the last notes to the verdict, by a real aggregator over HTTP?

All members send notes as large as `healthd run` sends them at one moment, each on a connection of its own, and are held
until there is a verdict. With probes each member says at once what the quick tier has found, when it is told to run it;
that takes no time here. The node that is named is then checked by order, which a simulated daemon answers at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from healthd.aggregator.jobs.postmortem_records import PostmortemPhase, PostmortemState
from healthd.core.model import Decision, GateRequest
from healthd.core.wire import decode, encode
from healthd.postmortem.judge import FailedCheck, Measured
from healthd.postmortem.notes import MAX_SENT_TEXT
from tests.aggregator.postmortems_kit import ECC, LOST, body, notes_of
from tests.benchmarks.bench_gate import cpu_seconds
from tests.benchmarks.figures import Bench, Figure, Reading, Scale
from tests.benchmarks.processes import ROOT
from tests.benchmarks.simulated import SimulatedNode, read_answer

FULL = "OSError: [Errno 28] No space left on device\n"
LIMIT_SECONDS = 100.0
HOLD_SECONDS = 20
ENDED_AT = 1.7e9
SYNC_SECONDS = 1.0
ORDINARY = "step {} loss 2.7182 tokens/s 182734 grad_norm 0.31 lr 3.0e-04 mfu 41.2 % memory 61.3 GiB\n"

NOTED = Figure(name="postmortem_64", what="64 nodes: last notes to the verdict", unit="seconds", upper=10.0)
PROBED = Figure(
    name="postmortem_64_probes", what="the same with orders to measure, probes not counted", unit="seconds", upper=60.0
)


@dataclasses.dataclass(frozen=True)
class End:
    """What one end came to: seconds from the last notes to the last of the verdicts, and what it costs."""

    seconds: float
    packed_bytes: int
    cpu_seconds: float
    state: PostmortemState


async def ask(port: int, method: str, path: str, content: bytes = b"") -> bytes:
    """One request on a connection of its own, and its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return (await read_answer(reader)).body
    finally:
        writer.close()


def notes_body(fault: str, *, late: float, found: Measured | None = None, measures: bool = False) -> bytes:
    """
    What a member sends, of a node named @: as much ordinary output as notes hold, and its end.

    Packed once for all nodes, and before the time counts: each `healthd run` does that for itself.
    """
    lines = "".join(ORDINARY.format(step) for step in range(MAX_SENT_TEXT // len(ORDINARY)))
    notes = notes_of(lines + fault, at=ENDED_AT + late)
    measured = dataclasses.replace(notes, measured=() if found is None else (found,))
    return encode(body("@", measured, measures=measures))


@dataclasses.dataclass(frozen=True)
class Ending:
    """What members send: the one with the fault and the others, before and after they have checked their devices."""

    job: str
    faulty: tuple[bytes, ...]
    others: tuple[bytes, ...]


def endings() -> tuple[Ending, Ending]:
    """A full disk, which no probe can say anything of; and a device, which probes confirm."""
    bad = FailedCheck(reason="WrongResult", target="cpu:1", message="product is wrong")
    failed = Measured(node="x", tier="quick", status="fail", problems=(bad,))
    passed = Measured(node="x", tier="quick", status="pass")
    noted = Ending(job="noted", faulty=(notes_body(FULL, late=0.0),), others=(notes_body(LOST, late=1.0),))
    probed = Ending(
        job="probed",
        faulty=tuple(notes_body(ECC, late=0.0, found=found, measures=True) for found in (None, failed)),
        others=tuple(notes_body(LOST, late=1.0, found=found, measures=True) for found in (None, passed)),
    )
    return noted, probed


async def member(port: int, gate: str, node: str, bodies: Sequence[bytes]) -> PostmortemState:
    """As `healthd run` does: send, wait, check the devices when told to, until the last word."""
    step = 0
    while True:
        sent = bodies[step].replace(b'"node":"@"', f'"node":"{node}"'.encode(), 1)
        answer = await ask(port, "POST", f"/v1/gates/{gate}/notes?wait={HOLD_SECONDS}", sent)
        state = decode(answer, PostmortemState, what="the answer")
        if state.postmortem.phase is PostmortemPhase.FINAL:
            return state
        if state.member in state.to_measure:
            step = 1


async def end(port: int, pid: int, names: Sequence[str], ending: Ending) -> End:
    """The end of one job on these nodes; the second one has the fault, the others lost it."""
    job = ending.job
    asked = encode(GateRequest(job=job, nodes=tuple(names)))
    decision = decode(await ask(port, "POST", "/v1/gates?wait=20", asked), Decision, what="the decision")
    if decision.decision != "admit":
        raise RuntimeError(f"gate {job}: {decision.decision}: {'; '.join(r.message for r in decision.reasons)[:300]}")
    cpu, began = cpu_seconds(pid), time.perf_counter()
    states = await asyncio.gather(
        *(member(port, decision.id, name, ending.faulty if name == names[1] else ending.others) for name in names)
    )
    seconds = time.perf_counter() - began
    verdict = states[0].postmortem.verdict
    if verdict is None or verdict.node != names[1] or any(one.postmortem.verdict != verdict for one in states):
        raise RuntimeError(f"job {job}: the verdict is {verdict}")
    await ask(port, "DELETE", f"/v1/gates/{decision.id}/lease")  # the workload has ended on every node
    packed = sum(one.packed_bytes for one in states[0].postmortem.told.values())
    return End(seconds=seconds, packed_bytes=packed, cpu_seconds=cpu_seconds(pid) - cpu, state=states[0])


async def play(port: int, pid: int, count: int, sent: tuple[Ending, Ending]) -> tuple[End, End]:
    """Both ends, one after the other, on nodes that sync meanwhile."""
    nodes = [SimulatedNode(f"n{number}", port, SYNC_SECONDS) for number in range(count)]
    await asyncio.gather(*(node.open() for node in nodes))
    tasks = [asyncio.create_task(node.live()) for node in nodes]
    names = [node.name for node in nodes]
    try:
        noted, probed = [await end(port, pid, names, ending) for ending in sent]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not probed.state.postmortem.by_order:
        raise RuntimeError("the node that was named was not checked by order")
    return noted, probed


def ends(scale: Scale) -> Iterator[Reading]:
    """An aggregator in a process of its own, and both ends."""
    sent = endings()
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        command = [sys.executable, "-m", "tests.benchmarks.bench_gate", "--serve", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            count = scale.of(64, 8)
            noted, probed = asyncio.run(asyncio.wait_for(play(port, process.pid, count, sent), LIMIT_SECONDS - 20))
        except SystemExit as error:  # what a program of its own ends by would end the other benches
            raise RuntimeError(str(error)) from None
        finally:
            process.terminate()
            process.wait(10)
    for figure, found in ((NOTED, noted), (PROBED, probed)):
        note = f"{count} nodes, {found.packed_bytes / 1e6:.1f} MB of notes, compressed"
        yield Reading(
            figure=figure.name,
            value=found.seconds,
            note=f"{note}; aggregator: {found.cpu_seconds:.1f} s of the processor",
        )


BENCHES = (Bench(name="postmortem", figures=(NOTED, PROBED), run=ends, limit_seconds=LIMIT_SECONDS),)
