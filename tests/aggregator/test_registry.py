"""What the aggregator believes of a node: ages, silence, restarts and doubles."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from checks.contract import Status
from healthd.aggregator.fleet.packed_records import pack_all, unpack_all
from healthd.aggregator.fleet.registry import (
    ANYBODY,
    HOLD_JITTER,
    REPLACED_SECONDS,
    DuplicateError,
    Fleet,
    FullError,
    NotVouchedError,
    Speaker,
    hold_seconds,
)
from healthd.aggregator.policy import Policy, longest_hold
from healthd.core.errors import BadInputError, ConflictError, StoreError
from healthd.core.model import Allocation, Health, Lease, NodeState, Order, OrderReport, OrderStatus, Quarantine, Use
from healthd.node.sync import FIRST_PAUSE_SECONDS, SLACK_SECONDS
from tests.aggregator.parts import Clock, Node, fleet, key_hash, state
from tests.aggregator.registry_kit import joined


def ages(registry: Fleet, node: str = "n1") -> dict[str, float]:
    seen = registry.node(node)
    assert seen is not None
    current = seen.current()
    assert current is not None
    return {result.check: result.age_seconds for result in current.results}


async def test_a_node_is_confirmed_by_its_second_contact_only() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = Node(registry, clock)
    await node.say(state())
    seen = registry.node("n1")
    assert seen is not None
    assert not seen.confirmed
    assert registry.health_of("n1") is Health.UNKNOWN
    await node.say(None, ages={"matmul": 2.0, "memory_free": 2.0})
    seen = registry.node("n1")
    assert seen is not None
    assert seen.confirmed
    assert registry.health_of("n1") is Health.HEALTHY


async def test_ages_count_on_and_include_the_way_here() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    clock.now += 10
    request = node.request(None, ages={"matmul": 5.0, "memory_free": 2.0})
    clock.now += 7  # the way here
    await node.send(request)
    clock.now += 3
    assert ages(registry) == {"matmul": 15.0, "memory_free": 12.0}
    seen = registry.node("n1")
    assert seen is not None
    assert seen.heard_seconds == 10.0


async def test_a_way_of_ten_minutes_in_a_frozen_node_is_no_fresh_evidence() -> None:
    """The node wrote its request, was stopped for ten minutes, and then sent it (rival fault 15)."""
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    request = node.request(state(age=1.0), digest="d2")
    clock.now += 600
    await node.send(request)
    assert ages(registry)["matmul"] == 601.0
    assert registry.health_of("n1") is Health.UNKNOWN


async def test_a_lost_answer_makes_no_age_younger() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    kept, received = node.answer, node.received_at
    clock.now += 5
    await node.say(None, ages={"matmul": 6.0, "memory_free": 6.0})
    node.answer, node.received_at = kept, received  # that answer never arrived
    clock.now += 5
    await node.say(None, ages={"matmul": 11.0, "memory_free": 11.0})
    assert ages(registry)["matmul"] == 11.0
    seen = registry.node("n1")
    assert seen is not None
    assert seen.confirmed


async def test_ages_without_a_known_answer_do_not_refresh_confirmed_ones() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    clock.now += 40
    node.answer = None
    await node.say(None, ages={"matmul": 1.0, "memory_free": 1.0})
    assert ages(registry)["matmul"] == 41.0
    seen = registry.node("n1")
    assert seen is not None
    assert seen.confirmed


async def test_an_unknown_digest_asks_for_everything_and_refreshes_nothing() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    clock.now += 30
    answer = await node.say(None, digest="other", ages={"matmul": 0.0})
    assert answer.send_all
    assert ages(registry)["matmul"] == 31.0
    assert not (await node.say(state(), digest="other")).send_all


async def test_a_run_is_not_done_before_the_state_with_its_results_is_here() -> None:
    """A gate that saw the one without the other would call the node unfit: it ran, and there is no result."""
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    reports = {"done": OrderReport(status="done"), "going": OrderReport(status="running")}

    def told() -> set[str]:
        seen = registry.node("n1")
        assert seen is not None
        return set(seen.orders)

    await node.say(None, digest="other", orders=reports)
    assert told() == {"going"}
    await node.say(state(), digest="other", orders=reports)
    assert told() == {"done", "going"}
    await node.say(None, digest="other", orders=reports)
    assert told() == {"done", "going"}


async def test_an_old_request_has_no_effect() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    late = node.request(state(status=Status.PASS), digest="late")
    await node.say(state(status=Status.FAIL), digest="newer")
    assert registry.health_of("n1") is Health.UNHEALTHY
    await registry.sync("n1", registry_key(), late, 0.0)
    assert registry.health_of("n1") is Health.UNHEALTHY


def registry_key() -> str:
    from healthd.aggregator.identity.tokens import key_hash
    from tests.aggregator.parts import KEY

    return key_hash(KEY)


async def test_silent_node_is_unknown_never_healthy_and_says_so() -> None:
    clock = Clock()
    registry = fleet(clock)
    await joined(registry, clock)
    assert registry.health_of("n1") is Health.HEALTHY
    clock.now += 61
    assert registry.health_of("n1") is Health.UNKNOWN
    seen = registry.view("n1")
    assert seen is not None
    assert seen.reasons[0].code == "Silent"
    assert "last report 61 s ago" in seen.reasons[0].message


async def test_evidence_that_expires_while_the_node_says_nothing_new_is_unknown_as_stale() -> None:
    """Rival fault 15, by ages that came without a state as well."""
    clock = Clock()
    registry = fleet(clock, silent_seconds=1e9)
    node = await joined(registry, clock)
    clock.now += 50
    await node.say(None, ages={"matmul": 51.0, "memory_free": 1.0})
    clock.now += 88
    assert registry.health_of("n1") is Health.HEALTHY
    clock.now += 2  # memory_free may be 90 s old
    assert registry.health_of("n1") is Health.UNKNOWN
    seen = registry.view("n1")
    assert seen is not None
    assert [(r.code, r.check) for r in seen.reasons] == [("Stale", "memory_free")]


async def test_suspended_evidence_of_an_allocated_node_does_not_expire() -> None:
    clock = Clock()
    registry = fleet(clock, silent_seconds=1e9)
    node = Node(registry, clock)
    await node.join(state(allocated=(Allocation(by="process", holder="pid 7"),)))
    clock.now += 4000
    await node.say(None, ages={"matmul": 4001.0, "memory_free": 1.0})
    assert registry.health_of("n1") is Health.HEALTHY


async def test_an_unhealthy_node_stays_unhealthy_while_it_is_not_confirmed() -> None:
    clock = Clock()
    registry = fleet(clock)
    await Node(registry, clock).say(state(status=Status.FAIL))
    assert registry.health_of("n1") is Health.UNHEALTHY


async def test_a_restart_of_the_daemon_is_no_duplicate_but_starts_unconfirmed() -> None:
    clock = Clock()
    registry = fleet(clock)
    old = await joined(registry, clock)
    late = old.request(state(status=Status.FAIL), digest="late")
    new = Node(registry, clock, incarnation="i2", answer=old.answer)
    await new.say(state())
    seen = registry.node("n1")
    assert seen is not None
    assert (seen.confirmed, seen.duplicate) == (False, False)
    await old.send(late)  # was on its way when the old daemon ended
    await new.say(None)
    seen = registry.node("n1")
    assert seen is not None
    assert (seen.confirmed, seen.duplicate) == (True, False)
    assert registry.health_of("n1") is Health.HEALTHY


async def test_two_daemons_with_one_key_become_a_duplicate_until_forgotten() -> None:
    clock = Clock()
    registry = fleet(clock)
    first = await joined(registry, clock)
    second = Node(registry, clock, incarnation="i2")
    await second.join(state())
    answer = await first.say(state())
    assert answer.orders is None
    with pytest.raises(DuplicateError, match="an admin must decide"):
        await first.say(state())
    seen = registry.view("n1")
    assert seen is not None
    assert seen.node.duplicate
    assert (seen.health, seen.reasons[0].code) == (Health.UNKNOWN, "DuplicateNode")
    await second.say(None)
    assert registry.health_of("n1") is Health.UNKNOWN
    registry.forget("n1")
    assert registry.node("n1") is None
    await Node(registry, clock, incarnation="i2").join(state())
    assert registry.health_of("n1") is Health.HEALTHY


async def test_another_key_is_refused_and_nothing_is_healthy_until_an_admin_decides() -> None:
    clock = Clock()
    registry = fleet(clock)
    heard: list[str] = []
    registry.listen(heard.append)
    node = await joined(registry, clock)
    heard.clear()
    with pytest.raises(DuplicateError, match="belongs to another key"):
        await Node(registry, clock, key="another-key-another-key").say(state())
    assert heard == ["n1"]
    assert registry.refused_key_hash("n1")
    await node.say(None)
    assert registry.health_of("n1") is Health.UNKNOWN


async def test_a_name_known_to_the_store_keeps_its_key_and_pool_over_a_restart() -> None:
    clock = Clock()
    registry = fleet(clock)
    registry.load("n1", key_hash="f" * 64, pool="train")
    assert list(registry.pool("train")) == ["n1"]
    seen = registry.view("n1")
    assert seen is not None
    assert (seen.node.state, seen.health, seen.reasons[0].code) == (None, Health.UNKNOWN, "Silent")
    with pytest.raises(DuplicateError):
        await Node(registry, clock).say(state())


async def test_a_key_that_cannot_be_stored_is_not_enrolled() -> None:
    async def broken(_node: str, _key: str) -> str:
        raise StoreError("disk full")

    clock = Clock()
    registry = fleet(clock, enrol=broken)
    with pytest.raises(StoreError):
        await Node(registry, clock).say(state())
    assert registry.node("n1") is None


async def test_pools_follow_the_label() -> None:
    clock = Clock()
    registry = fleet(clock)
    for name in ("b", "a", "c"):
        await joined(registry, clock, name)
    assert list(registry.pool("train")) == ["a", "b", "c"] == list(registry.names())
    node = Node(registry, clock, name="b", incarnation="i2")
    await node.say(state("b", pool="other"))
    assert (list(registry.pool("train")), list(registry.pool("other"))) == (["a", "c"], ["b"])
    assert registry.pools() == {"other": 1, "train": 2}
    assert list(registry.pool("none")) == []


async def test_a_full_registry_refuses_strangers_and_keeps_its_own() -> None:
    clock = Clock()
    registry = fleet(clock, max_nodes=2)
    await joined(registry, clock, "a")
    node = await joined(registry, clock, "b")
    with pytest.raises(FullError):
        await joined(registry, clock, "c")
    clock.now += 2 * 86400
    await node.say(None)
    await joined(registry, clock, "c")  # a was silent for two days
    assert list(registry.names()) == ["b", "c"]


async def test_a_full_registry_never_drops_a_node_with_orders_or_a_quarantine() -> None:
    clock = Clock()
    registry = fleet(clock, max_nodes=2)
    await joined(registry, clock, "a")
    await joined(registry, clock, "b")
    registry.set_orders("a", (Order(id="o", kind="lease", deadline_seconds=1.0),))
    registry.set_quarantine("b", Quarantine(reason="x", owner="me", owner_kind="person", since=0.0, until=None))
    clock.now += 2 * 86400
    with pytest.raises(FullError):
        await joined(registry, clock, "c")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ages": {"matmul": -1.0}},
        {"since_answer_seconds": -1.0},
        {"seq": -1},
        {"incarnation": ""},
        {"digest": "x" * 200},
        {"state": state("n2")},
        {"state": dataclasses.replace(state(), results=state(age=-5.0).results)},
        {"orders": {str(i): OrderReport(status="done") for i in range(1001)}},
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(wrong: dict[str, object]) -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    before = registry.node("n1")
    with pytest.raises(BadInputError):
        await node.send(dataclasses.replace(node.request(None), **wrong))  # type: ignore[arg-type]
    assert registry.node("n1") == before


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a" * 254, "ä", ".."])
async def test_a_name_that_is_none_is_refused(name: str) -> None:
    clock = Clock()
    with pytest.raises(BadInputError, match="cannot name a node"):
        await Node(fleet(clock), clock, name=name).say(state())


LEASE = Lease(
    id="l",
    gate="g",
    job="j",
    attempt=0,
    issuer="db-0",
    workload=None,
    grace_seconds=1.0,
    max_seconds=9.0,
    age_seconds=100.0,
)


async def test_leases_grow_older_as_results_do() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = Node(registry, clock)
    await node.join(state(leases=(LEASE,)))
    clock.now += 20
    await node.say(None, ages={"matmul": 21.0}, issuer="db-0")
    clock.now += 1
    seen = registry.node("n1")
    assert seen is not None
    assert seen.issuer == "db-0"
    current = seen.current()
    assert current is not None
    assert current.leases[0].age_seconds == 121.0


async def test_who_uses_a_node_is_told_without_its_state() -> None:
    clock = Clock()
    registry = fleet(clock, silent_seconds=1e9)
    heard: list[str] = []
    registry.listen(heard.append)
    node = Node(registry, clock)
    await node.join(state())
    version = registry.version("n1")
    clock.now += 20
    used = (Allocation(by="lease", holder="j"),)
    taken = Use(since="d1", allocated=used, leases=(LEASE,), running=None)
    heard.clear()
    answer = await node.say(None, digest="d2", ages={"matmul": 21.0, "memory_free": 3.0}, use=taken)
    assert (answer.send_all, heard) == (False, ["n1"])
    assert registry.version("n1") != version
    clock.now += 5
    seen = registry.node("n1")
    assert seen is not None
    assert seen.confirmed
    current = seen.current()
    assert current is not None
    assert (current.allocated, current.leases[0].age_seconds) == (used, 105.0)
    assert {one.check: one.age_seconds for one in current.results} == {"matmul": 26.0, "memory_free": 8.0}
    assert registry.lease_ids("n1") == ("l",)
    (stored,) = unpack_all(pack_all([current]), what="evidence")
    assert stored.allocated == used
    assert stored.leases == current.leases
    # While it is in use, its evidence does not expire; from its end on it does.
    clock.now += 4000
    await node.say(None, digest="d2", ages={"matmul": 4026.0, "memory_free": 1.0})
    assert registry.health_of("n1") is Health.HEALTHY
    ended = Use(since="d2", allocated=(), leases=(), running=None)
    await node.say(None, digest="d1", ages={"matmul": 4026.0, "memory_free": 1.0}, use=ended)
    assert registry.lease_ids("n1") == ()
    assert registry.health_of("n1") is Health.UNKNOWN


async def test_a_use_since_another_state_asks_for_everything_and_changes_nothing() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = Node(registry, clock)
    await node.join(state())
    unknown = Use(since="d7", allocated=(), leases=(LEASE,), running=None)
    assert (await node.say(None, digest="d8", use=unknown)).send_all
    assert registry.lease_ids("n1") == ()
    with pytest.raises(BadInputError, match="not both"):
        await node.say(state(), digest="d8", use=unknown)
    long = dataclasses.replace(LEASE, job="j" * 1000)
    with pytest.raises(BadInputError, match="job"):
        await node.say(None, digest="d8", use=dataclasses.replace(unknown, leases=(long,)))


async def test_no_version_of_a_name_is_used_twice() -> None:
    """Those who read evidence know it by its version, also where another daemon, or a node forgotten, has the name."""
    clock = Clock()
    registry = fleet(clock)
    seen: list[int] = []

    async def look(key: str) -> None:
        node = Node(registry, clock, key=key, incarnation=key)
        for digest in ("d1", "d2"):
            await node.say(state(), digest=digest)
            found = registry.node("n1")
            assert found is not None
            seen.append(found.version)

    await look("first-key-first-key")
    registry.rekey("n1", key_hash("second-key-second-key"))
    await look("second-key-second-key")
    registry.forget("n1")
    await look("third-key-third-key")
    assert seen == sorted(set(seen))


async def test_orders_of_a_rekeyed_node_stand_whatever_becomes_of_its_executor() -> None:
    clock = Clock()
    registry = fleet(clock)
    await joined(registry, clock)
    registry.set_orders("n1", ())
    registry.rekey("n1", key_hash("second-key-second-key"))
    node = Node(registry, clock, key="second-key-second-key", incarnation="i2")
    registry.set_executors({"n1": "m1"})
    registry.set_executors({})
    assert (await node.say(state())).orders == ()


async def test_key_of_a_node_that_was_forgotten_meanwhile_is_taken() -> None:
    clock = Clock()
    registry = fleet(clock)
    await joined(registry, clock)
    registry.forget("n1")
    registry.rekey("n1", key_hash("second-key-second-key"))
    await Node(registry, clock, key="second-key-second-key", incarnation="i2").join(state())
    assert registry.names() == ["n1"]


# A machine that is replaced under its name, where its platform vouches for it.


def vouched(pod: str) -> Speaker:
    return Speaker(speaks_for=lambda name: name == "n1", vouched=f"pod {pod}", vouched_id=f"uid of {pod}")


async def spoken(node: Node, pod: str | None) -> None:
    """A whole state, by a pod that the platform says is on this node."""
    speaker = ANYBODY if pod is None else vouched(pod)
    request = node.request(state(node.name))
    answer = await node.fleet.sync(node.name, key_hash(node.key), request, 0.0, speaker=speaker)
    node.answer, node.received_at = answer, node.clock()


async def test_replaced_pod_is_refused_while_the_new_one_reports_and_let_in_again_once_that_is_silent() -> None:
    """As after a rollback: the pod that was kept is the node's daemon again, with the key that it has."""
    clock = Clock()
    registry = fleet(clock, silent_seconds=60.0)
    old, new = (Node(registry, clock, key=f"key-of-{name}-pod-1234", incarnation=name) for name in ("old", "new"))
    await spoken(old, "old")
    await spoken(new, "new")
    clock.now += REPLACED_SECONDS + 1
    with pytest.raises(ConflictError, match="pod old was replaced by pod new, which reports"):
        await spoken(old, "old")
    await spoken(new, "new")
    clock.now += 61
    await spoken(old, "old")
    clock.now += REPLACED_SECONDS + 1
    with pytest.raises(ConflictError, match="pod new was replaced by pod old"):
        await spoken(new, "new")
    seen = registry.node("n1")
    assert seen is not None
    assert not seen.duplicate


