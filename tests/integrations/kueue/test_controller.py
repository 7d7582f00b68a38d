"""A pass of the controller: what it does about all Workloads together, and what it leaves when somebody is away."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Coroutine
from typing import Any

from checks.contract import Status
from healthd.core.evidence import reason
from healthd.core.http.client import RefusedError
from healthd.core.model import Claim, Decision, ExcludedNode, GateRequest, Verdict
from healthd.integrations.kueue.controller import (
    FAILURES,
    INACTIVE_SECONDS,
    LABELS_SECONDS,
    MESSAGE_SECONDS,
    OVERDUE_SECONDS,
    REFUSED_SECONDS,
    Queues,
)
from healthd.integrations.kueue.judge import READY_SECONDS, TAKEN_BACK_SECONDS, Answer, Write
from healthd.integrations.kueue.workloads import GatedPod, Terms, Workload
from tests.integrations.kueue import player
from tests.integrations.kueue.world import World, sentence


def world(**more: Any) -> World:
    return World(random.Random(1), slots=2, hasty=True, **more)


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def kueue(found: World) -> None:
    while found.kueue() is not None:
        pass


def state(found: World, name: str) -> str:
    return str(player.check_of(found.objects[f"default/{name}"]).get("state"))


async def running(found: World, name: str, uid: str, **more: Any) -> None:
    """A Workload that is admitted."""
    found.submit(name, uid, **more)
    kueue(found)
    await found.run_pass()
    kueue(found)
    assert player.holds(found.objects[f"default/{name}"], "Admitted"), found.objects


def test_a_workload_whose_write_fails_keeps_no_other_waiting() -> None:
    class Webhook(World):
        async def write_state(self, workload: Workload, check: str, write: Write) -> bool:
            if workload.name == "a":
                raise RefusedError("admission webhook denied the request", 403)
            return await super().write_state(workload, check, write)

    async def story() -> None:
        found = Webhook(random.Random(1), slots=2, hasty=True)
        found.submit("a", "u1", count=1)
        found.submit("b", "u2", count=1)
        kueue(found)
        await found.run_pass()
        assert (state(found, "a"), state(found, "b")) == ("Pending", "Ready")
        assert len(found.held()) == 2, "what is not known to be over is not taken"

    play(story())


def test_the_sentence_of_a_gate_that_holds_is_not_written_at_every_pass() -> None:
    async def story() -> None:
        found = world(nodes=())
        found.submit("a", "u1")
        kueue(found)
        seen = []
        for second in range(int(MESSAGE_SECONDS) + 2):
            after = player.copied(found.objects["default/a"])
            player.check_of(after)["message"] = f"it has waited for {second} s"
            found.put(after)
            await found.run_pass()
            seen.append(player.check_of(found.objects["default/a"])["message"].startswith("gate"))
            found.now += 1
        assert sum(seen) == 2, seen

    play(story())


def test_while_the_aggregator_is_away_nothing_is_released_and_kueue_hears_of_it_after_some_passes() -> None:
    class Away(World):
        away: Exception | None = None

        async def claims(self, prefix: str) -> tuple[Claim, ...]:
            if self.away is not None:
                raise self.away
            return await super().claims(prefix)

    async def story() -> None:
        from healthd.core.errors import UnreachableError

        found = Away(random.Random(1), slots=2, hasty=True)
        await running(found, "a", "u1")
        assert found.condition is not None
        assert found.condition.active
        found.away = UnreachableError("it cannot be reached")
        del found.objects["default/a"]
        for passed in range(FAILURES):
            assert found.condition.active, passed
            await found.run_pass()
        assert (found.condition.active, found.condition.reason) == (False, "AggregatorUnreachable")
        assert found.held()
        assert found.labelled
        found.away = RefusedError("this token is not known here", 401)
        await found.run_pass()
        assert found.condition.reason == "AggregatorRefuses"
        found.away = None
        found.end_pods("default/a")
        found.now += INACTIVE_SECONDS - 1
        due = await found.controller.run_pass(found.queues(fresh=True), found.now)
        assert not found.held()
        assert not found.labelled
        assert (found.condition.active, due) == (False, 1.0), "Kueue sees no change that is over at once"
        found.now += due
        await found.run_pass()
        assert found.condition.active

    play(story())


def test_a_job_whose_check_is_deleted_while_it_runs_keeps_its_nodes() -> None:
    class Without(World):
        gone = False

        def queues(self, *, fresh: bool) -> Queues:
            made = super().queues(fresh=fresh)
            return Queues(cluster=made.cluster, flavors=made.flavors, workloads=made.workloads) if self.gone else made

    async def story() -> None:
        found = Without(random.Random(1), slots=2, hasty=True)
        await running(found, "a", "u1")
        found.gone = True
        found.now += LABELS_SECONDS
        await found.run_pass()
        assert found.held()
        assert found.labelled
        after = player.copied(found.objects["default/a"])
        player.finished(after, found.now)
        found.put(after)
        found.end_pods("default/a")
        await found.run_pass()
        assert not found.held()
        assert not found.labelled

    play(story())


def test_labels_that_were_left_behind_go_and_those_of_gates_that_stand_stay() -> None:
    async def story() -> None:
        found = world()
        await running(found, "a", "u1", count=1)
        (standing,) = found.labelled
        found.labelled["n4"] = "g-of-long-ago"
        found.now += LABELS_SECONDS
        await found.run_pass()
        assert list(found.labelled) == [standing]

    play(story())


def test_claims_of_another_cluster_are_not_touched() -> None:
    async def story() -> None:
        found = world()
        await running(found, "a", "u1", count=1)
        (gate,) = found.gates.values()
        found.gates["other"] = type(gate)(
            request=type(gate.request)(job="default/a", workload="kueue:other/default/a/u9"),
            epoch=("u9", 1),
            verdict=Verdict.ADMIT,
            nodes=("n3",),
        )
        found.now += LABELS_SECONDS
        await found.run_pass()
        assert not found.gates["other"].over

    play(story())


def test_a_watch_that_is_late_takes_no_lease_of_a_job_that_is_about_to_start() -> None:
    async def story() -> None:
        found = world()
        found.submit("a", "u1")
        kueue(found)
        await found.run_pass()
        found.now += READY_SECONDS
        await found.run_pass(fresh=False)  # still Pending there, with an admission of long ago
        assert state(found, "a") == "Ready"
        assert found.held()
        assert found.labelled

    play(story())


def test_terms_that_may_not_be_asked_for_are_named_by_the_condition_and_on_each_workload() -> None:
    class Refusing(World):
        refusing = True
        asked = 0

        async def ask(self, request: GateRequest) -> Answer:
            self.asked += 1
            if self.refusing:
                raise RefusedError("tier passive (policy.tier is quick): gate.callers_may does not allow it", 403)
            return await super().ask(request)

    async def story() -> None:
        found = Refusing(random.Random(1), slots=1, hasty=True)
        found.submit("a", "u1")
        found.submit("b", "u2")
        kueue(found)
        await found.run_pass()
        await found.run_pass()
        assert found.condition is not None
        assert (found.condition.active, found.condition.reason) == (False, "AggregatorRefuses")
        for name in ("a", "b"):  # with and without quota
            assert (state(found, name), "callers_may does not allow" in said(found, name)) == ("Pending", True)
        assert found.asked == 1, "not at every pass"
        found.now += REFUSED_SECONDS - 5
        await found.run_pass()
        assert found.asked == 2
        await found.run_pass()
        assert not found.condition.active, "while a Workload has quota it is asked before the refusal is forgotten"
        found.refusing, found.terms = False, Terms(impossible="retry")
        await found.run_pass()
        await found.run_pass()
        assert found.condition.active
        assert "Ready" in (state(found, "a"), state(found, "b"))

    play(story())


def test_a_pool_that_does_not_exist_is_named_by_the_condition_and_on_the_workload() -> None:
    class Unknown(World):
        def _answer(self, name: str) -> Decision:
            answer = super()._answer(name)
            text = "there is no pool `a`; pools: cpu"
            expired = sentence(f"not admitted within 0 s; it waited for: {text}")
            return dataclasses.replace(answer, reasons=(expired, reason("UnknownPool", text)))

    async def story() -> None:
        found = Unknown(random.Random(1), slots=1, nodes=(), hasty=True)
        found.submit("a", "u1")
        kueue(found)
        await found.run_pass()
        await found.run_pass()
        assert found.condition is not None
        assert (found.condition.active, found.condition.reason) == (True, "UnknownPool")
        assert found.condition.message == "there is no pool `a`; pools: cpu"
        assert said(found, "a").count("there is no pool") == 1

    play(story())


def preempt(found: World, name: str) -> None:
    """Another Workload takes the quota: the Job is suspended, and its pods begin to end."""
    after = player.copied(found.objects[f"default/{name}"])
    player.preempted(after, found.now)
    found.put(after)
    found.put(player.moves(after, found.now, quota=False)["give quota back"])


def said(found: World, name: str) -> str:
    return str(player.check_of(found.objects[f"default/{name}"])["message"])


def test_nodes_of_a_preempted_job_stay_leased_until_its_pods_there_have_ended() -> None:
    async def story() -> None:
        found = world(nodes=("n1", "n2"), grace_ends_at=1_800_000_060.0)
        found.slots = 1
        await running(found, "a", "u1")
        (gate,) = found.gates.values()
        preempt(found, "a")
        held = player.copied(found.objects["default/a"])
        held["spec"]["active"] = False  # it comes back later
        found.put(held)
        found.submit("b", "u2", count=2)
        kueue(found)
        await found.run_pass()
        await found.run_pass()
        assert state(found, "b") == "Pending"
        for node in ("n1", "n2"):
            assert f"{node}: pods of job default/a are still ending" in said(found, "b")
        assert "should have ended" not in said(found, "b")

        found.end_pods("default/a", "n1")
        await found.run_pass()
        assert gate.leased == ("n2",), "each node is free with its own pod"
        found.now = found.grace_ends_at + MESSAGE_SECONDS + OVERDUE_SECONDS
        await found.run_pass()
        await found.run_pass()
        assert "n1: pods" not in said(found, "b")
        assert "pod default/pod-n2 should have ended at 2027-01-15 08:01:00Z" in said(found, "b")
        assert found.condition is not None
        assert (found.condition.active, found.condition.reason) == (True, "PodsOverdue")
        assert "pod-n2" in found.condition.message

        found.end_pods("default/a")
        await found.run_pass()
        await found.run_pass()
        found.turn()
        await found.run_pass()
        assert state(found, "b") == "Ready"
        assert found.condition.reason == "Active"
        kueue(found)
        assert not found.wrong

    play(story())


def test_a_pod_of_another_namespace_with_the_label_of_a_gate_holds_no_node() -> None:
    async def story() -> None:
        found = world(nodes=("n1", "n2"))
        found.slots = 1
        await running(found, "a", "u1")
        (gate,) = found.gates
        found.foreign = (GatedPod(namespace="elsewhere", name="claims-it", gate=gate, node=""),)
        preempt(found, "a")
        held = player.copied(found.objects["default/a"])
        held["spec"]["active"] = False
        found.put(held)
        found.end_pods("default/a")
        await found.run_pass()
        await found.run_pass()
        assert found.gates[gate].leased == ()

    play(story())


def test_a_job_that_is_queued_again_does_not_end_the_leases_of_its_own_pods() -> None:
    async def story() -> None:
        found = world(nodes=("n1", "n2"))
        found.slots = 1
        await running(found, "a", "u1")
        preempt(found, "a")
        kueue(found)
        await found.run_pass()
        await found.run_pass()
        assert (state(found, "a"), "still ending" in said(found, "a")) == ("Pending", True)
        found.end_pods("default/a")
        await found.run_pass()
        found.turn()
        await found.run_pass()
        kueue(found)
        assert player.holds(found.objects["default/a"], "Admitted")
        assert not found.wrong

    play(story())


def test_a_running_job_is_evicted_once_its_bad_node_is_marked_and_not_when_its_pods_there_have_ended() -> None:
    async def story() -> None:
        found = world(terms=Terms(after_admission="retry"))
        await running(found, "a", "u1")
        bad, good = next(iter(found.gates.values())).nodes
        found.unfit_nodes = {bad: "link is down"}
        found.hasty = False  # its reject is held back
        found.turn = lambda: None  # type: ignore[method-assign]
        await found.run_pass()
        asked = list(found.gates.values())[-1]
        assert (asked.request.nodes, asked.request.wait_seconds, asked.verdict) == ((bad,), 0.0, Verdict.HOLD)
        assert state(found, "a") == "Ready"
        asked.verdict = Verdict.REJECT
        await found.run_pass()
        assert (state(found, "a"), f"node {bad}: link is down" in said(found, "a")) == ("Retry", True)
        assert len(found.gates) == 2

        other = world(terms=Terms(after_admission="retry"))
        await running(other, "a", "u1")
        other.unfit_nodes = {bad: "link is down"}
        other.end_pods("default/a", bad)
        await other.run_pass()
        assert (state(other, "a"), len(other.gates)) == ("Ready", 1)
        assert good in other.gates["g-1"].pods

    play(story())


def test_a_node_that_turns_bad_while_kueue_is_away_starts_no_pods() -> None:
    async def story() -> None:
        found = world(nodes=("n1", "n2", "n3"))
        found.submit("a", "u1")
        kueue(found)  # it reserves, and admits later
        await found.run_pass()
        assert state(found, "a") == "Ready"
        bad, _ = next(iter(found.gates.values())).nodes
        found.unfit_nodes = {bad: "link is down"}
        found.now += TAKEN_BACK_SECONDS + 1
        await found.run_pass()
        assert (state(found, "a"), f"node {bad}: link is down" in said(found, "a")) == ("Pending", True)
        found.now += 2
        await found.run_pass()
        await found.run_pass()
        assert state(found, "a") == "Ready"
        assert bad not in list(found.gates.values())[-1].nodes

    play(story())


def test_pauses_grow_for_the_same_cause_and_a_retry_is_taken_back_when_a_bad_node_is_healthy_again() -> None:
    class Rejecting(World):
        bad = ("n1",)

        def _answer(self, name: str) -> Decision:
            answer = super()._answer(name)
            why = dataclasses.replace(sentence("it is bad"), status=Status.FAIL)
            out = tuple(ExcludedNode(node=node, reasons=(why,)) for node in self.bad)
            rejects = answer.decision is Verdict.REJECT
            return dataclasses.replace(answer, excluded=out, retryable=True) if rejects else answer

        def turn(self) -> None:
            if not self.bad:
                super().turn()
            for gate in self.gates.values():
                gate.verdict = Verdict.REJECT if self.bad and not gate.nodes else gate.verdict

    async def story() -> None:
        found = Rejecting(random.Random(1), slots=2, hasty=True)
        found.unfit_nodes = {"n1": "it is bad", "n2": "it is bad"}
        found.submit("a", "u1")
        pauses = []

        async def again() -> None:
            kueue(found)
            await found.run_pass()
            pauses.append(player.check_of(found.objects["default/a"])["requeueAfterSeconds"])

        for _ in range(6):
            await again()
            found.now += pauses[-1] + 1
        assert pauses == [5, 10, 20, 40, 60, 60]
        found.bad = ("n2",)
        await again()
        assert pauses[-1] == 5, "for another reason"

        found.unfit_nodes.clear()
        found.bad = ()
        await found.run_pass()
        assert (state(found, "a"), "healthy again" in said(found, "a")) == ("Pending", True)
        found.now += 2
        await found.run_pass()
        assert state(found, "a") == "Ready"
        kueue(found)
        assert player.holds(found.objects["default/a"], "Admitted")
        assert not found.wrong

    play(story())
