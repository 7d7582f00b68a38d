"""Digests of fixed work over nodes: who is accused, who is one of several, and that the order of reports is nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc
from collections import deque
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Action, Evidence, Status, Tier
from healthd.aggregator.fleet.digests import MOST_OF_NODE, MOST_ROOTS, DigestComparison, Standing
from healthd.aggregator.fleet.history import PeerEvents
from healthd.aggregator.fleet.node_record import CompactState
from healthd.aggregator.fleet.peers import AT_ONCE, SILENT_SECONDS
from healthd.aggregator.gate.eligibility import judge
from healthd.aggregator.identity.tokens import key_hash
from healthd.aggregator.store import reading
from healthd.aggregator.store.store import Store
from healthd.core import wire
from healthd.core.model import CheckResult, DeviceRecord, Health, Inventory, NodeState, SyncRequest
from healthd.core.model.results import MOST_PLACES_CHARACTERS, digests_of, pack, unpack
from tests.aggregator.parts import KEY as NODE_KEY
from tests.aggregator.parts import Clock, fleet, result, spec, state
from tests.every import every

PLACES = ("block0.norm1", "block0.qkv", "block1.gelu", "block1.gelu_grad", "head.loss", "block0.qkv_weight_update")
GELU = "block1.gelu"


def evidence(target: str, bits: str, *, key: str = "cpu | torch 2", first: str = GELU) -> Evidence:
    """A device whose digests from `first` on are those of `bits`."""
    at = PLACES.index(first)
    digests = {name: f"{(bits if i >= at else 'a') * 16}" for i, name in enumerate(PLACES)}
    return Evidence(target=target, key=key, data={"dtype": "bf16", "digests": digests, "stable": True})


def machine() -> str:
    return "t1.large x2, cpu, torch 2.13"


def trained(bits: str, *, injected: bool = False, key: str = "cpu | torch 2") -> CheckResult:
    """The result of `train_step`; each letter is a device."""
    found = digests_of([evidence(f"cpu:{i}", one, key=key) for i, one in enumerate(bits)], machine)
    return dataclasses.replace(result("train_step"), digests=found, injected=injected)


def reported(
    name: str, bits: str, *, torch: str = "2.13", injected: bool = False, key: str = "cpu | torch 2"
) -> NodeState:
    devices = tuple(
        DeviceRecord(target=f"cpu:{i}", kind="cpu", serial=None, cores=1, memory_bytes=None) for i in range(2)
    )
    inventory = Inventory(
        accelerator="cpu", device_count=2, core_count=None, memory_bytes=None, efa_count=None, devices=devices
    )
    return state(
        name,
        checks=(spec("memory_free", tier=Tier.PASSIVE, expires=90.0), spec("train_step")),
        results=(result("memory_free", tier=Tier.PASSIVE), trained(bits, injected=injected, key=key)),
        inventory=inventory,
        versions={"torch": torch},
    )


def compared(nodes: Mapping[str, str]) -> DigestComparison:
    found = DigestComparison()
    for name, bits in nodes.items():
        found.put(name, reported(name, bits))
    for name in nodes:
        found.judge(name)
    return found


def standings(found: DigestComparison) -> dict[str, Standing]:
    return {name: one.standing for name, one in found.differing.items()}


MINORITY, UNDECIDED = Standing.MINORITY, Standing.UNDECIDED


@every(
    ("nodes", "expected"),
    [
        ("a", {}),
        ("aa", {}),
        ("ab", {"n0": UNDECIDED, "n1": UNDECIDED}),
        ("aab", {"n2": MINORITY}),
        ("aba", {"n1": MINORITY}),
        ("abc", {"n0": UNDECIDED, "n1": UNDECIDED, "n2": UNDECIDED}),
        ("aabb", {"n0": UNDECIDED, "n1": UNDECIDED, "n2": UNDECIDED, "n3": UNDECIDED}),
        ("aabc", {"n0": UNDECIDED, "n1": UNDECIDED, "n2": UNDECIDED, "n3": UNDECIDED}),
        ("aaabb", {"n3": MINORITY, "n4": MINORITY}),
        ("aaabc", {"n3": MINORITY, "n4": MINORITY}),
    ],
)
def test_a_minority_is_accused_and_without_a_majority_all_are_suspects(
    nodes: str, expected: Mapping[str, Standing]
) -> None:
    found = compared({f"n{i}": 2 * bits for i, bits in enumerate(nodes)})
    assert standings(found) == expected


def test_the_accusation_names_device_layer_operation_step_and_the_nodes_that_differ() -> None:
    found = compared({"n0": "aa", "n1": "aa", "n2": "aa", "n3": "aa", "n4": "bb"})
    (first, second) = found.judge("n4")["train_step"]
    assert (first.status, first.reason, first.target, second.target) == (
        Status.FAIL,
        "SilentCorruption",
        "cpu:0",
        "cpu:1",
    )
    assert first.message == (
        "bf16 step 1: layer block1, operation gelu differs from 4 of 5 nodes of its kind (n0, n1, n2 and 1 more)"
    )
    assert found.judge("n0") == {}
    assert first.action is Action.INSPECT  # what the next run takes back must not latch


def test_one_of_two_is_said_of_both() -> None:
    found = compared({"n0": "a", "n1": "b"})
    for name in ("n0", "n1"):
        (finding,) = found.judge(name)["train_step"]
        assert (finding.status, finding.reason) == (Status.UNKNOWN, "DigestMismatch")
        assert "layer block1, operation gelu differs between 2 nodes of one kind" in finding.message
        assert "no majority shows which are wrong" in finding.message
        assert "n0" in finding.message
        assert "n1" in finding.message


def test_many_devices_of_a_node_are_one_vote_and_a_single_device_is_named() -> None:
    assert standings(compared({"n0": "b" * 16, "n1": "a"})) == {"n0": UNDECIDED, "n1": UNDECIDED}
    found = compared({"n0": "aaab", "n1": "aaaa", "n2": "aaaa"})
    assert [one.target for one in found.judge("n0")["train_step"]] == ["cpu:3"]
    halves = compared({"n0": "ab", "n1": "aa", "n2": "aa"})
    assert [one.target for one in halves.judge("n0")["train_step"]] == ["cpu:1"]
    assert standings(halves) == {"n0": MINORITY}


def test_a_node_whose_devices_differ_has_no_vote_and_one_vote_accuses_nobody() -> None:
    assert standings(compared({"n0": "aa", "n1": "aa", "n2": "bc", "n3": "bc"})) == {"n2": MINORITY, "n3": MINORITY}
    assert standings(compared({"n0": "aa", "n1": "bc"})) == {"n0": UNDECIDED, "n1": UNDECIDED}


def test_another_software_is_another_key_and_what_is_not_known_is_not_compared() -> None:
    found = DigestComparison()
    found.put("n0", reported("n0", "a"))
    found.put("n1", reported("n1", "b", key="cpu | torch 2 | 4 threads"))
    for name in ("n0", "n1"):
        assert found.judge(name) == {}
    (old,), (new,) = (digests_of([evidence("cpu:0", "a")], one.__str__) for one in ("torch 2.13", "torch 2.14"))
    assert old.key != new.key
    assert digests_of([evidence("cpu:0", "a")], lambda: None) == ()
    at_other_places = evidence("cpu:0", "b")
    at_other_places.data["digests"].pop("head.loss")  # type: ignore[attr-defined]
    (one,), (other,) = digests_of([evidence("cpu:0", "a")], machine), digests_of([at_other_places], machine)
    assert one.key != other.key


def test_digests_of_before_an_upgrade_do_not_count_among_those_of_after_it() -> None:
    found = compared(dict.fromkeys(("n0", "n1", "n2", "n3"), "a"))
    found.put("n0", reported("n0", "b", torch="2.14", key="cpu | torch 2.14"))  # upgraded, and has run again
    for name in ("n1", "n2", "n3"):
        found.put(name, reported(name, "a", torch="2.14"))  # upgraded; the last run was before
        assert found.judge("n0") == found.judge(name) == {}
    assert found.compared() == 3  # n0 has no other like it yet
    found.put("n1", reported("n1", "c", torch="2.14", key="cpu | torch 2.14"))
    assert found.compared() == 4
    assert set(found.judge("n0")) == set(found.judge("n1")) == {"train_step"}
    assert found.judge("n2") == {}
    found.put("n4", reported("n4", "b", torch="2.99"))  # what the node has now says nothing of its digests
    assert set(found.judge("n4")) == {"train_step"}


def test_device_that_does_not_repeat_itself_has_no_vote() -> None:
    shaky = evidence("cpu:0", "b")
    shaky.data["stable"] = False  # type: ignore[index]
    assert digests_of([shaky], machine) == ()


def test_who_measures_again_and_agrees_is_free_and_news_are_told_once() -> None:
    found = compared({"n0": "a", "n1": "a", "n2": "b"})
    assert [(node, bool(text)) for node, text in found.news] == [("n2", True)]
    assert found.put("n2", reported("n2", "b")) == set()
    assert "n2" in found.put("n2", reported("n2", "a"))
    assert found.judge("n2") == {}
    assert [(node, bool(text)) for node, text in found.news] == [("n2", True), ("n2", False)]
    assert standings(found) == {}


def test_a_node_that_is_gone_votes_no_more() -> None:
    found = compared({"n0": "a", "n1": "a", "n2": "b"})
    assert found.forget("n0") >= {"n1", "n2"}
    for name in ("n0", "n1", "n2"):
        found.judge(name)
    assert standings(found) == {"n1": UNDECIDED, "n2": UNDECIDED}
    found.forget("n2")
    found.judge("n1")
    found.judge("n2")
    assert standings(found) == {}
    found.forget("n1")
    assert not found._groups
    assert found._characters == 0


def test_an_injected_fault_is_judged_and_judges_nobody() -> None:
    found = DigestComparison()
    found.put("n0", reported("n0", "a"))
    assert found.put("n1", reported("n1", "b", injected=True)) == {"n1"}
    assert found.judge("n0") == {}
    (finding,) = found.judge("n1")["train_step"]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "DigestMismatch")
    assert "n1 on one side, n0 on the other; a fault is injected here" in finding.message
    found.put("n2", reported("n2", "b", injected=True))  # two drills are no majority over a healthy node
    assert found.judge("n0") == {}
    assert "n1" in found.put("n3", reported("n3", "a"))
    for name in ("n0", "n3"):
        assert found.judge(name) == {}
    for name in ("n1", "n2"):
        (finding,) = found.judge(name)["train_step"]
        assert (finding.status, finding.reason) == (Status.FAIL, "SilentCorruption")
        assert "differs from 2 of 3 nodes of its kind (n0, n3); a fault is injected here" in finding.message
    found.put("n4", reported("n4", "a", injected=True))  # a fault that changes nothing
    assert found.judge("n4") == {}
    found.put("n1", reported("n1", "a"))
    assert found.judge("n1") == {}
    for name in ("n0", "n1", "n2", "n3", "n4"):
        found.forget(name)
    assert not found._groups


def test_a_vote_beside_a_node_whose_devices_differ_copies_no_sets() -> None:
    nodes = 3000
    found = compared({f"n{i}": "aa" for i in range(nodes)} | {"half": "ab"})
    others = [reported(f"m{i}", "aa") for i in range(3)]
    found.put("m0", others[0])
    tracemalloc.start()
    for one in others[1:]:
        found.put(one.node, one)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * nodes  # a set of all takes 44 bytes a node
    assert standings(found) == {"half": MINORITY}


def test_digests_without_end_are_bounded() -> None:
    found = DigestComparison()
    for i in range(4 * MOST_ROOTS):
        found.put(f"n{i:03}", reported(f"n{i:03}", chr(0x4E00 + i)))
    (group,) = found._groups.values()
    assert len(group.roots()) <= MOST_ROOTS + 1
    for i in range(4 * MOST_ROOTS):
        found.judge(f"n{i:03}")
    assert {one.standing for one in found.differing.values()} == {UNDECIDED}
    many = reported("n0", "a")
    huge = dataclasses.replace(many.results[1].digests[0], places="x" * (MOST_PLACES_CHARACTERS + 1))
    bad = dataclasses.replace(many, results=(dataclasses.replace(many.results[1], digests=(huge,)),))
    assert found.put("n000", bad) >= {"n000"}
    assert found.judge("n000") == {}


def test_one_node_takes_no_room_from_others() -> None:
    found = DigestComparison()
    one = trained("a")
    (digest,) = one.digests
    many = [
        dataclasses.replace(
            one, check=f"c{i}", digests=tuple(dataclasses.replace(digest, key=f"{j}") for j in range(16))
        )
        for i in range(10)
    ]
    found.put("n0", dataclasses.replace(reported("n0", "a"), results=tuple(many)))
    assert len(found._groups) == MOST_OF_NODE
    assert found.left_out == 160 - MOST_OF_NODE


letters = st.dictionaries(
    st.sampled_from([f"n{i}" for i in range(7)]), st.text(alphabet="abc", min_size=1, max_size=3), max_size=7
)


@given(letters, st.permutations([f"n{i}" for i in range(7)]), letters)
def test_the_verdict_is_that_of_the_last_reports_whatever_came_before(
    nodes: Mapping[str, str], order: Sequence[str], earlier: Mapping[str, str]
) -> None:
    found = DigestComparison()
    told: dict[str, object] = {}

    def take(changed: set[str]) -> None:
        told.update({name: found.judge(name) for name in changed})

    for name, bits in earlier.items():
        take(found.put(name, reported(name, bits)))
    for name in order:
        take(found.put(name, reported(name, nodes[name])) if name in nodes else found.forget(name) | {name})
    fresh = compared(nodes)
    assert standings(found) == standings(fresh)
    for name in nodes:
        # Nothing that was told of a node is out of date: `put` has named all of whom something else is to be said.
        assert {one.target for some in told[name].values() for one in some} == {  # type: ignore[attr-defined]
            one.target for some in fresh.judge(name).values() for one in some
        }


@given(letters)
def test_whoever_is_accused_has_a_majority_of_nodes_against_it(nodes: Mapping[str, str]) -> None:
    found = compared(nodes)
    for name, one in found.differing.items():
        if one.standing is not MINORITY:
            continue
        votes = [max(sorted(bits), key=bits.count) for node, bits in nodes.items() if _decided(bits)]
        right = max(sorted(set(votes)), key=votes.count)
        assert 2 * votes.count(right) > len(votes)
        assert sum(right in bits for bits in nodes.values()) >= 2
        assert set(nodes[name]) != {right}


def _decided(bits: str) -> bool:
    return any(2 * bits.count(one) > len(bits) for one in bits)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="=: ", exclude_categories=("Z", "C")), min_size=1).filter(
            lambda name: name.strip(".") == name and ".." not in name
        ),
        st.text("0123456789abcdef", min_size=16, max_size=16),
        max_size=20,
    )
)
def test_places_are_read_as_they_were_written(places: Mapping[str, str]) -> None:
    assert unpack(pack(places)) == {name: value[:4] for name, value in places.items()}


# --- on the records of the fleet --------------------------------------------------------------------------------------


class Nodes:
    """Nodes that sync with a real registry."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = fleet(self.clock, max_nodes=10_000)
        self.heard: list[str] = []
        self.fleet.listen(self.heard.append)
        self._seq = 0
        self._answers: dict[str, str] = {}

    def _request(self, name: str, bits: str, last_answer: str | None, incarnation: str) -> SyncRequest:
        return SyncRequest(
            protocol=1,
            incarnation=incarnation,
            seq=self._seq,
            last_answer=last_answer,
            since_answer_seconds=None if last_answer is None else 0.0,
            state=reported(name, bits),
            digest=f"{name}{bits}",
            ages={},
            orders={},
            issuer=None,
        )

    def say(self, name: str, bits: str) -> None:
        self._seq += 1
        request = self._request(name, bits, self._answers.get(name), "i")
        answer = asyncio.run(self.fleet.sync(name, key_hash(NODE_KEY), request, 0.0))
        if name not in self._answers:
            self._answers[name] = answer.answer
            self.say(name, bits)

    def execute(self, name: str, member: str, bits: str) -> None:
        """What a hook's executor sends of a node."""
        for _ in range(2):
            self._seq += 1
            request = self._request(name, bits, self._answers.get(member), "executor")
            answer = asyncio.run(self.fleet.sync_executor(name, member, key_hash(NODE_KEY), request, 0.0))
            self._answers[member] = answer.answer

    def executor(self, name: str) -> CompactState:
        record = self.fleet._records[name].executor
        assert record is not None
        assert record.state is not None
        return record.state

    def health(self, name: str, tier: Tier = Tier.QUICK) -> tuple[Health, Health, list[str]]:
        """As shown, as a gate judges it, and why."""
        view = self.fleet.view(name)
        assert view is not None
        judged = judge(view.node, tier, 3600.0, ())
        strict = judge(view.node, tier, 3600.0, ("train_step",) if tier is not Tier.PASSIVE else ())
        assert judged.health is strict.health
        return view.health, judged.health, [one.code for one in view.reasons]