async def test_pods_with_one_key_are_one_node_whoever_of_them_speaks() -> None:
    """An update that starts the new pod first, and is taken back: the key is in a directory of the host."""
    clock = Clock()
    registry = fleet(clock)
    node = Node(registry, clock)
    for pod in ("old", "new", "old"):
        await spoken(node, pod)
    with pytest.raises(NotVouchedError, match="belongs to pod old according to its platform"):
        await spoken(Node(registry, clock, key="key-of-a-stranger-1234", incarnation="x"), None)
    await spoken(node, None)


async def test_key_that_cannot_be_kept_is_not_let_in() -> None:
    async def fail(_node: str, _key: str, _who: str) -> None:
        raise StoreError("the disk is full")

    clock = Clock()
    registry = fleet(clock, replace_key=fail)
    old, new = (Node(registry, clock, key=f"key-of-{name}-pod-1234", incarnation=name) for name in ("old", "new"))
    await spoken(old, "old")
    with pytest.raises(StoreError):
        await spoken(new, "new")
    await spoken(old, "old")


async def test_other_names_count_where_the_credential_covers_them() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = Node(registry, clock)
    request = node.request(state("n1", aliases=("i-1", "n1.example.com")))
    speaker = Speaker(speaks_for=lambda name: name.startswith("n1"))
    await registry.sync("n1", key_hash(node.key), request, 0.0, speaker=speaker)
    assert (registry.called("i-1"), registry.called("n1.example.com")) == ((), ("n1",))


