"""
Faults of the network between six daemons on two switches: what is cut is named, and nobody is accused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.aggregator.service import until
from tests.netns.fleet import Fleet, marks

pytestmark = marks

FIRST, SECOND = ("n1", "n2", "n3"), ("n4", "n5", "n6")
SWITCH = {**dict.fromkeys(FIRST, "a"), **dict.fromkeys(SECOND, "b")}


class Switched(Fleet):
    """Half of the daemons have the label of one switch, half that of another."""

    def node_arguments(self, name: str) -> Sequence[str]:
        return ("--label", f"switch={SWITCH[name]}")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        made = Switched(tmp_path_factory.mktemp("fleet"), len(SWITCH), collective_join="6s", collective_timeout="5s")
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
        made.no_ranks()
    finally:
        made.close()


def test_trunk_between_two_switches_is_named_by_their_labels_and_one_switch_goes_on(fleet: Fleet) -> None:
    with fleet.cut(FIRST, SECOND):
        decided = fleet.decide(min_nodes=3)
    assert decided.code == 0, decided
    assert tuple(decided.admitted) in (FIRST, SECOND), decided
    assert set(decided.excluded.values()) == {"TopologyFault"}, decided
    assert decided.blamed == set(), decided
    assert all("switch" in decided.words(node) for node in decided.excluded), decided


@pytest.mark.nightly
def test_halves_that_no_label_tells_apart_are_cut_off_and_one_goes_on(fleet: Fleet) -> None:
    halves = ["n1", "n2", "n4"], ["n3", "n5", "n6"]
    with fleet.cut(*halves):
        decided = fleet.decide(min_nodes=3)
    assert decided.code == 0, decided
    assert decided.admitted in halves, decided
    assert set(decided.excluded.values()) == {"TopologyFault"}, decided
    assert decided.blamed == set(), decided


@pytest.mark.nightly
def test_single_bad_pair_across_switches_is_a_path_and_not_the_trunk(fleet: Fleet) -> None:
    with fleet.cut(["n2"], ["n5"]):
        decided = fleet.decide(min_nodes=5)
    assert decided.code == 0, decided
    assert decided.blamed == set(), decided
    assert decided.excluded == {"n5": "PathFault"} or decided.excluded == {"n2": "PathFault"}, decided


def outcomes(fleet: Fleet) -> int:
    """How many groups of the job that was asked for last have an outcome."""
    (gate,) = fleet.aggregator.get(f"/v1/gates?job=job-{fleet.jobs}").json()["gates"] or [None]
    if gate is None:
        return 0
    runs = fleet.aggregator.get(f"/v1/validations/{gate['id']}?wait=0s").json()["validations"]
    return sum(len(run["history"]) for run in runs)


@pytest.mark.nightly
def test_link_that_heals_once_the_whole_has_failed_accuses_nobody(fleet: Fleet) -> None:
    with fleet.cut(["n2"], [name for name in SWITCH if name != "n2"]):
        gate = fleet.gate(min_nodes=6)
        until(lambda: outcomes(fleet) > 0, 60, lambda: "the whole gave no outcome")
    decided = fleet.decided(gate.said(200), 0.0)
    assert decided.code == 0, decided
    assert decided.admitted == list(SWITCH), decided
    assert decided.blamed == set(), decided
    assert [reason["code"] for reason in decided.decision["reasons"]] == ["PassingFault"], decided
