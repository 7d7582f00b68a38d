"""Gates and nodes in maintenance: left out, by their platform's word, and to blame for nothing."""

from __future__ import annotations

import dataclasses

from checks.contract import Blame
from healthd.aggregator.drain.plan import culprits
from healthd.aggregator.fleet.records import FleetNode
from healthd.core.model import Verdict
from tests.aggregator.engine_kit import running
from tests.aggregator.gate_kit import admit, decided
from tests.aggregator.rules_engine_kit import kept, measured, slow_results
from tests.aggregator.world import NOW, POLICY, World, gate, node, state, step, view, with_wrong

DRAIN = "taint medik8s.io/drain"


def out_of_service(name: str, **changed: object) -> FleetNode:
    """Its results are bad, as they are while somebody works on it."""
    return node(name, dataclasses.replace(state(name, with_wrong()), maintenance=DRAIN), **changed)


def test_node_in_maintenance_is_left_out_with_that_reason_alone_and_accused_of_nothing() -> None:
    after, _ = step(NOW, gate(nodes=("n1", "n2")), view(out_of_service("n1"), node("n2")), POLICY)
    decision = decided(after)
    assert (decision.decision, decision.retryable) == (Verdict.REJECT, True)
    (excluded,) = decision.excluded
    assert [(why.code, why.blame) for why in excluded.reasons] == [("InMaintenance", Blame.CONTROL)]
    assert excluded.reasons[0].message == f"n1 is in maintenance: {DRAIN}"
    assert culprits(decision) == {}, "nothing takes it out of the scheduler's way for that"


def test_node_that_reboots_in_maintenance_is_not_called_silent() -> None:
    after, _ = step(NOW, gate(nodes=("n1",)), view(out_of_service("n1", heard_seconds=900.0)), POLICY)
    assert [why.code for why in decided(after).excluded[0].reasons] == ["InMaintenance"]


def test_gate_of_a_pool_takes_the_others() -> None:
    well = node("n2")
    after, _ = step(NOW, gate(pool="a", count=1, collective=False), view(out_of_service("n1"), well), POLICY)
    decision = admit(after, well)
    assert [one.node for one in decision.nodes] == ["n2"]


async def test_node_that_fails_in_maintenance_is_not_quarantined_and_one_that_fails_afterwards_is() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        for _ in range(4):
            measured(run, "n1", slow_results(), maintenance=DRAIN)
            await run.engine.run_once()
        measured(run, "n1", slow_results(), maintenance=None)
        await run.engine.run_once()
        assert kept(run, "n1") is None
        for _ in range(3):
            measured(run, "n1", slow_results(), maintenance=None)
            await run.engine.run_once()
        assert kept(run, "n1") is not None