def test_the_verdict_is_on_the_record_at_once_and_goes_with_a_run_that_agrees() -> None:
    nodes = Nodes()
    for name in ("n0", "n1"):
        nodes.say(name, "aa")
        assert nodes.health(name) == (Health.HEALTHY, Health.HEALTHY, [])
    nodes.say("n2", "bb")
    assert nodes.health("n2") == (Health.UNHEALTHY, Health.UNHEALTHY, ["SilentCorruption"] * 2)
    assert nodes.health("n2", Tier.PASSIVE)[1] is Health.HEALTHY  # a tier that does not need it
    assert nodes.health("n0") == (Health.HEALTHY, Health.HEALTHY, [])
    view = nodes.fleet.view("n2")
    assert view is not None
    assert view.node.failing
    assert view.node.state is not None
    failed = next(one for one in view.node.state.results if one.check == "train_step")
    assert failed.status is Status.FAIL
    assert failed.digests == ()  # kept where they are compared
    nodes.say("n2", "aa")
    assert nodes.health("n2") == (Health.HEALTHY, Health.HEALTHY, [])


def test_the_first_of_two_becomes_suspect_by_what_the_second_sends_and_gates_hear_of_it() -> None:
    nodes = Nodes()
    nodes.say("n0", "a")
    before = nodes.fleet.node("n0")
    nodes.heard.clear()
    nodes.say("n1", "b")
    assert "n0" in nodes.heard
    after = nodes.fleet.node("n0")
    assert before is not None
    assert after is not None
    assert after.version != before.version
    for name in ("n0", "n1"):
        assert nodes.health(name) == (Health.UNKNOWN, Health.UNKNOWN, ["DigestMismatch"])
    nodes.say("n2", "a")
    assert nodes.health("n0") == (Health.HEALTHY, Health.HEALTHY, [])
    assert nodes.health("n1")[0] is Health.UNHEALTHY
    nodes.fleet.forget("n2")
    assert nodes.health("n0")[0] is Health.UNKNOWN


