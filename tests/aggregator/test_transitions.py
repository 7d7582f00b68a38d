"""The phases of a gate: every transition of the table is reached, and none outside it."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.aggregator.engine.admission import new_gate
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate import decisions, eligibility, machine, records, rendezvous, reservation, transitions
from healthd.aggregator.gate import machine as gate_module
from healthd.aggregator.gate.machine import step
from healthd.aggregator.gate.records import Claim, ClaimKind, Closing, Decided, Gate, Override, Phase
from healthd.aggregator.gate.transitions import TRANSITIONS, Event, IllegalMoveError, Move, move
from healthd.core import wire
from healthd.core.model import GateRequest, Join, Mode
from tests.aggregator.lab import POLICY, Lab
from tests.aggregator.world import gate, with_wrong
from tests.every import every
from tests.profile import examples

NAMES = ("n1", "n2", "n3", "n4")
OTHER = Claim(kind=ClaimKind.RESERVED, gate="g-other", job="other", attempt=0)
CONDITIONS = ("good", "good", "good", "bad", "stale", "away", "taken", "deaf")


class History(Lab):
    """A gate, and a fleet whose nodes change their condition as they are told; what was moved is in `moves`."""

    def begin(self, request: GateRequest) -> None:
        self.condition = dict.fromkeys(self.names, "good")
        self.overrides: dict[str, Override] = {}
        self.gate = new_gate("g-1", request, self.policy, self.now)
        self.moves: list[Move] = []

    def turn(self, seconds: float = 1.0, **conditions: str) -> Gate:
        """The nodes change, time passes, the gate is stepped and its nodes obey."""
        self.condition.update(conditions)
        self.now += seconds
        for name, condition in self.condition.items():
            if condition == "taken" and name not in self.gate.held:
                self.claims[name] = OTHER
            elif self.claims.get(name) is OTHER:
                del self.claims[name]
        before = self.gate
        seen = dataclasses.replace(self.view(before), now=self.now, overrides=self.overrides)
        after = step(before, seen, self.policy)
        places = [before.phase, *(one.after for one in after.moves)]
        assert [one.before for one in after.moves] == places[:-1]
        assert after.gate.phase is places[-1]
        self.moves += after.moves
        self.gate = after.gate
        self.obey(self.gate)
        return self.gate

    def close(self) -> None:
        before = self.gate.phase
        self.gate, _ = decisions.close(self.now, self.gate, self.policy, Closing.RELEASED, "withdrawn")
        if before is not Phase.DECIDED:
            self.moves.append(Move(before=before, event=Event.CLOSED, after=self.gate.phase))

    def arrive(self, rank: int, member: str) -> None:
        join = dataclasses.replace(self.gate.request.join or JOIN, rank=rank, member=member, node=f"n{rank + 1}")
        self.gate = rendezvous.add_member(self.now, self.gate, join, None)

    def _node(self, name: str, current: Gate) -> FleetNode:
        found, condition = super()._node(name, current), self.condition[name]
        if condition == "away":
            return dataclasses.replace(found, heard_seconds=1e4)
        assert found.state is not None
        if condition in ("bad", "stale"):
            results = with_wrong() if condition == "bad" else ()
            return dataclasses.replace(found, state=dataclasses.replace(found.state, results=results))
        if condition == "deaf":
            orders = {key: report for key, report in found.orders.items() if ":lease:" not in key}
            return dataclasses.replace(found, state=dataclasses.replace(found.state, leases=()), orders=orders)
        return found


JOIN = Join(group="grp", size=2, rank=0, member="", node="n1")


def history(*names: str, **request: object) -> History:
    asked = GateRequest(**{"job": "train", "nodes": names, "wait_seconds": 600.0, **request})  # type: ignore[arg-type]
    found = History(NAMES, policy=POLICY)
    found.begin(asked)
    return found


def until(run: History, phase: Phase, **conditions: str) -> History:
    for _ in range(60):
        if run.turn(**conditions).phase is phase:
            return run
    raise AssertionError(f"{run.gate.phase} and not {phase}: {run.gate.waiting}")


def joined(*, whole: bool) -> History:
    run = history(join=JOIN, nodes=())
    run.arrive(0, "m0")
    if whole:
        run.arrive(1, "m1")
    return run


def in_phase(phase: Phase) -> History:
    if phase is Phase.COLLECTING:
        return joined(whole=False)
    if phase is Phase.WAITING:
        return until(history("n1", "n2"), phase, n1="taken")
    if phase is Phase.CHECKING:
        return until(history("n1", "n2"), phase, n1="stale")
    if phase is Phase.VALIDATING:
        return until(history("n1", "n2"), phase)
    return until(history("n1", "n2"), phase, n1="deaf")


def gathered_and_regrouped() -> History:
    run = joined(whole=True)
    run.turn(n1="stale")
    run.arrive(1, "m1-again")
    run.turn()
    return run


def lost_while_granted() -> History:
    run = until(history("n1", "n2", "n3", min_nodes=2), Phase.GRANTING, n1="deaf", n2="deaf")
    run.turn(n3="away")
    return run


def given_back(phase: Phase) -> History:
    run = in_phase(phase)
    run.turn(n1="bad")
    return run


def answered(phase: Phase) -> History:
    run = in_phase(phase)
    run.overrides = {"train": Override(job="train", reason="now", owner="ana", since=0.0, until=math.inf)}
    run.turn()
    return run


def closed(phase: Phase) -> History:
    run = in_phase(phase)
    run.close()
    return run


OPEN = [phase for phase in Phase if phase is not Phase.DECIDED]


def test_every_transition_is_reached_and_none_outside_the_table() -> None:
    runs = [gathered_and_regrouped(), lost_while_granted(), until(history("n1", "n2"), Phase.DECIDED)]
    runs += [given_back(phase) for phase in (Phase.CHECKING, Phase.GRANTING)]
    runs += [end(phase) for phase in OPEN for end in (answered, closed)]
    reached = {(one.before, one.event): one.after for run in runs for one in run.moves}
    assert reached == TRANSITIONS


requests = st.fixed_dictionaries(
    {
        "mode": st.sampled_from([Mode.ENFORCE, Mode.ENFORCE, Mode.OBSERVE]),
        "lease": st.sampled_from([True, True, False]),
        "min_nodes": st.none() | st.integers(1, 2),
        "collective": st.booleans(),
    }
)
whom = st.sampled_from([{"nodes": NAMES[:2]}, {"nodes": NAMES[:3]}, {"nodes": (), "pool": "a", "count": 2}])
groups = st.just({"nodes": (), "join": JOIN})
turns = st.lists(
    st.tuples(
        st.sampled_from([0.01, 1.0, 5.0, 31.0, 400.0]),
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from(CONDITIONS), max_size=2),
        st.sampled_from(["", "", "", "", "arrive", "leave", "close", "override"]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(150), deadline=None)
@given(request=requests, who=whom | groups, turns=turns)
def test_no_history_leaves_the_table_and_what_is_held_is_what_the_phase_says(
    request: dict[str, object], who: dict[str, object], turns: list[tuple[float, dict[str, str], str, int]]
) -> None:
    run = history(**{**request, **who})
    for number, (seconds, conditions, action, rank) in enumerate(turns):
        if action == "close":
            run.close()
        elif action == "override":
            run.overrides = {"train": Override(job="train", reason="now", owner="ana", since=0.0, until=run.now + 9)}
        elif run.gate.request.join is not None and run.gate.decision is None and number < 20:
            if action == "leave":
                run.gate = rendezvous.remove_member(run.gate, f"m{rank}")
            else:
                run.arrive(rank, f"m{rank}" if action != "arrive" else f"m{rank}-{number}")
        run.turn(seconds, **conditions)
        assert len(run.gate.reserved) >= run.gate.terms.needed or not run.gate.reserved
        if run.gate.phase is not Phase.DECIDED:
            assert set(run.gate.granted) <= set(run.gate.reserved)
        assert wire.decode(wire.encode(run.gate), Gate, what="gate") == run.gate
    assert all(TRANSITIONS[one.before, one.event] is one.after for one in run.moves)


def test_a_way_that_is_not_in_the_table_cannot_be_gone() -> None:
    with pytest.raises(IllegalMoveError, match="waiting, granted, decided"):
        move(gate(nodes=("n1",)), Event.GRANTED, Decided(decision=until(history("n1"), Phase.DECIDED).gate.decision))  # type: ignore[arg-type]


def test_the_table_of_the_docstring_is_the_table() -> None:
    rows = re.findall(r"^    (\S+(?: \S+)*)  +(\S+(?: \S+)*)  +(\S+)", transitions.__doc__ or "", re.MULTILINE)
    found: dict[tuple[str, str], str] = {}
    for before, event, after in rows[1:]:
        for one in [phase.value for phase in OPEN] if before == "any other" else [before]:
            found |= {(one, name): after for name in event.split(", ")}
    assert found == {(before.value, event.value): after.value for (before, event), after in TRANSITIONS.items()}


# --- what the gate knows ----------------------------------------------------------------------------------------------

PURE = (
    decisions,
    eligibility,
    rendezvous,
    gate_module,
    reservation,
    rendezvous,
    records,
    eligibility,
    reservation,
    transitions,
    machine,
)
IMPURE = ("asyncio", "threading", "time", "logging", "sqlalchemy", "fastapi", "starlette", "uvicorn", "httpx")
OUTSIDE = ("store", "writer", "session", "databases", "changes", "ledger", "turns", "engine", "registry", "api", "app")


@every("module", PURE)
def test_the_gate_knows_neither_store_nor_http_nor_a_clock(module: ModuleType) -> None:
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] not in IMPURE, f"{module.__name__} imports {name}"
            assert set(name.split(".")).isdisjoint(OUTSIDE), f"{module.__name__} imports {name}"
