"""When a lease is over for one that stands by: by how long its row has stood still, and by no clock of others."""

from __future__ import annotations

import dataclasses

import pytest

from healthd.aggregator.leadership import Observed
from healthd.aggregator.store import Leadership
from healthd.core.errors import StoreError

ROW = Leadership(term=3, holder="a:1:ff", url="https://a:8090", renewed=1000.0)


def renewed(at: float) -> Leadership:
    return dataclasses.replace(ROW, renewed=at)


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0], ids=["no jump", "ahead", "back"])
def test_leader_that_renews_leads_whatever_the_servers_clock_does(jump: float) -> None:
    seen = Observed()
    for second in range(0, 60, 2):
        seen.note(renewed(1000.0 + second + (jump if second > 20 else 0.0)), float(second))
        assert seen.vacant(second + 2.0) is None
    assert seen.vacant(58 + 5.9) is None
    assert seen.vacant(58 + 6.0) is not None, "it is over once nobody renews it"
    assert seen.due_in(60.0) == 4.0


def test_leader_that_left_is_followed_at_once() -> None:
    seen = Observed()
    seen.note(ROW, 0.0)
    seen.note(dataclasses.replace(ROW, holder="", url=""), 0.5)
    assert seen.vacant(0.5) is not None


def test_after_an_outage_of_the_database_the_leader_has_a_whole_lease_to_renew() -> None:
    seen = Observed()
    seen.note(ROW, 0.0)
    seen.note(StoreError("away"), 1.0)
    assert seen.vacant(100.0) is None, "nothing is known"
    seen.note(ROW, 100.0)
    assert seen.vacant(105.9) is None
    assert seen.vacant(106.0) == ROW
