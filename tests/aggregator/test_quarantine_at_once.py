"""A quarantine that begins or ends holds in the very pass in which it does, for gates as for the rules."""

from __future__ import annotations

import asyncio

from healthd.aggregator.gate.records import Phase
from healthd.core.model import GateRequest, Quarantine
from tests.aggregator.engine_kit import running
from tests.aggregator.rules_engine_kit import kept, kinds, measured
from tests.aggregator.world import World, good_results, with_wrong


def asked(*names: str) -> GateRequest:
    return GateRequest(job="a", nodes=names, wait_seconds=600.0)


async def test_gate_in_the_pass_in_which_a_person_ends_a_quarantine_has_the_node_whatever_the_node_still_tells() -> (
    None
):
    async with running(World("n1", "n2", "n3")) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        measured(run, "n1", good_results(1.0), quarantine=kept(run, "n1"))
        await run.engine.run_once()
        _, gate = await asyncio.gather(run.engine.quarantine("n1", None, why="by ana"), run.engine.ask(asked("n1")))
        assert gate.phase is Phase.GRANTING


async def test_gate_in_the_pass_in_which_a_person_quarantines_a_node_does_not_have_it() -> None:
    async with running(World("n1", "n2")) as run:
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=None)
        _, gate = await asyncio.gather(run.engine.quarantine("n1", word), run.engine.ask(asked("n1")))
        assert gate.decision is not None
        assert gate.decision.excluded[0].reasons[0].message == "n1 is quarantined by ana: fan"


async def test_rules_take_over_at_the_moment_at_which_a_persons_quarantine_runs_out() -> None:
    """Not at the next word of the node: a gate would have it in between."""
    async with running(World("n1", "n2", "n3")) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        until = run.world.now + 30
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=until)
        await run.engine.quarantine("n1", word)
        measured(run, "n1", good_results(1.0), after=20.0)
        await run.engine.run_once()
        assert run.engine._memory.next_due(run.world.now) == until
        run.world.now = until + 1.0
        gate = await run.engine.ask(asked("n1"))
        found = kept(run, "n1")
        assert found is not None
        assert found.owner == "rule:hard"
        assert gate.decision is not None
        assert gate.decision.excluded[0].reasons[0].code == "Quarantined"


async def test_rules_look_at_a_node_in_the_pass_in_which_a_person_quarantines_it() -> None:
    """Or the end of it would be news to them, where the node says nothing until then."""
    async with running(World("n1", "n2", "n3")) as run:
        measured(run, "n1", with_wrong(1.0))
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        until = run.world.now + 30
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=until)
        await run.engine.quarantine("n1", word)
        assert run.engine._memory.next_due(run.world.now) == until


async def test_node_is_told_the_end_of_its_quarantine_at_the_moment_that_a_person_said() -> None:
    """A gate admits it from then on, so that its own word (`/readyz`, the Kubernetes condition) must not lag behind."""
    async with running(World("n1", "n2")) as run:
        until = run.world.now + 30
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=until)
        await run.engine.quarantine("n1", word)
        assert run.engine._memory.next_due(run.world.now) == until
        run.world.now = until
        await run.engine.run_once()
        assert kept(run, "n1") is None
        assert run.engine.quarantines() == {}
        assert (await kinds(run, "n1"))[0] == "quarantine lifted"
        assert run.engine._memory.next_due(run.world.now) > until