async def test_a_sync_that_shows_a_node_as_it_was_is_quiet_and_every_other_is_not() -> None:
    clock = Clock()
    registry = fleet(clock)
    heard: list[str] = []
    quiet: list[str] = []
    registry.listen(heard.append, quiet=quiet.append)

    async def is_quiet(node: Node, state: NodeState | None = None, **changes: Any) -> bool:
        heard.clear()
        quiet.clear()
        await node.say(state, **changes)
        assert heard + quiet == ["n1"]
        return bool(quiet)

    node = Node(registry, clock)
    assert not await is_quiet(node, state())
    assert not await is_quiet(node), "this one confirms it"
    clock.now += 25
    assert await is_quiet(node, ages={"matmul": 2.0, "memory_free": 2.0})
    accepted = {"o1": OrderReport(status=OrderStatus.ACCEPTED)}
    assert not await is_quiet(node, orders=accepted)
    assert not await is_quiet(node), "the report is over"
    assert await is_quiet(node)
    assert not await is_quiet(node, state(status=Status.FAIL), digest="d2")
    assert await is_quiet(node, digest="d2")
    clock.now += registry.silent_seconds + 1
    assert not await is_quiet(node, digest="d2"), "it was silent"
    again = Node(registry, clock, incarnation="i2")
    assert not await is_quiet(again, state(), digest="d2")


