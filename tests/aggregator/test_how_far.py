"""What people who wait are told of collectives under way."""

from __future__ import annotations

from healthd.aggregator.validation.groups import how_far
from healthd.aggregator.validation.records import Group, RankRange
from healthd.core.model import RANK_READY, OrderReport, RankReport
from tests.every import every

GROUP = Group(
    id="g:c0.0",
    seats=tuple(RankRange(node=f"n{rank}", first_rank=rank, ranks=1) for rank in range(3)),
    main="10.0.0.1",
    port=29500,
    started_at=0.0,
    ends_at=60.0,
)


def at(last: str, *, events: int = 0, status: str = "running") -> OrderReport:
    rank = RankReport(rank=0, target="cpu:0", check="all_reduce", events=events, last=last)
    return OrderReport(status=status, ranks=(rank,))


JOINED = at("rendezvous/peers joined", events=2)
ENTERED = at("all_reduce/1024 entered", events=4)


@every(
    ("reports", "told"),
    [
        ((ENTERED, None, None), "waiting for n1, n2 to begin"),
        ((at(""), at(""), at("")), "0 of 3 nodes ended, all starting"),
        ((at(RANK_READY), at(""), at(RANK_READY)), "0 of 3 nodes ended, n1 starting, others ready"),
        (
            (ENTERED, ENTERED, JOINED),
            "0 of 3 nodes ended, n2 at rendezvous/peers joined, others at all_reduce/1024 entered",
        ),
        ((at("", status="done"), ENTERED, ENTERED), "1 of 3 nodes ended, n1, n2 at all_reduce/1024 entered"),
        ((at("", status="done"), at("", status="done"), at("", status="done")), "3 of 3 nodes ended"),
    ],
)
def test_who_is_missing_or_lags_is_named_with_where_the_others_are(
    reports: tuple[OrderReport | None, ...], told: str
) -> None:
    known = {f"n{number}": report for number, report in enumerate(reports) if report is not None}
    assert how_far([GROUP], known) == told


def test_groups_that_run_at_once_are_counted_together() -> None:
    other = Group(
        id="g:c0.1",
        seats=(RankRange(node="n7", first_rank=0, ranks=1), RankRange(node="n8", first_rank=1, ranks=1)),
        main="10.0.0.2",
        port=29501,
        started_at=0.0,
        ends_at=60.0,
    )
    reports = dict.fromkeys(("n0", "n1", "n2", "n7"), ENTERED) | {"n8": JOINED}
    text = how_far([GROUP, other], reports)
    assert text == "0 of 5 nodes ended, n8 at rendezvous/peers joined, others at all_reduce/1024 entered"
