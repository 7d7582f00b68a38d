"""What a node says that it holds counts for that node: nobody stops a fleet or another job's gate with it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from healthd.aggregator.gate.records import LeaseState
from healthd.aggregator.identity.tokens import Scope, new_token
from healthd.aggregator.store.reading import read_history
from healthd.core.errors import BadInputError, ConflictError
from healthd.core.model import LARGEST_ATTEMPT, GateRequest, Join, Verdict
from tests.aggregator.api_kit import Daemon, scenario
from tests.aggregator.engine_kit import Running, of_states, running
from tests.aggregator.parts import Clock, Node
from tests.aggregator.parts import fleet as registry
from tests.aggregator.parts import state as node_state
from tests.aggregator.world import POLICY, World, lease


async def claim(run: Running, node: str, lease_id: str, **of: object) -> None:
    """The node says that it holds this lease, and the engine hears it."""
    run.world.renew(node, leases=(lease(lease_id, **of),))  # type: ignore[arg-type]
    run.world.tell(node)
    await run.engine.run_once()


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


async def test_node_that_claims_leases_of_our_own_database_stops_nobody_else(tmp_path: Path) -> None:
    world = World(*(f"n{number}" for number in range(12)))
    async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
        await proved(run)
        await claim_often(run)


async def test_nor_does_it_after_a_restart_when_a_copy_could_have_been_restored(tmp_path: Path) -> None:
    world = World(*(f"n{number}" for number in range(12)))
    async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
        await proved(run)
    async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
        await claim_often(run)


async def test_fleet_is_taken_for_lost_by_a_tenth_of_it_and_only_while_it_can_have_been_replaced(
    tmp_path: Path,
) -> None:
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


async def test_claim_of_a_late_attempt_supersedes_no_gate_of_the_job() -> None:
    async with running(World("n1", "n2")) as run:
        await claim(run, "n2", "g-x:lease:1:n2", job="train", attempt=LARGEST_ATTEMPT, gate_id="g-x")
        _, decision = await run.admit(nodes=("n1",))
        assert decision.decision is Verdict.ADMIT
        assert of_states(run) == dict.fromkeys(("n1", "n2"), LeaseState.ACKNOWLEDGED)


async def test_group_takes_the_place_of_what_another_database_gave_it_and_counts_by_itself() -> None:
    """Its gates count on by themselves, so how far the lost database had counted is not known."""
    async with running(World("n1")) as run:
        await claim(run, "n1", "g-x:lease:1:n1", job="train", attempt=LARGEST_ATTEMPT, gate_id="g-x")
        join = Join(group="train", size=1, rank=0, member="pod-1", node="n1")
        gate = await run.engine.ask(GateRequest(job="train", join=join))
        assert gate.request.attempt == 0
        await run.settle()
        assert (await run.engine.wait(gate.id, 0)).decision is Verdict.ADMIT


async def test_group_whose_attempts_are_used_up_is_told_so() -> None:
    async with running(World("n1")) as run:
        gate = await run.engine.ask(GateRequest(job="train", attempt=LARGEST_ATTEMPT, nodes=("n1",)))
        await run.engine.release(gate.id)
        join = Join(group="train", size=1, rank=0, member="pod-1", node="n1")
        with pytest.raises(ConflictError, match="use another job name"):
            await run.engine.ask(GateRequest(job="train", join=join))


@pytest.mark.parametrize("how", ["another node's", "an open gate's"])
async def test_node_cannot_claim_the_lease_that_another_node_is_about_to_get(how: str) -> None:
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
async def test_claims_have_the_bounds_of_what_is_kept(claimed: list[object], words: str) -> None:
    clock = Clock()
    node = Node(registry(clock), clock)
    with pytest.raises(BadInputError, match=words):
        await node.say(node_state(leases=tuple(claimed)))
    await node.say(node_state())


async def test_attempt_of_a_request_has_a_bound() -> None:
    async with running(World("n1")) as run:
        with pytest.raises(BadInputError, match="attempt must be from 0 to 2147483647, not 1099511627776"):
            await run.engine.ask(GateRequest(job="train", attempt=2**40, nodes=("n1",)))


# --- leases that nobody else can end ----------------------------------------------------------------------------------


async def adopted(run: Running) -> None:
    """n1 holds a lease that a lost database gave; this one has adopted it."""
    await claim(run, "n1", "g-lost:lease:1:n1", job="big", gate_id="g-lost")
    await run.settle()
    assert of_states(run) == {"n1": LeaseState.ACKNOWLEDGED}


async def history(run: Running, subject: str) -> list[str]:
    """What is kept of a node for people, newest first."""
    events = await run.store.run(lambda connection: read_history(connection, subject, limit=10))
    return [f"{event.kind}: {event.message}" for event in events]


async def test_person_ends_an_adopted_lease_and_the_node_is_free() -> None:
    async with running(World("n1")) as run:
        await adopted(run)
        (row,) = await run.engine.release_node("n1", "ana")
        assert row.lease.job == "big"
        assert "lease ending: job big attempt 0: released by ana" in await history(run, "n1")
        await run.settle()
        assert run.engine.leases() == ()
        _, decision = await run.admit(nodes=("n1",))
        assert decision.decision is Verdict.ADMIT
        await run.engine.release_node("n1", "ana")  # one of our own, just the same
        await run.settle()
        assert run.engine.leases() == ()
        assert await run.engine.release_node("n1", "ana") == ()


async def test_node_that_never_heard_that_its_lease_was_adopted_lets_go_of_it_all_the_same() -> None:
    """To leave it out would end nothing: the node knows it from another database."""
    async with running(World("n1")) as run:
        run.world.daemons["n1"].deaf = True
        await claim(run, "n1", "g-lost:lease:1:n1", job="big", gate_id="g-lost")
        await run.engine.release_node("n1", "ana")
        (order,) = run.world.daemons["n1"].orders or ()
        assert order.withdrawn
        assert of_states(run) == {"n1": LeaseState.ENDING}
        run.world.daemons["n1"].deaf = False
        await run.settle()
        assert run.engine.leases() == ()
        assert run.world.daemons["n1"].state.leases == ()


async def test_owner_of_a_job_ends_its_adopted_leases_by_the_gate_of_the_lost_database() -> None:
    async with running(World("n1")) as run:
        await adopted(run)
        given = await run.engine.release("g-lost")
        assert (given.gate, [row.node for row in given.leases]) == (None, ["n1"])
        await run.settle()
        assert run.engine.leases() == ()


async def test_word_of_a_person_about_a_node_counts_what_it_has_just_reported() -> None:
    """No pass has come to the report yet: the lease in it keeps the node all the same, and is released."""
    async with running(World("n1")) as run:
        run.world.daemons["n1"].deaf = True
        run.world.renew("n1", leases=(lease("g-lost:lease:1:n1", job="big", gate_id="g-lost"),))
        with pytest.raises(ConflictError, match="n1 is leased to job 'big'"):
            await run.engine.forget("n1", "ana")
        run.world.renew("n1", leases=(lease("g-lost:lease:2:n1", job="next", gate_id="g-lost"),))
        assert {row.lease.job for row in await run.engine.release_node("n1", "ana")} == {"big", "next"}


def test_admin_frees_a_node_that_is_gone_with_its_lease(tmp_path: Path) -> None:
    """Over HTTP: what used to answer 404 (no such gate) and 409 (leased) now has a way out that is named."""

    async def test(client: httpx.AsyncClient) -> None:
        gone = Daemon(client, "n1")
        gone.leases = {"g-lost:lease:1:n1": lease("g-lost:lease:1:n1", job="big", gate_id="g-lost")}
        await gone.sync()
        refused = await client.delete("/v1/nodes/n1")
        assert refused.status_code == 409
        assert "healthd fleet release-lease n1" in refused.json()["detail"]
        for _ in range(2):
            released = await client.delete("/v1/nodes/n1/leases")
            assert released.status_code == 200, released.text
            assert [row["lease"]["job"] for row in released.json()["released"]] == ["big"]
        assert (await client.delete("/v1/nodes/n1")).status_code == 200
        assert (await client.delete("/v1/nodes/n1/leases")).status_code == 404

    scenario(test, tmp_path)


def test_only_an_admin_ends_the_leases_of_a_node(tmp_path: Path) -> None:
    token, lines = new_token("hooks", [Scope.GATE])
    (tmp_path / "tokens.toml").write_text(lines)
    (tmp_path / "tokens.toml").chmod(0o600)

    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.delete("/v1/nodes/n1/leases", headers={"authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["detail"]) == (
            403,
            "token 'hooks' lacks scope 'admin'; it has: gate, read",
        )

    scenario(test, tmp_path, token_table=tmp_path / "tokens.toml")
