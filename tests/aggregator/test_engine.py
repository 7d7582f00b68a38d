"""The engine with a real store: what it promises to clients and nodes, over failures and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from healthd.aggregator.engine import admission
from healthd.aggregator.engine.engine import Engine, Pass, steady_clock
from healthd.aggregator.engine.memory import Batch, FleetState
from healthd.aggregator.gate.records import LeaseState, Override, Phase
from healthd.aggregator.gate.reservation import OBSERVE_SECONDS
from healthd.aggregator.policy import Policy
from healthd.aggregator.store.store import Store
from healthd.core.errors import BadInputError, ConflictError, NotFoundError, StoreError
from healthd.core.model import GateRequest, Join, Mode, OrderReport, Quarantine, Verdict
from tests.aggregator.engine_kit import full, of_states, running
from tests.aggregator.world import NOW, POLICY, World, good_results, lease, with_wrong
from tests.patience import PATIENCE


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/aggregator.db"


async def test_good_nodes_are_admitted_with_a_lease_each_node_has_stored(database: str) -> None:
    async with running(World("n1", "n2"), database) as run:
        gate, decision = await run.admit(nodes=("n1", "n2"))
        assert decision.decision is Verdict.ADMIT
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED, "n2": LeaseState.ACKNOWLEDGED}
        held = run.world.daemons["n1"].state.leases[0]
        assert (held.gate, held.job, held.issuer) == (gate.id, "train", run.store.store_id)


async def test_nodes_without_evidence_are_run_once_and_admitted() -> None:
    world = World()
    world.add("n1", results=())
    async with running(world) as run:
        _, decision = await run.admit(nodes=("n1",))
        assert decision.decision is Verdict.ADMIT
        assert len(world.daemons["n1"].runs) == 1
        assert world.daemons["n1"].reports.keys() == {world.daemons["n1"].state.leases[0].id}


async def test_a_waiting_client_is_answered_by_the_decision_and_a_late_one_by_a_hold() -> None:
    world = World("n1")
    async with running(world) as run:
        gate = await run.engine.ask(GateRequest(job="train", nodes=("n1",)))
        held = await run.engine.wait(gate.id, 0.01)
        assert held.decision is Verdict.HOLD
        assert "has not confirmed its lease" in held.reasons[0].message
        waiting = asyncio.create_task(run.engine.wait(gate.id, 30))
        await asyncio.sleep(0)
        await run.settle()
        assert (await waiting).decision is Verdict.ADMIT


async def test_a_stopping_engine_wakes_everybody_who_waits() -> None:
    async with running(World("n1")) as run:
        gate = await run.engine.ask(GateRequest(job="train", nodes=("n1",)))
        waiting = asyncio.create_task(run.engine.wait(gate.id, 30))
        await asyncio.sleep(0)
        run.engine.stop()
        assert (await waiting).decision is Verdict.HOLD


async def test_the_same_job_and_attempt_gets_the_same_answer_and_another_request_a_conflict(database: str) -> None:
    world = World("n1")
    request = GateRequest(job="train", nodes=("n1",))
    async with running(world, database) as run:
        gate, decision = await run.admit(nodes=("n1",))
        again = await run.engine.ask(request)
        assert (again.id, again.decision) == (gate.id, decision)
        for changed, said in (
            ({"min_nodes": 1}, "with other parameters .*: min_nodes was not given and is 1 now"),
            ({"mode": Mode.OBSERVE}, "mode was not given and is observe now"),
            ({"nodes": ("n1", "n2")}, "1 nodes were named before, 2 now: newly n2"),
        ):
            with pytest.raises(ConflictError, match=said):
                await run.engine.ask(dataclasses.replace(request, **changed))  # type: ignore[arg-type]
    async with running(world, database) as run:
        again = await run.engine.ask(request)
        assert (again.id, again.decision) == (gate.id, decision)


async def test_asking_again_after_the_lease_ended_is_a_conflict_and_never_an_admission() -> None:
    async with running(World("n1")) as run:
        await run.admit(nodes=("n1",))
        run.world.end_job("n1")
        await run.engine.run_once()
        with pytest.raises(ConflictError, match="has ended"):
            await run.engine.ask(GateRequest(job="train", nodes=("n1",)))


def test_a_later_attempt_takes_the_place_and_the_nodes_of_the_earlier_one() -> None:
    async def main() -> None:
        async with running(World("n1", "n2")) as run:
            first, _ = await run.admit(nodes=("n1", "n2"))
            second, decision = await run.admit(nodes=("n1", "n2"), attempt=1)
            assert decision.decision is Verdict.ADMIT
            assert {row.lease.gate for row in run.engine.leases()} == {second.id}
            late = await run.engine.ask(GateRequest(job="train", nodes=("n1",), attempt=0, min_nodes=None))
            assert late.id != second.id if late.id != first.id else True

    with pytest.raises(ConflictError):
        asyncio.run(main())


async def test_an_earlier_attempt_that_comes_late_is_superseded() -> None:
    async with running(World("n1")) as run:
        open_gate = await run.engine.ask(GateRequest(job="train", nodes=("n9",), attempt=3))
        late = await run.engine.ask(GateRequest(job="train", nodes=("n1",), attempt=2))
        assert late.decision is not None
        assert late.decision.reasons[0].code == "Superseded"
        await run.engine.ask(GateRequest(job="train", nodes=("n1",), attempt=4))
        gone = await run.engine.get(open_gate.id)
        assert gone.decision is not None
        assert gone.decision.reasons[0].code == "Superseded"


def rights_of(*nodes: str) -> admission.Rights:
    return admission.Rights(may_end=lambda row: row.node in nodes, may_close=lambda node: node in nodes)


async def test_later_attempt_waits_for_an_open_gate_of_nodes_for_which_its_caller_may_not_speak() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        run.world.daemons["n2"].deaf = True
        first = await run.engine.ask(GateRequest(job="train", nodes=("n1", "n2")))
        await run.settle()
        later = await run.engine.ask(GateRequest(job="train", nodes=("n3",), attempt=1), rights=rights_of("n1", "n3"))
        await run.settle()
        (held,) = (await run.engine.wait(later.id, 0)).reasons
        assert (held.code, f"gate {first.id}" in held.message) == ("Allocated", True)
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED, "n2": LeaseState.GRANTED}
        run.world.daemons["n2"].deaf = False
        await run.settle()
        assert (await run.engine.wait(first.id, 0)).decision is Verdict.ADMIT
        waits = await run.engine.wait(later.id, 0)
        assert (waits.decision, {why.node for why in waits.reasons}) == (Verdict.HOLD, {"n1", "n2"})
        for node in ("n1", "n2"):
            run.world.end_job(node)
        await run.settle()
        assert (await run.engine.wait(later.id, 0)).decision is Verdict.ADMIT


async def test_open_gate_of_a_group_ends_once_a_member_on_each_of_its_nodes_asks_for_the_next_attempt() -> None:
    async with running(World("n1", "n2")) as run:

        async def ask(node: str, attempt: int) -> str:
            join = Join(group="g", size=3, rank=int(node[1]) - 1, member=f"{node}-{attempt}", node=node)
            request = GateRequest(job="g", attempt=attempt, join=join)
            return (await run.engine.ask(request, rights=rights_of(node), asker=node)).id

        first = {await ask(node, 0) for node in ("n1", "n2")}.pop()
        await ask("n1", 1)
        assert (await run.engine.wait(first, 0)).decision is Verdict.HOLD
        later = await ask("n2", 1)
        assert (await run.engine.wait(first, 0)).reasons[0].code == "Superseded"
        assert (await run.engine.get(later)).unfinished == {}


async def test_gate_that_is_superseded_while_it_grants_takes_its_leases_back() -> None:
    nobody = admission.Rights(may_end=lambda _: False, may_close=lambda _: True)
    async with running(World("n1", "n2")) as run:
        run.world.daemons["n2"].deaf = True
        first = await run.engine.ask(GateRequest(job="train", nodes=("n1", "n2")))
        await run.settle()
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED, "n2": LeaseState.GRANTED}
        later = await run.engine.ask(GateRequest(job="train", nodes=("n1",), attempt=1), rights=nobody)
        assert (await run.engine.wait(first.id, 0)).reasons[0].code == "Superseded"
        await run.settle()
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED, "n2": LeaseState.ENDING}
        assert {row.lease.gate for row in run.engine.leases() if row.node == "n1"} == {later.id}


async def test_of_two_jobs_for_one_node_the_second_holds_until_the_first_is_gone() -> None:
    async with running(World("n1", "n2")) as run:
        await run.admit(nodes=("n1", "n2"))
        gate, held = await run.admit(job="other", nodes=("n2",))
        assert held.decision is Verdict.HOLD
        assert "job train" in held.reasons[0].message
        run.world.end_job("n2")
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT


async def test_a_node_that_has_lost_its_lease_is_not_free_and_takes_it_again() -> None:
    async with running(World("n1")) as run:
        await run.admit(nodes=("n1",))
        daemon = run.world.daemons["n1"]
        before = daemon.state.leases
        daemon.reports.clear()
        daemon.done.clear()
        run.world.renew("n1", leases=())
        run.world.tell("n1")
        await run.engine.run_once()
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED}
        gate, held = await run.admit(job="other", nodes=("n1",))
        assert held.decision is Verdict.HOLD
        assert [one.id for one in daemon.state.leases] == [one.id for one in before]
        assert daemon.reports[before[0].id].status == "accepted"
        run.world.end_job("n1")
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT


async def test_a_lease_that_is_ending_is_over_once_the_node_no_longer_shows_it() -> None:
    async with running(World("n1")) as run:
        gate, _ = await run.admit(nodes=("n1",))
        await run.engine.release(gate.id)
        run.world.daemons["n1"].reports.clear()
        run.world.renew("n1", leases=())
        run.world.tell("n1")
        await run.engine.run_once()
        assert run.engine.leases() == ()


async def test_release_ends_the_leases_and_the_node_is_free_once_it_has_let_go() -> None:
    async with running(World("n1")) as run:
        gate, _ = await run.admit(nodes=("n1",))
        first = (await run.engine.release(gate.id)).at
        run.world.now += 1.0
        assert of_states(run) == {"n1": LeaseState.ENDING}
        (order,) = run.world.daemons["n1"].orders or ()
        assert (order.id, order.withdrawn) == (gate.granted["n1"].lease_id, True)
        again = await run.engine.release(gate.id)
        assert [row.node for row in again.leases] == ["n1"], "it has not let go yet"
        assert again.at == first
        await run.settle()
        assert run.engine.leases() == ()
        assert run.world.daemons["n1"].orders == ()
        once_more = await run.engine.release(gate.id)
        assert (once_more.leases, once_more.at) == ((), first)
        with pytest.raises(NotFoundError):
            await run.engine.release("g-never")


async def test_job_that_ended_by_itself_has_nothing_to_give_back() -> None:
    async with running(World("n1")) as run:
        gate, _ = await run.admit(nodes=("n1",))
        run.world.end_job("n1")
        await run.settle()
        assert run.engine.leases() == ()
        with pytest.raises(NotFoundError, match="job train attempt 0 has no lease"):
            await run.engine.release(gate.id)


async def test_a_lease_of_a_node_without_a_daemon_ends_when_its_time_is_over() -> None:
    world = World("n1", "n2")
    async with running(world) as run:
        await run.admit(nodes=("n1", "n2"), lease_seconds=3600.0)
        world.without_daemon.add("n1")
        world.now += 3590
        await run.engine.run_once()
        assert of_states(run).keys() == {"n1", "n2"}
        world.now += 40
        await run.engine.run_once()
        assert of_states(run).keys() == {"n2"}, "a daemon that is silent may see the job of its node"


async def test_a_job_is_leased_for_what_it_says_else_for_its_runtime_or_a_day() -> None:
    async with running(World("n1")) as run:
        for attempt, (asked, seconds) in enumerate(
            [({"lease_seconds": 60.0}, 60.0), ({"runtime_seconds": 1e6}, 1e6), ({}, 86400.0)]
        ):
            gate, decision = await run.admit(nodes=("n1",), attempt=attempt, **asked)
            assert decision.policy["lease_seconds"] == seconds
            assert [row.lease.max_seconds for row in run.engine.leases() if row.lease.gate == gate.id] == [seconds]
        with pytest.raises(BadInputError, match="lease_seconds must be more than 0 and at most 2592000"):
            await run.engine.ask(GateRequest(job="long", nodes=("n1",), lease_seconds=3e6))
        with pytest.raises(BadInputError, match="workload must be pod:NAMESPACE/NAME"):
            await run.engine.ask(GateRequest(job="odd", nodes=("n1",), workload="pod:ml/"))


async def test_a_held_gate_and_its_lease_survive_a_restart(database: str) -> None:
    world = World("n1", "n2")
    async with running(world, database) as run:
        await run.admit(nodes=("n1",))
        held = await run.engine.ask(GateRequest(job="other", nodes=("n1", "n2")))
        assert held.phase is Phase.WAITING
    async with running(world, database) as run:
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED}
        run.world.end_job("n1")
        await run.settle()
        assert (await run.engine.wait(held.id, 0)).decision is Verdict.ADMIT


async def test_after_a_restart_the_same_orders_go_out_under_the_same_ids(database: str) -> None:
    world = World()
    world.add("n1", results=())
    async with running(world, database) as run:
        await run.engine.ask(GateRequest(job="train", nodes=("n1",)))
        before = world.daemons["n1"].orders
        assert before
    async with running(world, database) as run:
        assert world.daemons["n1"].orders == before
        await run.settle()
        assert len(world.daemons["n1"].runs) == 1


async def test_a_node_not_heard_since_the_restart_is_told_nothing(database: str) -> None:
    world = World("n1")
    async with running(world, database) as run:
        await run.admit(nodes=("n1",))
    async with running(world, database, hear=False) as run:
        await run.engine.run_once()
        assert world.daemons["n1"].orders is None


async def test_leases_of_a_lost_database_are_adopted_and_nothing_is_admitted_until_recovered() -> None:
    world = World("n2")
    world.daemons["n2"].issuer = "store-lost"
    world.add("n1", leases=(lease("old-lease", job="big"),)).issuer = "store-lost"
    async with running(world) as run:
        gate, held = await run.admit(nodes=("n2",))
        assert held.reasons[0].code == "Recovering"
        orders = world.daemons["n1"].orders
        assert orders is not None
        assert [order.id for order in orders] == ["old-lease"]
        assert await run.engine.recover("ana")
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT
        _, other = await run.admit(job="other", nodes=("n1",))
        assert "job big" in other.reasons[0].message
        assert world.daemons["n1"].state.leases


async def test_recovery_ends_by_itself_and_is_not_begun_again_by_a_node_that_moves_in() -> None:
    world = World("n1")
    world.add("n2", leases=(lease("old-lease", job="big"),))
    for daemon in world.daemons.values():
        daemon.issuer = "store-lost"
    async with running(world) as run:
        assert run.engine.recovering()
        world.now += 301
        await run.settle()
        assert run.engine.recovering() is None
        world.add("n3", leases=(lease("moved-in"),)).issuer = "store-of-others"
        await run.settle()
        assert run.engine.recovering() is None
        assert "n3" in of_states(run)


async def test_a_new_installation_among_nodes_that_have_no_lease_holds_nobody() -> None:
    """They know another database, but there is nothing of it that could be lost."""
    world = World("n1", "n2", "n3")
    for daemon in world.daemons.values():
        daemon.issuer = "store-before"
    async with running(world) as run:
        assert run.engine.recovering() is None
        _, answer = await run.admit(nodes=("n1", "n2"))
        assert answer.decision is Verdict.ADMIT
        kept = Quarantine(reason="smells of smoke", owner="ana", owner_kind="person", since=NOW, until=None)
        world.add("n4", quarantine=kept).issuer = "store-before"
        await run.settle()
        assert run.engine.recovering(), "now there is"


async def test_a_restored_old_copy_of_the_database_is_noticed_by_leases_it_does_not_know(database: str) -> None:
    world = World("n1", "n2")
    async with running(world, database) as run:
        world.now += 301
        await run.settle()
        store_id = run.store.store_id
    for name in world.daemons:
        unknown = lease(f"g-later:lease:1:{name}", issuer=store_id, gate_id="g-later")
        world.renew(name, leases=(unknown,))
    async with running(world, database) as run:
        assert run.engine.recovering()
        assert of_states(run) == dict.fromkeys(("n1", "n2"), LeaseState.ACKNOWLEDGED)


async def test_a_quarantine_of_a_lost_database_is_kept() -> None:
    kept = Quarantine(reason="smells of smoke", owner="ana", owner_kind="person", since=NOW, until=None)
    world = World()
    world.add("n1", quarantine=kept).issuer = "store-lost"
    async with running(world) as run:
        assert world.daemons["n1"].quarantine == kept
        await run.engine.recover("ana")
        _, decision = await run.admit(nodes=("n1",))
        assert decision.reasons[0].code == "Quarantined"


async def test_a_quarantine_survives_a_restart_until_it_is_lifted(database: str) -> None:
    """Rival fault 19."""
    kept = Quarantine(reason="smells of smoke", owner="ana", owner_kind="person", since=NOW, until=None)
    world = World("n1")
    async with running(world, database) as run:
        await run.engine.quarantine("n1", kept)
    world.daemons["n1"].quarantine = None
    async with running(world, database) as run:
        _, decision = await run.admit(nodes=("n1",))
        assert decision.reasons[0].code == "Quarantined"
        await run.engine.quarantine("n1", None)
        _, decision = await run.admit(nodes=("n1",), attempt=1)
        assert decision.decision is Verdict.ADMIT


async def test_an_override_frees_a_held_gate_and_is_in_the_audit_trail() -> None:
    async with running(World("n1")) as run:
        gate = await run.engine.ask(GateRequest(job="train", nodes=("n1", "n9")))
        assert gate.decision is None
        word = Override(job="train", reason="paper deadline", owner="ana", since=NOW, until=NOW + 60)
        await run.engine.override("train", word)
        decision = await run.engine.wait(gate.id, 5)
        assert (decision.decision, decision.would) == (Verdict.ADMIT, Verdict.HOLD)
        assert run.engine.overrides() == (word,)
        trail = await run.store.run(lambda c: c.execute(sa.text("SELECT kind, message FROM events")).all())
        assert ("override", "by ana: paper deadline") in [tuple(row) for row in trail]


async def test_observe_leases_what_it_admits() -> None:
    world = World("n1")
    world.add("n2", results=with_wrong())
    async with running(world) as run:
        _, decision = await run.admit(nodes=("n1", "n2"), mode=Mode.OBSERVE)
        assert decision.would is Verdict.REJECT
        assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED, "n2": LeaseState.ACKNOWLEDGED}


@pytest.mark.parametrize(("asked", "again"), [({"nodes": ("n1",)}, True), ({"pool": "a", "count": 1}, False)])
async def test_who_asks_again_in_observe_mode_is_admitted_though_its_node_refused_the_lease(
    asked: dict[str, object], again: bool
) -> None:
    """Named nodes are the scheduler's choice; one that we took out of a pool may be another job's by now."""
    world = World("n1")
    world.daemons["n1"].refuses_leases = True
    request = GateRequest(job="train", mode=Mode.OBSERVE, **asked)  # type: ignore[arg-type]
    async with running(world) as run:
        gate = await run.engine.ask(request)
        await run.settle()
        world.now += OBSERVE_SECONDS
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT
        assert of_states(run) == {}, "the node did not keep it"
        if again:
            assert (await run.engine.ask(request)).id == gate.id
        else:
            with pytest.raises(ConflictError, match="has ended"):
                await run.engine.ask(request)


async def test_a_decision_is_stored_with_the_evidence_it_went_by(database: str) -> None:
    world = World("n1")
    world.add("n2", results=with_wrong())
    async with running(world, database) as run:
        gate, _ = await run.admit(nodes=("n1", "n2"), min_nodes=1)
        await run.engine.outcome(gate.id, "failed", "loss is NaN")
    async with running(world, database) as run:
        explained = await run.engine.explain(gate.id)
        assert [s.node for s in explained.states] == ["n1", "n2"]
        assert explained.states[1].results == with_wrong()
        assert explained.outcome is not None
        assert explained.outcome.message == "loss is NaN"
        assert [g.id for g in await run.engine.gates(limit=5)] == [gate.id]


async def test_a_full_disk_is_a_store_error_and_the_gate_goes_on_when_there_is_room(database: str) -> None:
    """Rival fault 8, 27: what cannot be written is not answered, and nothing that was is lost."""
    world = World("n1", "n2")
    async with running(world, database) as run:
        gate = await run.engine.ask(GateRequest(job="train", nodes=("n1",)))
        await full(run.store, True)
        words = "disk is full; free some space"
        with pytest.raises(StoreError, match=words):
            await fill(run.engine)
        await run.settle()
        stuck = await run.engine.wait(gate.id, 0)
        assert stuck.decision is Verdict.HOLD
        await full(run.store, False)
        world.now += 2
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT


async def fill(engine: Engine) -> None:
    """Ask until a page more would be needed."""
    for attempt in range(2000):
        await engine.ask(GateRequest(job="other" * 40, nodes=("n2",), attempt=attempt))


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        ({"nodes": ()}, "name nodes, or a pool"),
        ({"nodes": ("n1",), "pool": "a", "count": 1}, "name nodes, or a pool"),
        ({"nodes": ("n1", "n1")}, "node named twice: n1"),
        ({"nodes": ("n1",), "count": 1}, "count belongs to a pool"),
        ({"pool": "a"}, "give a count"),
        ({"pool": "a", "count": -1}, "not -1"),
        ({"pool": "a", "count": 10**9}, "not 1000000000"),
        ({"pool": "a", "count": 2, "min_nodes": 3}, "min_nodes must be 1 to 2"),
        ({"nodes": ("n1",), "max_age_seconds": float("nan")}, "max_age_seconds"),
        ({"nodes": ("n1",), "wait_seconds": float("inf")}, "wait_seconds"),
        ({"nodes": ("n1",), "attempt": -1}, "attempt"),
        ({"nodes": ("n1",), "job": ""}, "job must be"),
        ({"nodes": ("a\nb",)}, "printable"),
    ],
)
async def test_a_request_that_cannot_be_meant_is_refused_in_one_sentence(
    request_of: dict[str, object], words: str
) -> None:
    async with running(World("n1")) as run:
        with pytest.raises(BadInputError, match=words):
            await run.engine.ask(GateRequest(**{"job": "train", **request_of}))  # type: ignore[arg-type]


async def test_more_open_gates_than_allowed_are_refused() -> None:
    policy = dataclasses.replace(POLICY, tuning=dataclasses.replace(POLICY.tuning, max_open_gates=1))
    async with running(World("n1"), policy=policy) as run:
        await run.engine.ask(GateRequest(job="one", nodes=("n9",)))
        with pytest.raises(StoreError, match="open already"):
            await run.engine.ask(GateRequest(job="two", nodes=("n9",)))


def test_limit_of_open_gates_compares_each_name_with_few_others() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    with contextlib.closing(Store.open("sqlite://")) as store:
        fleet_state = FleetState(store.load(), store_id=store.store_id, policy=POLICY)
    gates, names = 20, 200
    for number in range(gates):
        request = GateRequest(job=f"job-{number}", nodes=tuple(Name(f"n{number}-{node}") for node in range(names)))
        admission.open_gate(Batch(now=NOW), fleet_state, POLICY, request, asker="token 'a'")
    assert len(fleet_state.gates) == gates
    assert compared <= gates * names
    compared = 0
    with pytest.raises(BadInputError, match="named twice: n0"):
        admission.check_request(GateRequest(job="job", nodes=tuple(Name(f"n{node % 199}") for node in range(names))))
    assert compared <= 4 * names


async def test_a_refused_lease_order_is_acknowledged_and_forgotten() -> None:
    world = World("n1")
    world.daemons["n1"].refuses_leases = True
    async with running(world) as run:
        _, decision = await run.admit(nodes=("n1",))
        assert decision.reasons[0].code == "LeaseNotAcknowledged"
        assert world.daemons["n1"].reports == {}
        assert run.engine.leases() == ()


async def test_reports_on_orders_nobody_gave_are_acknowledged() -> None:
    world = World("n1")
    world.daemons["n1"].reports["g-long-ago:run:1:n1"] = OrderReport(status="done")
    async with running(world):
        assert world.daemons["n1"].reports == {}


async def test_time_alone_ends_a_gate_on_the_real_clock() -> None:
    world = World(now=steady_clock()())
    clock: Callable[[], float] = steady_clock()
    store = Store.open("sqlite://")
    engine = Engine(store=store, registry=world, policy=POLICY, clock=clock)
    task = asyncio.create_task(engine.run(), name="engine")
    gate = await engine.ask(GateRequest(job="train", nodes=("n1",), wait_seconds=0.2))
    decision = await engine.wait(gate.id, 5 * PATIENCE)
    assert decision.reasons[0].code == "Expired"
    assert decision.retryable
    assert 0.2 <= decision.duration_seconds < 5 * PATIENCE
    task.cancel()
    store.close()


async def test_clock_that_was_set_back_moves_no_deadline_of_an_open_gate_by_a_restart() -> None:
    world = World(now=time.time() + 86400.0)
    async with running(world) as run:
        gate = await run.engine.ask(GateRequest(job="train", nodes=("n1",), wait_seconds=60.0))
        clock = steady_clock(run.store.load().gates)
    assert gate.created_at <= clock() < gate.created_at + PATIENCE
    assert steady_clock()() < gate.created_at


async def test_a_pool_gate_takes_nodes_as_they_come() -> None:
    world = World("n1")
    async with running(world, policy=Policy(collective=False)) as run:
        gate = await run.engine.ask(GateRequest(job="train", pool="a", count=2))
        assert gate.decision is None
        world.add("n2", results=good_results())
        world.now += 2
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT


async def test_what_is_old_is_dropped_and_what_has_ended_is_lifted(database: str) -> None:
    policy = dataclasses.replace(POLICY, keep_gates=1)
    kept = Quarantine(reason="fan", owner="ana", owner_kind="person", since=NOW, until=NOW + 60)
    async with running(World("n1"), database, policy) as run:
        old = await run.engine.ask(GateRequest(job="train", nodes=("n1",), attempt=1))
        await run.engine.release(old.id)
        new = await run.engine.ask(GateRequest(job="train", nodes=("n1",), attempt=2))
        await run.engine.release(new.id)
        await run.engine.quarantine("n1", kept)
        run.world.now += 3601
        run.world.sync("n1")
        for _ in range(200):
            await asyncio.sleep(0.01)
            if run.world.daemons["n1"].quarantine is None:
                break
        assert run.world.daemons["n1"].quarantine is None
        assert [gate.id for gate in await run.engine.gates(limit=9)] == [new.id]
        with pytest.raises(NotFoundError):
            await run.engine.get(old.id)


async def test_a_forgotten_node_leaves_nothing_and_its_labels_are_kept_again_when_it_returns(database: str) -> None:
    world = World("n1")
    async with running(world, database) as run:
        await run.admit(nodes=("n1",))
        world.daemons["n1"].deaf = True
        with pytest.raises(ConflictError, match="leased to job 'train'"):
            await run.engine.forget("n1", "ana")
        assert run.engine.leases() != ()
        await run.engine.release_node("n1", "ana")
        await run.engine.forget("n1", "ana")
        assert run.engine.leases() == ()
        assert run.store.load().nodes == ()
        world.add("n1")
        await run.settle()
        assert run.store.load().nodes[0].labels == {"pool": "a"}


async def test_reports_that_come_together_are_taken_in_together() -> None:
    """A pass at once for the first one; one more for all that come within a hundredth of a second."""
    async with running(World("n1", "n2")) as run:
        engine, world = run.engine, run.world
        passes: list[set[str]] = []
        compute = engine._memory.compute

        def counted(batch: Batch, heard: set[str]) -> Pass:
            passes.append(set(heard))
            return compute(batch, heard)

        engine._memory.compute = counted  # type: ignore[method-assign]
        task = asyncio.create_task(engine.run())
        while not passes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        passes.clear()
        for _ in range(20):
            world.sync("n1")
            world.sync("n2")
            await asyncio.sleep(0)
        while not passes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        assert passes == [{"n1", "n2"}]