async def test_who_waits_for_a_node_to_read_an_answer_hears_a_quiet_sync_too() -> None:
    clock = Clock()
    registry = fleet(clock)
    node = await joined(registry, clock)
    registry.set_orders("n1", ())
    waiting = asyncio.create_task(registry.hear_anew(["n1"], 10.0))
    await asyncio.sleep(0)
    await node.say()
    await node.say()
    assert await waiting == ()


async def test_a_large_fleet_is_held_for_longer_as_far_as_it_may_be() -> None:
    fleets = ((10, 25.0), (20_000, 25.0), (10_000, 60.0), (20_000, 60.0), (20_000, 10.0))
    assert [hold_seconds(nodes, most) for nodes, most in fleets] == [25.0, 25.0, 50.0, 60.0, 10.0]
    clock = Clock()
    node = Node(fleet(clock), clock)
    answer = await node.say(state())
    assert answer.hold_seconds is not None
    assert 25.0 * (1 - HOLD_JITTER) <= answer.hold_seconds <= 25.0


def test_a_node_is_silent_after_two_holds_unless_that_is_set() -> None:
    assert [Policy().with_hold(hold).silent_seconds for hold in (10.0, 25.0, 60.0)] == [60.0, 60.0, 130.0]
    assert [Policy(silent_seconds=90.0).with_hold(hold).silent_seconds for hold in (25.0, 60.0)] == [90.0, 90.0]
    assert [longest_hold(silent) for silent in (60.0, 130.0, 40.0, 9.0)] == [25.0, 60.0, 15.0, 3.0]
    for hold in (25.0, 60.0):
        policy = Policy().with_hold(hold)
        # Nodes that a dead leader held come back when that request is over, at the latest: none is silent before.
        assert policy.silent_seconds > hold + SLACK_SECONDS + FIRST_PAUSE_SECONDS
        assert policy.tuning.settle_seconds >= policy.silent_seconds, "nor is anything called impossible before"
