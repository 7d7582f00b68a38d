"""Whatever fails in whatever way: no healthy node is accused, no bad one is admitted, nothing stays reserved."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.core.model import Verdict
from tests.aggregator.lab import Lab
from tests.profile import examples

ALWAYS = ("corrupt", "hang", "die", "absent", "slow", "silent", "refuse")


@st.composite
def fleets(draw: st.DrawFn) -> Lab:
    size = draw(st.integers(2, 9))
    names = tuple(f"n{number}" for number in range(1, size + 1))
    most = max(1, size // 2)
    bad = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(ALWAYS), max_size=most))
    good = [name for name in names if name not in bad]
    pairs = st.lists(st.sampled_from(good), min_size=2, max_size=2, unique=True) if len(good) > 3 else None
    cut = [] if pairs is None else [frozenset(pair) for pair in draw(st.lists(pairs, max_size=1))]
    return Lab(names, bad=bad, cut=cut)


@given(fleets(), st.data())
@settings(max_examples=examples(80), deadline=None)
def test_no_healthy_node_is_accused_and_no_bad_one_starts(lab: Lab, data: st.DataObject) -> None:
    members = tuple(lab.names[: data.draw(st.integers(2, len(lab.names)), label="members")])
    needed = data.draw(st.integers(1, len(members)), label="needed")
    decision = lab.decide(lab.ask(nodes=members, min_nodes=needed))
    broken = {name for name, kind in lab.bad.items() if kind not in ("silent", "refuse")}
    assert lab.accused() <= broken
    assert not lab.claims
    if decision.decision is Verdict.ADMIT:
        started = {one.node for one in decision.nodes}
        assert len(started) >= needed
        if len(started) > 1:
            assert not started & set(lab.bad)
            assert not any(pair <= started for pair in lab.cut)


@given(fleets(), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_spares_of_a_pool_keep_bad_nodes_out(lab: Lab, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, len(lab.names)), label="count")
    decision = lab.decide(lab.ask(pool="a", count=count))
    broken = {name for name, kind in lab.bad.items() if kind not in ("silent", "refuse")}
    assert lab.accused() <= broken
    assert not lab.claims
    if decision.decision is Verdict.ADMIT:
        assert len(decision.nodes) == count
        assert not {one.node for one in decision.nodes} & set(lab.bad)


def test_a_whole_fleet_of_strangers_is_not_admitted() -> None:
    names = ("n1", "n2", "n3")
    lab = Lab(names, bad=dict.fromkeys(names, "silent"))
    decision = lab.decide(lab.ask(nodes=names))
    assert decision.decision is Verdict.REJECT
    assert lab.accused() == set()
