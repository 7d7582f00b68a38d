"""
The gate under anything: nodes that lie, fall silent and come back, a store that fails, kill -9 between any two effects.

Hypothesis plays the world against the real engine and a real database; after every move what was promised must hold.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checks.contract import Blame, Status
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.gate.records import LeaseState, Phase
from healthd.aggregator.store.database import UnsureError
from healthd.aggregator.store.rows import Change
from healthd.aggregator.store.store import Store
from healthd.core import wire
from healthd.core.errors import ConflictError, NotFoundError, StoreError
from healthd.core.model import Allocation, CheckResult, GateRequest, Order, Quarantine, Verdict
from tests.aggregator.world import NOW, POLICY, World, good_results, result, with_wrong
from tests.profile import THOROUGH, examples

NODES = ("n1", "n2", "n3", "n4")
JOBS = ("blue", "red", "green")
PATH_FAULT = (*good_results()[:2], result("all_reduce", status=Status.FAIL, code="SlowLink", blame=Blame.PATH))
TOOL_FAULT = (*good_results()[:2], result("all_reduce", status=Status.UNKNOWN, code="MissingTool"))
TRUTHS: dict[str, tuple[CheckResult, ...]] = {
    "good": good_results(),
    "bad": with_wrong(),
    "path": PATH_FAULT,
    "tool": TOOL_FAULT,
    "none": (),
}
MOSTLY_GOOD = ("good", "good", "good", "none", *sorted(TRUTHS))


class Killed(BaseException):
    """kill -9, at the point where it is raised."""


class FrailStore(Store):
    """A store that can fail before it commits, lose the word on it, or be the last thing the process does."""

    trouble = ""

    async def write(self, changes: Sequence[Change]) -> None:
        trouble, self.trouble = self.trouble, ""
        if trouble == "fail":
            raise StoreError("database test: disk is full; free some space")
        await super().write(changes)
        if trouble == "lost":
            raise UnsureError("database test: the server closed the connection; look at the database and its log")
        if trouble == "kill":
            raise Killed


class FrailWorld(World):
    """A world in which the aggregator may be killed when it tells a node something."""

    kill_in: int | None = None

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                self.kill_in = None
                raise Killed
        super().set_orders(node, orders)


class GateMachine(RuleBasedStateMachine):
    """One aggregator with its database, four nodes, three jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        # In memory where there is such a place: what is killed here is a process, not a machine.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="gates-", dir=memory))
        self.world = FrailWorld()
        self.answers: dict[str, bytes] = {}
        self.asked: dict[tuple[str, int], str] = {}
        self.truth = dict.fromkeys(NODES, "good")

    @initialize(truths=st.lists(st.sampled_from(MOSTLY_GOOD), min_size=4, max_size=4))
    def begin(self, truths: list[str]) -> None:
        for name, truth in zip(NODES, truths, strict=True):
            self.world.add(name, results=TRUTHS[truth])
            self._tell_truth(name, truth)
        self._start()

    def teardown(self) -> None:
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    # --- moves --------------------------------------------------------------------------------------------------------

    @rule(
        job=st.sampled_from(JOBS),
        attempt=st.integers(0, 3),
        nodes=st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True),
        spare=st.booleans(),
    )
    def ask_for_nodes(self, job: str, attempt: int, nodes: list[str], spare: bool) -> None:
        least = max(1, len(nodes) - 1) if spare else None
        self._ask(GateRequest(job=job, attempt=attempt, nodes=tuple(nodes), min_nodes=least))

    @rule(job=st.sampled_from(JOBS), attempt=st.integers(0, 3), count=st.integers(1, 4))
    def ask_for_pool(self, job: str, attempt: int, count: int) -> None:
        self._ask(GateRequest(job=job, attempt=attempt, pool="a", count=count))

    @rule(name=st.sampled_from(NODES), times=st.integers(1, 2))
    def sync(self, name: str, times: int) -> None:
        for _ in range(times):
            self.world.sync(name)
        self._turn()

    @rule()
    def sync_all(self) -> None:
        for name in NODES:
            self.world.sync(name)
        self._turn()

    @rule(name=st.sampled_from(NODES), truth=st.sampled_from(MOSTLY_GOOD))
    def node_changes(self, name: str, truth: str) -> None:
        """What it measures from now on; it also reports it unless it is deaf."""
        self._tell_truth(name, truth)
        if not self.world.daemons[name].deaf:
            self.world.renew(name, results=TRUTHS[truth])
            self.world.tell(name)
        self._turn()

    @rule(
        job=st.sampled_from(JOBS),
        attempt=st.integers(0, 9),
        count=st.integers(1, 2),
        kill_in=st.none() | st.integers(0, 9),
    )
    def a_job_comes_to_its_answer(self, job: str, attempt: int, count: int, kill_in: int | None) -> None:
        """The whole way without a pause, perhaps with a kill in the middle."""
        self._ask(GateRequest(job=job, attempt=attempt, pool="a", count=count))
        self.world.kill_in = kill_in
        for _ in range(3):
            self.sync_all()

    @rule(name=st.sampled_from(NODES), field=st.sampled_from(["deaf", "confirmed", "duplicate", "refuses_leases"]))
    def node_turns(self, name: str, field: str) -> None:
        daemon = self.world.daemons[name]
        setattr(daemon, field, not getattr(daemon, field))
        self.world.tell(name)
        self._turn()

    @rule(name=st.sampled_from(NODES))
    def somebody_uses_the_node(self, name: str) -> None:
        used = self.world.daemons[name].state.allocated
        self.world.renew(name, allocated=() if used else (Allocation(by="process", holder="pid 7"),))
        self.world.tell(name)
        self._turn()

    @rule(name=st.sampled_from(NODES))
    def job_ends(self, name: str) -> None:
        self.world.end_job(name)
        self._turn()

    @rule(name=st.sampled_from(NODES), on=st.booleans())
    def quarantine(self, name: str, on: bool) -> None:
        kept = Quarantine(reason="fan", owner="ana", owner_kind="person", since=NOW, until=None)
        self._do(self.engine.quarantine(name, kept if on else None))

    @precondition(lambda self: bool(self.asked))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        gate_id = data.draw(st.sampled_from(sorted(self.asked.values())))
        try:
            self._do(self.engine.release(gate_id))
        except NotFoundError:  # there was nothing to give back
            assert gate_id not in {gate.id for gate in self.engine.open_gates()}
            assert gate_id not in {row.lease.gate for row in self.engine.leases()}

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0, 70.0, 400.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self._turn()

    @rule(trouble=st.sampled_from(["fail", "kill", "lost"]))
    def store_has_trouble_next(self, trouble: str) -> None:
        self.store.trouble = trouble

    @rule(calls=st.integers(0, 3))
    def killed_while_telling(self, calls: int) -> None:
        self.world.kill_in = calls

    @rule()
    def restart(self) -> None:
        self._restart()

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def no_node_is_given_twice(self) -> None:
        if not hasattr(self, "engine"):
            return
        owners: dict[str, set[str]] = {}
        for gate in self.engine.open_gates():
            for name in gate.reserved:
                owners.setdefault(name, set()).add(gate.id)
        for row in self.engine.leases():
            if row.state is not LeaseState.ENDING:
                owners.setdefault(row.node, set()).add(row.lease.gate)
        assert all(len(gates) == 1 for gates in owners.values()), owners

    @invariant()
    def what_was_answered_stays_true(self) -> None:
        for gate_id, answer in self.answers.items():
            gate = self.loop.run_until_complete(self.engine.get(gate_id))
            assert gate.decision is not None
            assert wire.encode(gate.decision) == answer

    @invariant()
    def memory_is_what_is_on_disk(self) -> None:
        if not hasattr(self, "engine"):
            return
        loaded = self.store.load()
        kept = [dataclasses.replace(gate, waiting=()) for gate in self.engine.open_gates()]
        assert sorted(loaded.gates, key=lambda gate: gate.id) == kept
        assert {row.lease.id: row for row in loaded.leases} == {row.lease.id: row for row in self.engine.leases()}

    @invariant()
    def reserved_is_all_that_is_needed_or_nothing(self) -> None:
        if hasattr(self, "engine"):
            for gate in self.engine.open_gates():
                assert len(gate.reserved) >= gate.terms.needed or not gate.reserved
                assert set(gate.granted) <= set(gate.reserved)

    def _check_decision(self, gate_id: str) -> None:
        """As soon as it is on disk, before the world moves on."""
        gate = self.loop.run_until_complete(self.engine.get(gate_id))
        decision = gate.decision
        assert decision is not None
        self.answers[gate_id] = wire.encode(decision)
        for excluded in decision.excluded:
            for why in excluded.reasons:
                if why.blame is Blame.NODE and why.status is Status.FAIL and why.code != "Quarantined":
                    assert why.code == "WrongResult", why
        if decision.decision is not Verdict.ADMIT:
            return
        assert len(decision.nodes) >= gate.terms.needed
        for admitted in decision.nodes:
            seen = self.world.node(admitted.node)
            assert seen is not None
            assert seen.confirmed
            assert not seen.duplicate
            assert seen.quarantine is None
            state = seen.current()
            assert state is not None
            assert any(held.gate == gate_id for held in state.leases)
            assert len(state.leases) == 1
            by_check = {r.check: r for r in state.results}
            for check in ("disk", "matmul", "all_reduce"):
                assert by_check[check].status is Status.PASS
                assert by_check[check].age_seconds <= 3600 + POLICY.tuning.lease_ack_seconds + 4000

    # --- machinery ----------------------------------------------------------------------------------------------------

    def _tell_truth(self, name: str, truth: str) -> None:
        self.truth[name] = truth
        self.world.daemons[name].result_of_runs = lambda: TRUTHS[truth]

    def _start(self) -> None:
        store = FrailStore.open(f"sqlite:///{self.folder}/a.db")
        assert isinstance(store, FrailStore)
        self.store = store
        self.world.issuer = store.store_id
        self.world.callbacks.clear()
        self.world.kill_in = None
        for daemon in self.world.daemons.values():
            daemon.orders = None
        policy = dataclasses.replace(POLICY, tuning=dataclasses.replace(POLICY.tuning, max_open_gates=50))
        self.engine = Engine(store=store, registry=self.world, policy=policy, clock=self.world.clock)
        self.world.callbacks[:] = [functools.partial(self._heard, callback) for callback in self.world.callbacks]
        for name in NODES:
            self.world.tell(name)
        self._turn()

    def _restart(self) -> None:
        self.store.close()
        self._start()

    def _turn(self) -> None:
        self._do(None)

    def _do(self, call: Coroutine[Any, Any, object] | None) -> object:
        """Let the engine do it, and turn until it rests; a kill ends in a restart."""
        try:
            return self.loop.run_until_complete(self._work(call))
        except StoreError:
            return None
        except Killed:
            self._restart()
            return None
        finally:
            if self.engine._stale:
                # What came through is on disk and not in memory until that is read anew, which the next turn would do.
                assert self.loop.run_until_complete(self.engine._rebuild())
            self._new_decisions()

    def _heard(self, callback: Callable[[str], None], name: str) -> None:
        """Nodes are heard in the loop, also those of which the machine tells between two turns."""

        async def heard() -> None:
            callback(name)

        if self.loop.is_running():
            callback(name)
        else:
            self.loop.run_until_complete(heard())

    async def _work(self, call: Coroutine[Any, Any, object] | None) -> object:
        task = asyncio.ensure_future(call) if call is not None else None
        await asyncio.sleep(0)
        try:
            for _ in range(4):
                await self.engine.run_once()
                await asyncio.sleep(0)
            while task is not None and not task.done():
                # It may have to read from the database before it has something to do.
                await asyncio.sleep(0.001)
                await self.engine.run_once()
        except Killed:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            raise
        return await task if task is not None else None

    def _new_decisions(self) -> None:
        for gate in self.loop.run_until_complete(self.engine.gates(limit=100)):
            if gate.phase is Phase.DECIDED and gate.id not in self.answers:
                self._check_decision(gate.id)

    def _ask(self, request: GateRequest) -> None:
        key = (request.job, request.attempt)
        try:
            gate = self._do(self.engine.ask(request))
        except ConflictError:
            assert key in self.asked or self._on_disk(request)
            return
        if gate is not None:
            self.asked.setdefault(key, gate.id)  # type: ignore[attr-defined]
            assert self.asked[key] == gate.id  # type: ignore[attr-defined]

    def _on_disk(self, request: GateRequest) -> bool:
        """A gate that was killed between its commit and its answer."""
        kept = self.loop.run_until_complete(self.engine.gates(limit=100, job=request.job))
        return any(gate.request.attempt == request.attempt for gate in kept)


TestGate = GateMachine.TestCase
TestGate.settings = settings(
    max_examples=examples(20),
    stateful_step_count=40 if THOROUGH else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
