"""What the tests of store, and those beside them, are made with."""

from __future__ import annotations

from healthd.aggregator.engine.admission import new_gate
from healthd.aggregator.gate.decisions import close
from healthd.aggregator.gate.records import Closing, Gate
from healthd.core.model import GateRequest, Quarantine
from tests.aggregator.world import NOW, POLICY


def gate(number: int, job: str = "train") -> Gate:
    request = GateRequest(job=job, attempt=number, nodes=("n1",))
    return new_gate(f"g-{number:012x}-00", request, POLICY, NOW + number)


def ended(number: int, job: str = "train") -> Gate:
    after, _ = close(NOW + number, gate(number, job), POLICY, Closing.RELEASED, "withdrawn")
    return after


QUARANTINE = Quarantine(reason="fan", owner="ana", owner_kind="person", since=NOW, until=None)
