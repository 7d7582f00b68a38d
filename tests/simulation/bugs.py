"""
Bugs to plant: each is a small edit of one function of the product, by which a promise of the simulation is broken.

An edit names the text that it replaces. Where that text is gone, or is there more than once, planting it is an error:
whoever changes the function finds another place for the bug.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from healthd.aggregator import forwarding, leadership
from healthd.aggregator.engine import admission, engine, leases, memory
from healthd.aggregator.fleet import node_record
from healthd.aggregator.gate import eligibility, machine
from healthd.aggregator.store import Loaded, session, store
from healthd.aggregator.store import leadership as row
from healthd.core import evidence
from healthd.node.state import store as node_store
from tests.simulation.loop import PROCESS


class StaleBugError(AssertionError):
    """The function that a bug edits has changed."""


def remembered(loaded: Loaded) -> Loaded:
    """What the running process has loaded at first."""
    before: Loaded = vars(PROCESS.get()).setdefault("loaded", loaded)
    return before


@dataclass(frozen=True)
class Edit:
    """In the function `name` of a class or module, `before` becomes `after`."""

    owner: Any
    name: str
    before: str
    after: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The function is the wrong one meanwhile."""
        sound = inspect.getattr_static(self.owner, self.name, None)
        if not isinstance(sound, types.FunctionType):
            raise StaleBugError(f"{self.owner.__name__}.{self.name} is gone; plant the bug elsewhere")
        source = textwrap.dedent(inspect.getsource(sound))
        if source.count(self.before) != 1:
            raise StaleBugError(f"{self.owner.__name__}.{self.name} does not say {self.before!r} once any more")
        flags = __future__.annotations.compiler_flag
        made: dict[str, Any] = {}
        code = compile(source.replace(self.before, self.after), f"<bug in {self.name}>", "exec", flags, True)
        exec(code, sound.__globals__, made)  # only `def`: it runs nothing
        setattr(self.owner, self.name, made[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, sound)


@dataclass(frozen=True)
class Bug:
    """
    A bug. It has to be found within `schedules` seeds from `first` on; that is the one which found it when it was
    planted, so that the test is short.
    """

    name: str
    edits: tuple[Edit, ...]
    first: int = 0
    schedules: int = 25
    aggregators: int = 1

    @property
    def seeds(self) -> range:
        """The seeds that are tried."""
        return range(self.first, self.first + self.schedules)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The product has this bug meanwhile."""
        with contextlib.ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.planted())
            yield


BUGS = (
    Bug(
        "a leader of an old term commits",
        (Edit(row, "check_term", " or (row.term, row.holder) != (term, holder)", ""),),
    ),
    Bug(
        "a report of a node wakes nobody",
        (Edit(engine.Engine, "_on_report", "self._wake.set()", "pass"),),
        first=20,
    ),
    Bug(
        "a decision is told before it is on disk",
        (
            Edit(
                engine.Engine,
                "_run_once",
                "if done.batch.changes:",
                "self._publish(done)\n        if done.batch.changes:",
            ),
        ),
        first=1955,
    ),
    Bug(
        "a request is answered before it is on disk",
        (
            Edit(
                engine.Requests,
                "apply",
                "results.append((future, action(batch)))",
                "future.set_result(action(batch))",
            ),
        ),
        first=22,
    ),
    Bug(
        "memory goes on as if a failed commit had not failed",
        (
            Edit(engine.Engine, "_run_once", "self._stale = True", "self._stale = False"),
            Edit(engine.Engine, "_rebuild", "try:", "return True\n    try:"),
        ),
        first=24,
    ),
    Bug(
        "evidence does not grow older between two syncs",
        (Edit(node_record.NodeRecord, "view", "max(0.0, now - self.state.at)", "0.0"),),
        first=20,
    ),
    Bug(
        "a device that was swapped counts as tested",
        (Edit(evidence, "_untested", "if not targets:", "if True:"),),
        first=7,
    ),
    Bug(
        "results of the boot before count as evidence",
        (
            Edit(
                node_store.ResultLog,
                "restore",
                "if self._boot_id is None or saved.boot_id != self._boot_id:",
                "if self._boot_id is None:",
            ),
        ),
        first=1,
    ),
    Bug(
        "leases that a restored copy does not know are ended",
        (
            Edit(
                leases.LeaseReconciler,
                "_adopt_lease",
                "state=LeaseState.ACKNOWLEDGED if taken else LeaseState.GRANTED,",
                "state=LeaseState.ENDING,",
            ),
        ),
        first=111,
    ),
    Bug(
        "leases are not loaded at the start",
        (Edit(memory.FleetState, "__init__", "for row in loaded.leases:", "for row in ():"),),
        first=4,
    ),
    Bug(
        "quarantines are not loaded at the start",
        (Edit(memory.FleetState, "__init__", "dict(loaded.quarantines)", "{}"),),
        first=7,
    ),
    Bug(
        "the deadline of a gate is not kept",
        (Edit(machine, "deadline_of", "return context.gate.deadline\n", "return context.gate.deadline + 1e9\n"),),
        first=5,
    ),
    Bug(
        "a gate is decided anew when it is asked for after a restart",
        (
            Edit(engine.Engine, "ask", "if known is not None and known not in", "if False and known not in"),
            Edit(admission, "open_gate", "if key in fleet_state.keys:", "if False:"),
        ),
        first=12,
    ),
    Bug(
        "a lease is judged over too early",
        (
            Edit(leadership.Observed, "vacant", "now - self._since >= LEASE_SECONDS", "now - self._since >= 1.9"),
            Edit(row, "take_over", " and _leadership(row, place) != seen", " and row is None"),
        ),
        aggregators=2,
    ),
    Bug(
        "a lease is never renewed",
        (Edit(session.Session, "transact", "leadership.renew(connection)", "pass"),),
        aggregators=2,
    ),
    Bug(
        "a leader whose lease is over goes on as one",
        (Edit(store.Store, "leads", "boot_seconds() - self._session.renewed_at < LEASE_SECONDS", "True"),),
        first=1,
        aggregators=3,
    ),
    Bug(
        "a takeover does not look whether the leader has renewed meanwhile",
        (Edit(row, "take_over", " and _leadership(row, place) != seen", " and row is None"),),
        aggregators=3,
    ),
    Bug(
        "what was forwarded is forwarded again",
        (Edit(forwarding.Front, "_forward", "if FORWARDED in headers:", "if False:"),),
        first=2,
        aggregators=3,
    ),
    Bug(
        "one that stands by answers nodes itself",
        (
            Edit(
                forwarding.Front,
                "__call__",
                'serving is None or not (serving.leads() or scope["path"] in _OWN)',
                "serving is None",
            ),
        ),
        first=1,
        aggregators=3,
    ),
    Bug(
        "a new leader has the memory of its last time",
        (
            Edit(
                engine.Engine,
                "__init__",
                "self._load(store.load())",
                "from tests.simulation.bugs import remembered\n    self._load(remembered(store.load()))",
            ),
        ),
        first=36,
        aggregators=2,
    ),
    Bug(
        "a new leader decides before its nodes could tell it what they hold",
        (
            Edit(memory.FleetState, "__init__", "for row in loaded.leases:", "for row in ():"),
            Edit(
                eligibility,
                "_assess_known",
                "taken = _in_use(gate, node.state)",
                "taken = None if snapshot.settling is not None else _in_use(gate, node.state)",
            ),
        ),
        first=9,
        aggregators=2,
    ),
)