def test_an_executor_has_no_vote_and_hides_nothing_of_its_node() -> None:
    nodes = Nodes()
    nodes.fleet.set_executors({"n0": "hook-0", "n2": "hook-2"})
    for name in ("n0", "n1", "n3"):
        nodes.say(name, "aa")
    nodes.say("n2", "bb")
    # The image of a job gives other bits on a healthy node, and on the sick one those of the fleet.
    nodes.execute("n0", "hook-0", "bb")
    nodes.execute("n2", "hook-2", "aa")
    assert nodes.health("n0") == (Health.HEALTHY, Health.HEALTHY, [])
    assert nodes.health("n1") == (Health.HEALTHY, Health.HEALTHY, [])
    assert nodes.executor("n0").health is Health.HEALTHY
    assert nodes.health("n2")[0] is Health.UNHEALTHY
    assert nodes.executor("n2").health is Health.UNHEALTHY
    nodes.say("n2", "aa")
    assert nodes.executor("n2").health is Health.HEALTHY


def test_half_of_a_fleet_against_the_other_accuses_nobody() -> None:
    nodes = Nodes()
    count = AT_ONCE + 60
    for i in range(count):
        nodes.say(f"n{i:03}", "a" if i < count // 2 else "b")
    nodes.fleet.peers._work()
    found = {nodes.health(f"n{i:03}")[0] for i in range(count)}
    assert found == {Health.UNKNOWN}
    view = nodes.fleet.view("n000")
    assert view is not None
    assert "no majority shows which are wrong: n000, n001, n002 and 127 more on one side, n130" in (
        view.reasons[0].message
    )


def test_a_node_silent_for_a_day_has_no_vote() -> None:
    nodes = Nodes()
    nodes.say("n0", "b")
    nodes.clock.now += SILENT_SECONDS + 1.0
    nodes.say("n1", "a")
    assert nodes.health("n1")[0] is Health.UNKNOWN
    nodes.fleet.peers.sweep()
    assert nodes.health("n1")[0] is Health.HEALTHY


def test_digests_cross_the_wire_as_they_are() -> None:
    sent = reported("n0", "ab")
    assert wire.decode(wire.encode(sent), NodeState, what="state") == sent


def test_history_is_written_once_and_not_of_what_came_and_went() -> None:
    nodes = Nodes()

    async def main() -> list[tuple[str, str]]:
        store = Store.open("sqlite://")
        events = PeerEvents(nodes.fleet.peers, deque(), store, settle_seconds=0.0, clock=lambda: 1000.0)
        found = nodes.fleet.peers.digests
        for name, bits in (("n0", "a"), ("n1", "b"), ("n2", "a")):  # at first n0 and n1 are one of two
            for changed in found.put(name, reported(name, bits)):
                found.judge(changed)
        await events.write()
        await events.write()
        found.put("n1", reported("n1", "a"))
        found.judge("n1")
        await events.write()
        rows = await store.read(lambda connection: reading.read_history(connection, "n1", limit=10))
        others = await store.read(lambda connection: reading.read_history(connection, "n0", limit=10))
        store.close()
        assert others == ()
        return [(one.kind, one.message[:16]) for one in rows]

    kinds = asyncio.run(main())
    assert sorted(kind for kind, _ in kinds) == ["digest agrees", "digest differs"]
