"""What a node says that it holds counts for that node: nobody stops a fleet or another job's gate with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from healthd.errors import BadInputError, ConflictError
from healthd.fleet.model import LeaseState
from healthd.model import LARGEST_ATTEMPT, GateRequest, Join, Verdict
from tests.fleet.parts import Clock, Node
from tests.fleet.parts import fleet as registry
from tests.fleet.parts import state as node_state
from tests.fleet.test_engine import Running, of_states, running
from tests.fleet.world import POLICY, World, lease


async def claim(run: Running, node: str, lease_id: str, **of: object) -> None:
    """The node says that it holds this lease, and the engine hears it."""
    run.world.renew(node, leases=(lease(lease_id, **of),))  # type: ignore[arg-type]
    run.world.tell(node)
    await run.engine.turn()


async def proved(run: Running) -> None:
    """The database has proved itself: nobody has spoken against it for long enough."""
    run.world.now += POLICY.recovery_seconds + 1
    await run.settle(rounds=2)


async def claim_often(run: Running) -> None:
    """One of twelve nodes claims lease after lease of this very database; nobody else feels it."""
    for number in range(3):
        gate = f"g-later-{number}"
        await claim(run, "n0", f"{gate}:lease:1:n0", issuer=run.store.store_id, gate_id=gate)
        assert run.engine.recovering() is None
    assert "n0" in of_states(run), "its own node is kept for the job that it names"
    _, decision = await run.admit(nodes=("n1",))
    assert decision.decision is Verdict.ADMIT


def test_node_that_claims_leases_of_our_own_database_stops_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(*(f"n{number}" for number in range(12)))
        async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
            await proved(run)
            await claim_often(run)

    asyncio.run(main())


def test_nor_does_it_after_a_restart_when_a_copy_could_have_been_restored(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(*(f"n{number}" for number in range(12)))
        async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
            await proved(run)
        async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
            await claim_often(run)

    asyncio.run(main())


def test_fleet_is_taken_for_lost_by_a_tenth_of_it_and_only_while_it_can_have_been_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        names = [f"n{number}" for number in range(30)]
        world = World(*names)
        async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
            await proved(run)
        async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
            for name in names[:2]:
                await claim(run, name, f"g-9:lease:1:{name}", issuer=run.store.store_id, gate_id="g-9")
            assert run.engine.recovering() is None
            await claim(run, "n2", "g-9:lease:1:n2", issuer=run.store.store_id, gate_id="g-9")
            assert run.engine.recovering()
            await run.engine.recover("ana")
            for name in names[3:9]:
                await claim(run, name, f"g-9:lease:1:{name}", issuer=run.store.store_id, gate_id="g-9")
            assert run.engine.recovering() is None, "a person has said that the fleet is known"

    asyncio.run(main())


def test_claim_of_a_late_attempt_supersedes_no_gate_of_the_job() -> None:
    async def main() -> None:
        async with running(World("n1", "n2")) as run:
            await claim(run, "n2", "g-x:lease:1:n2", job="train", attempt=LARGEST_ATTEMPT, gate_id="g-x")
            _, decision = await run.admit(nodes=("n1",))
            assert decision.decision is Verdict.ADMIT
            assert of_states(run) == dict.fromkeys(("n1", "n2"), LeaseState.ACKNOWLEDGED)

    asyncio.run(main())


def test_group_takes_the_place_of_what_another_database_gave_it_and_counts_by_itself() -> None:
    """Its gates count on by themselves, so how far the lost database had counted is not known."""

    async def main() -> None:
        async with running(World("n1")) as run:
            await claim(run, "n1", "g-x:lease:1:n1", job="train", attempt=LARGEST_ATTEMPT, gate_id="g-x")
            join = Join(group="train", size=1, rank=0, member="pod-1", node="n1")
            gate = await run.engine.ask(GateRequest(job="train", join=join))
            assert gate.request.attempt == 0
            await run.settle()
            assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT

    asyncio.run(main())


def test_group_whose_attempts_are_used_up_is_told_so() -> None:
    async def main() -> None:
        async with running(World("n1")) as run:
            gate = await run.engine.ask(GateRequest(job="train", attempt=LARGEST_ATTEMPT, nodes=("n1",)))
            await run.engine.release(gate.id)
            join = Join(group="train", size=1, rank=0, member="pod-1", node="n1")
            with pytest.raises(ConflictError, match="name the job otherwise"):
                await run.engine.ask(GateRequest(job="train", join=join))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["another node's", "an open gate's"])
def test_node_cannot_claim_the_lease_that_another_node_is_about_to_get(how: str) -> None:
    async def main() -> None:
        async with running(World("n1", "n2")) as run:
            run.world.daemons["n1"].deaf = True
            gate = await run.engine.ask(GateRequest(job="train", nodes=("n1",)))
            (coming,) = gate.granted.values()
            gate_id = "g-x" if how == "another node's" else gate.id
            await run.engine.release(gate.id)
            run.world.daemons["n1"].deaf = False
            await run.settle()
            assert run.engine.leases() == ()
            await claim(run, "n2", coming.lease_id, gate_id=gate_id)
            assert run.engine.leases() == ()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("claimed", "words"),
    [
        ([lease("l", attempt=2**40)], "attempt must be from 0 to 2147483647, not 1099511627776"),
        ([lease("l", attempt=-1)], "attempt must be from 0"),
        ([lease("l" * 401)], "id must have 1 to 400 characters"),
        ([lease("l", job="")], "job must have 1 to 256 characters"),
        ([lease(f"l{number}") for number in range(17)], "17 leases on one node; at most 16"),
    ],
)
def test_claims_have_the_bounds_of_what_is_kept(claimed: list[object], words: str) -> None:
    async def main() -> None:
        clock = Clock()
        node = Node(registry(clock), clock)
        with pytest.raises(BadInputError, match=words):
            await node.say(node_state(leases=tuple(claimed)))
        await node.say(node_state())

    asyncio.run(main())


def test_attempt_of_a_request_has_a_bound() -> None:
    async def main() -> None:
        async with running(World("n1")) as run:
            with pytest.raises(BadInputError, match="attempt must be from 0 to 2147483647, not 1099511627776"):
                await run.engine.ask(GateRequest(job="train", attempt=2**40, nodes=("n1",)))

    asyncio.run(main())
