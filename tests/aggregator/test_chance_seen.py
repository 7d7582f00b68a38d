"""What past validations have seen of chance, and what the next search makes of it."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.gate.records import Gate
from healthd.aggregator.validation import records as model
from healthd.aggregator.validation.plan import MOST_TESTS, add
from healthd.aggregator.validation.records import NO_CHANCE_SEEN, ChanceSeen
from healthd.core.model import Decision, Order, OrderReport, Verdict
from healthd.localize.evidence import Evidence
from healthd.localize.judge import chance_of
from healthd.localize.model import Outcome, Problem
from tests.aggregator.chance_seen_kit import FOUR, validation
from tests.aggregator.engine_kit import Running, running
from tests.aggregator.lab import POLICY, Lab, inventory
from tests.aggregator.localize_kit import accused, seen, verdict_on
from tests.aggregator.world import NOW, Daemon, World

PASS, FAIL = Outcome.PASS, Outcome.FAIL


class Connected(World):
    """Nodes that run the collectives of their orders, as those of a lab do; what fails once does so in a pair too."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        for name in lab.names:
            daemon = self.add(name)
            daemon.state = dataclasses.replace(daemon.state, inventory=inventory(), peer_address="10.0.0.1")

    def _obey(self, name: str, daemon: Daemon, orders: tuple[Order, ...]) -> None:
        for order in orders:
            group = order.collective
            if group is None or order.withdrawn or order.id in daemon.done:
                continue
            daemon.done.add(order.id)
            of_group = [
                (one.collective.first_rank, other)
                for other, its in self.daemons.items()
                for one in its.orders or ()
                if one.collective is not None and one.collective.group == group.group
            ]
            members = tuple(other for _, other in sorted(of_group))
            report = self.lab.report(name, group, members)
            if len(members) > 2 and not self.lab.now > NOW:
                self.lab.failed_once.clear()
                self.lab.now += members[-1] == name
            daemon.reports[order.id] = report or OrderReport(status="refused")
        super()._obey(name, daemon, tuple(order for order in orders if order.collective is None))


async def decide(run: Running, **request: object) -> tuple[Gate, Decision]:
    gate, decision = await run.admit(collective=True, **request)
    for _ in range(40):
        if decision.decision is not Verdict.HOLD:
            break
        run.world.now += 1
        await run.settle()
        decision = await run.engine.wait(gate.id, 0)
    return await run.engine.get(gate.id), decision


async def test_the_aggregator_tells_the_next_search_what_the_last_ones_saw_of_chance() -> None:
    async with running(Connected(Lab(FOUR, bad={"n2": "once"})), policy=POLICY) as run:
        first, _ = await decide(run, nodes=FOUR)
        (validation,) = first.validations
        assert validation.chance == NO_CHANCE_SEEN
        assert [len(one.members) for one in validation.history if one.outcome is FAIL] == [4, 2]
        await run.engine.release(first.id)
        second, decision = await decide(run, nodes=FOUR, job="next")
        assert decision.decision is Verdict.ADMIT
        (after,) = second.validations
        pairs = [one for one in validation.history if len(one.members) == 2]
        assert after.chance == ChanceSeen(failed=1, tests=len(pairs))


def test_members_that_a_verdict_names_say_nothing_of_chance() -> None:
    problem = Problem(members=tuple("abcd"))
    history = [seen(0, "abcd", FAIL), seen(1, "ab", FAIL), seen(1, "cd", PASS), seen(2, "ac", FAIL)]
    history += [seen(2, "bd", PASS), seen(3, "ad", FAIL), seen(3, "bc", PASS), seen(4, "bcd", PASS)]
    found = verdict_on(problem, *history)
    assert accused(found) == {"a"}
    tested = [model.Tested(members=one.members, outcome=one.outcome, round=one.round, seconds=1.0) for one in history]
    assert add(NO_CHANCE_SEEN, validation(found, *tested)) == ChanceSeen(failed=0, tests=3)
    assert add(NO_CHANCE_SEEN, validation(None, *tested)) == NO_CHANCE_SEEN


def test_only_so_many_tests_are_remembered() -> None:
    passed = verdict_on(Problem(members=tuple("abcd")), seen(0, "abcd", PASS))
    one = validation(passed, model.Tested(members=FOUR[:2], outcome=PASS, round=1, seconds=1.0))
    many = ChanceSeen(failed=8, tests=MOST_TESTS)
    assert add(many, one) == ChanceSeen(failed=4, tests=(MOST_TESTS + 1) / 2)


def test_where_healthy_groups_are_known_to_fail_at_times_two_failures_accuse_nobody() -> None:
    members = tuple("abcdefghijklmnop")
    history = [seen(0, "abcdefghijklmnop", FAIL), seen(1, "ab", FAIL), seen(2, "ac", FAIL)]
    history += [seen(3 + i, "a" + "bcd"[i % 3], PASS) for i in range(7)]
    history += [seen(i, pair, PASS) for i in range(1, 10) for pair in ("ef", "gh", "ij", "kl", "mn", "op")]
    problem = Problem(members=members)
    assert accused(verdict_on(problem, *history)) == {"a"}
    taught = dataclasses.replace(problem, seen_failed=4, seen_tests=200)
    assert not accused(verdict_on(taught, *history))
    calm = dataclasses.replace(problem, seen_tests=2000)
    assert accused(verdict_on(calm, *history)) == {"a"}


def test_good_weeks_do_not_make_a_network_trusted_that_is_bad_today() -> None:
    today = Evidence(Problem(members=tuple("abcdefgh")))
    weeks = Evidence(Problem(members=tuple("abcdefgh"), seen_tests=2000))
    odd = [(0, 1), (2, 3)]
    assert chance_of(weeks, odd) == chance_of(today, odd) > 0.25 - 1e-9
    bad = Evidence(Problem(members=tuple("abcdefgh"), seen_failed=100, seen_tests=2000))
    assert chance_of(bad, ()) > chance_of(today, ())
