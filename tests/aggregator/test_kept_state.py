"""States that are kept packed: their ages move on unopened, and the database has them as they were at the decision."""

from __future__ import annotations

import dataclasses
import zlib

from checks.contract import Finding, Measurement, Status
from healthd.aggregator.fleet.node_record import CompactState
from healthd.aggregator.fleet.packed_records import KeptState, later, pack_all, unpack_all
from healthd.core.model import NodeState
from healthd.core.wire import decode
from tests.aggregator.parts import state

BODIES = ("checks", "results", "reasons", "inventory")


def kept() -> NodeState:
    """Came at 100 with results three seconds old; at 110 it said of one that it is 1.5 seconds old; two seconds on."""
    compact = CompactState(state("n1", age=3.0), 100.0)
    compact.refresh({"matmul": 1.5}, 110.0)
    return later(compact.open(), 2.0)


def test_a_state_is_stored_and_aged_without_being_opened() -> None:
    found = kept()
    packed = pack_all([found, state("n2")])
    assert isinstance(found, KeptState)
    assert not {*BODIES} & vars(found).keys(), "somebody opened it"
    first, second = unpack_all(packed, what="evidence")
    assert {result.check: result.age_seconds for result in first.results} == {"memory_free": 15.0, "matmul": 3.5}
    assert (first.results, first.checks, first.node) == (found.results, found.checks, "n1")
    assert second == state("n2")
    assert type(first) is NodeState


def test_what_other_nodes_show_is_stored_with_it() -> None:
    shown = Finding(target="node", status=Status.FAIL, message="slow", reason="SlowSteps", measurements=())
    steps = dataclasses.replace(state("n1").results[1], check="job_steps")
    specs = (*state("n1").checks, dataclasses.replace(state("n1").checks[1], name="job_steps"))
    compact = CompactState(state("n1", results=(*state("n1").results, steps), checks=specs), 100.0)
    compact.amend({"job_steps": (shown,)})
    found = compact.open()
    (stored,) = unpack_all(pack_all([found]), what="evidence")
    result = next(one for one in stored.results if one.check == "job_steps")
    assert (result.status, result.findings[-1:]) == (Status.FAIL, (shown,))
    assert [reason.code for reason in stored.reasons] == ["SlowSteps"]
    assert stored.health is found.health


def test_the_version_before_reads_it_and_is_read() -> None:
    packed = pack_all([kept()])
    (older,) = decode(zlib.decompress(packed), tuple[NodeState, ...], what="evidence")
    assert [result.age_seconds for result in older.results] == [3.0, 3.0], "as it came"
    assert unpack_all(pack_all([older]), what="evidence") == (older,)


def test_an_event_counts_from_the_state_that_told_of_it_though_its_check_has_run_since() -> None:
    left = Measurement(name="scheduled_event_seconds", value=1000.0, lower=None, upper=None, origin="")
    found = Finding(target="node", status=Status.WARN, message="stop", reason="ScheduledEvent", measurements=(left,))
    ran = dataclasses.replace(state("n1").results[1], check="scheduled_events", findings=(found,), age_seconds=10.0)
    compact = CompactState(state("n1", results=(ran,)), 100.0)
    compact.refresh({"scheduled_events": 1.0}, 160.0)
    event = compact.event(170.0)
    assert event is not None
    assert event.seconds == 1000.0 - 10.0 - 70.0
