"""The rules look at the first state of a daemon that has taken over a name."""

from __future__ import annotations

from checks.contract import Status
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.policy import Policy
from healthd.aggregator.store.store import Store
from tests.aggregator.parts import Clock, Node, fleet, key_hash, result, state

OTHER = "another-key-another-key"


async def test_fault_in_the_first_state_after_a_rekey_is_not_taken_for_what_was_looked_at_before() -> None:
    store, clock = Store.open("sqlite://"), Clock()
    registry = fleet(clock, issuer=store.store_id)
    try:
        engine = Engine(store=store, registry=registry, policy=Policy(), clock=clock)
        await Node(registry, clock).join(state())
        await engine.run_once()
        registry.rekey("n1", key_hash(OTHER))
        node = Node(registry, clock, key=OTHER, incarnation="i2")
        wrong = result("matmul", status=Status.FAIL)
        await node.join(state(results=(wrong,)))
        await engine.run_once()
        assert "n1" in engine.quarantines()
    finally:
        store.close()
