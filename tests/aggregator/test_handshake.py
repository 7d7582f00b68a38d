"""All go, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from healthd.aggregator.engine.preflights import MOST_HANDSHAKES, Handshakes
from healthd.aggregator.gate.rendezvous import Handshake
from healthd.core.model import AdmittedNode, Decision, HandshakeAnswer, HandshakeBody, Verdict

Step: TypeAlias = Callable[[Handshake, str, float], Handshake]


def make(included: frozenset[str]) -> Handshake:
    return Handshake(everyone=included | {"spare"}, included=included, deadline=10.0)


def test_go_only_when_every_included_node_has_acknowledged() -> None:
    shake = make(frozenset({"a", "b"})).acknowledge("a", 1.0)
    assert (shake.go, shake.missing) == (None, ("b",))
    assert shake.acknowledge("b", 2.0).go is True


def test_one_that_stays_away_stops_all() -> None:
    shake = make(frozenset({"a", "b"})).acknowledge("a", 1.0)
    late = shake.acknowledge("b", 10.0)
    assert (late.go, late.missing) == (False, ("b",))
    assert late.acknowledge("b", 11.0).go is False


def test_one_that_withdraws_stops_all_at_once_whatever_it_has_acknowledged() -> None:
    both = frozenset({"a", "b"})
    for shake in (make(both), make(both).acknowledge("a", 1.0)):
        without = shake.withdraw("a", 2.0)
        assert (without.go, without.missing, without.over) == (False, ("a",), True), "b had time to come"
        assert without.acknowledge("a", 3.0).acknowledge("b", 3.0).go is False


def test_one_that_withdraws_after_all_went_has_ended_and_the_others_go_on() -> None:
    shake = make(frozenset({"a", "b"})).acknowledge("a", 1.0).acknowledge("b", 1.0).withdraw("a", 2.0)
    assert (shake.go, shake.over) == (True, False)
    assert shake.end("b").over


def test_nobody_waits_for_one_that_has_withdrawn_to_hear_the_outcome() -> None:
    both = make(frozenset({"a", "b"}))
    first = both.withdraw("a", 1.0).tell("b").tell("spare")
    late = both.acknowledge("a", 1.0).acknowledge("b", 1.0).withdraw("a", 2.0).tell("b").tell("spare")
    spare = both.withdraw("spare", 1.0).acknowledge("a", 2.0).acknowledge("b", 2.0).tell("a").tell("b")
    assert (first.all_told, late.all_told, spare.all_told) == (True, True, True)
    assert not both.withdraw("a", 1.0).tell("spare").all_told


def test_a_stranger_withdraws_nothing() -> None:
    assert make(frozenset({"a"})).withdraw("spare", 1.0).go is None


def test_a_stranger_counts_for_nothing() -> None:
    assert make(frozenset({"a"})).acknowledge("x", 1.0).go is None


def test_nobody_is_told_before_it_is_settled() -> None:
    shake = make(frozenset({"a"}))
    assert shake.tell("a").told == frozenset()
    assert shake.acknowledge("a", 1.0).tell("a").told == {"a"}


def test_all_are_told_when_those_left_out_are_too() -> None:
    shake = make(frozenset({"a"})).acknowledge("a", 1.0).tell("a")
    assert not shake.all_told
    assert shake.tell("spare").all_told


def test_it_is_over_when_the_job_has_ended_everywhere() -> None:
    shake = make(frozenset({"a", "b"})).acknowledge("a", 1.0).acknowledge("b", 1.0)
    assert not shake.end("a").end("spare").over
    assert shake.end("a").end("b").over


steps = st.sampled_from([Handshake.acknowledge, Handshake.acknowledge, Handshake.withdraw])
events = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "x"]), st.floats(0, 20), steps), max_size=20)


@given(events)
def test_what_is_settled_never_changes_whatever_comes(sent: list[tuple[str, float, Step]]) -> None:
    shake, settled = make(frozenset({"a", "b", "c"})), None
    for node, now, step in sorted(sent, key=lambda event: event[1]):
        shake = step(shake, node, now)
        if settled is not None:
            assert shake.go is settled
        settled = shake.go
        if shake.go:
            assert {"a", "b", "c"} <= {name for name, at, one in sent if at < 10.0 and one is Handshake.acknowledge}


def test_one_that_is_held_while_a_thousand_others_begin_is_answered() -> None:
    nodes = tuple(AdmittedNode(node=name, evidence_age_seconds=1.0) for name in ("a", "b"))
    decision = Decision(
        id="g",
        decision=Verdict.ADMIT,
        reasons=(),
        nodes=nodes,
        excluded=(),
        policy={},
        retryable=False,
        decided_at=0.0,
        duration_seconds=0.0,
        would=None,
    )
    body = HandshakeBody(node="a", event="acknowledge")

    async def main() -> HandshakeAnswer:
        shakes = Handshakes(30.0)
        held = asyncio.create_task(shakes.step("g", ("a", "b"), decision, body, 30.0))
        await asyncio.sleep(0)
        for number in range(MOST_HANDSHAKES):
            await shakes.step(f"g{number}", ("a", "b"), decision, body, 0.0)
        await shakes.stop()
        return await held

    assert asyncio.run(main()).missing == ("b",)
