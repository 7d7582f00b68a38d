"""Node checks that do what a check must not do, for the tests of the runner. Loaded as an operator's own file is."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import checks
from checks.contract import Context, Evidence, Finding, Measurement, Missing, NoParams, Status, check
from checks.host.machine import HostError


@dataclass(frozen=True)
class Folder:
    folder: str = ""


def passed(message: str, *measurements: Measurement) -> Finding:
    return Finding(status=Status.PASS, reason=None, message=message, target="node", measurements=measurements)


def results() -> int:
    """The descriptor of the results, which no check should know."""
    return int(sys.argv[1])


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def fine(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("all is well")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def fine_too(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("all is well here too")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def raises(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("before")
    raise KeyError("no such thing")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def wants_memory(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("before")
    raise MemoryError


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def denied(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    raise HostError("NoPermission", "/dev/kmsg: permission denied; run as root")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def leaves(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    sys.exit(0)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def vanishes(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("before")
    os._exit(0)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def aborts(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    os.abort()


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def segfaults(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    ctypes.string_at(0)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def killed(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    os.kill(os.getpid(), signal.SIGKILL)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def killed_once(ctx: Context[Folder]) -> Iterator[Finding]:
    marker = os.path.join(ctx.params.folder, "killed")
    if not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)
    yield passed("got through")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def fails_once(ctx: Context[Folder]) -> Iterator[Finding]:
    marker = os.path.join(ctx.params.folder, "failed")
    if not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        yield Finding(status=Status.FAIL, reason="WrongResult", message="2 + 2 is 5", target="node")
    yield passed("right now")


@check(tier="passive", interval_seconds=60, timeout_seconds=0.5)
def hangs(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("before")
    time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=0.5)
def ignores_sigterm(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=0.5)
def stops_itself(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    os.kill(os.getpid(), signal.SIGSTOP)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def babbles(ctx: Context[NoParams]) -> Iterator[Finding]:
    print("hello on standard output")
    sys.stdout.flush()
    os.write(1, b'{"kind": "done", "id": 1}\n')
    subprocess.run(["echo", "and from a program"], check=True)
    yield passed("said what it had to say")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def reads_input(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed(f"read {len(sys.stdin.read())} characters")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def long_line(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("before")
    for _ in range(160):
        os.write(results(), b"x" * 65536)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def forges(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    os.write(results(), b'{"kind": "done", "id": 999, "dropped": 0}\n')
    time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def closes_results(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()
    os.close(results())
    time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def leaves_grandchild(ctx: Context[Folder]) -> Iterator[Finding]:
    """A grandchild in a session of its own has all our pipes open, and then we die."""
    if os.fork() == 0:
        os.setsid()
        with open(os.path.join(ctx.params.folder, "grandchild"), "w") as file:
            file.write(str(os.getpid()))
        time.sleep(120)
        os._exit(0)
    while not os.path.exists(os.path.join(ctx.params.folder, "grandchild")):
        time.sleep(0.005)
    yield passed("before")
    os.kill(os.getpid(), signal.SIGKILL)


@check(tier="passive", interval_seconds=60, timeout_seconds=0.5)
def leaves_family(ctx: Context[Folder]) -> Iterator[Finding]:
    """Grandchildren in our own group have to go with us."""
    yield from ()
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=3.0)
def traced(ctx: Context[Folder]) -> Iterator[Finding]:
    """Somebody traces us and never waits: once killed, we stay a corpse that our parent cannot reap."""
    place = os.path.join(ctx.params.folder, str(os.getpid()))
    open(place, "w").close()
    while not os.path.exists(f"{place}.seized"):
        time.sleep(0.01)
    yield from ()
    time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def silent(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()


def number(value: float | None) -> Measurement:
    return Measurement(name="speed_flops_per_second", value=value, lower=None, upper=None, origin="none")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def not_a_number(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("fast", number(float("nan")))


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def infinite(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("very fast", number(float("inf")))


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def no_number(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed("fast", number(None))


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def floods(ctx: Context[NoParams]) -> Iterator[Finding]:
    for index in range(2000):
        status = Status.FAIL if index == 1999 else Status.PASS
        yield Finding(status=status, reason="WrongResult" if index == 1999 else None, message="x" * 5000, target="node")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def yields_text(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield "all is well"  # type: ignore[misc]


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def surroundings(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield passed(str(checks.__file__))
    yield passed(os.environ["PATH"])
    yield passed(" ".join(sorted(name for name in os.environ if name.startswith(("PYTHON", "LD_PRELOAD", "RANK")))))
    yield passed(".".join(str(part) for part in sys.version_info[:2]))


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def counts(ctx: Context[NoParams]) -> Iterator[Finding | Evidence]:
    """Compares with what it saw the last time."""
    last = ctx.previous.evidence[0].data["count"] if ctx.previous else 0
    elapsed_seconds = ctx.previous.elapsed_seconds if ctx.previous else 0.0
    yield Evidence(target="node", key="counter", data={"count": last + 1})
    yield passed(f"count {last + 1}, again after {elapsed_seconds > 0}")


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def tells_elapsed(ctx: Context[NoParams]) -> Iterator[Finding | Evidence]:
    """How long ago it was measured before; it goes on for a moment after it has measured."""
    elapsed_seconds = ctx.previous.elapsed_seconds if ctx.previous else 0.0
    yield Evidence(target="node", key="counter", data={})
    time.sleep(0.2)
    yield passed(str(elapsed_seconds))


def judge_never(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    yield passed("before")
    time.sleep(600)


@check(tier="passive", interval_seconds=60, timeout_seconds=10, judge=judge_never)
def judged_for_ever(ctx: Context[NoParams]) -> Iterator[Evidence]:
    yield Evidence(target="node", key="k", data={})


def judge_raises(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    yield from ()
    raise ZeroDivisionError("no evidence to divide by")


@check(tier="passive", interval_seconds=60, timeout_seconds=10, judge=judge_raises)
def judged_badly(ctx: Context[NoParams]) -> Iterator[Evidence]:
    yield Evidence(target="node", key="k", data={})
