"""A pass of the controller: what it does about all Workloads together, and what it leaves when somebody is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from healthd.core.http.client import RefusedError
from healthd.core.model import Claim, GateRequest, Verdict
from healthd.kueue.controller import FAILURES, LABELS_SECONDS, MESSAGE_SECONDS, Queues
from healthd.kueue.judge import READY_SECONDS, Answer, Write
from healthd.kueue.workloads import Workload
from tests.kueue import player
from tests.kueue.world import World


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
        await found.run_pass()
        assert found.condition.active
        assert not found.held()
        assert not found.labelled

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


def test_a_token_that_may_not_ask_is_told_by_the_condition_and_tried_again() -> None:
    class Refusing(World):
        refusing = True

        async def ask(self, request: GateRequest) -> Answer:
            if self.refusing:
                raise RefusedError("token 'x' lacks scope 'gate'", 403)
            return await super().ask(request)

    async def story() -> None:
        found = Refusing(random.Random(1), slots=2, hasty=True)
        found.submit("a", "u1")
        kueue(found)
        await found.run_pass()
        await found.run_pass()
        assert found.condition is not None
        assert (found.condition.active, found.condition.reason) == (False, "AggregatorRefuses")
        assert state(found, "a") == "Pending"
        found.refusing = False
        await found.run_pass()
        await found.run_pass()
        assert found.condition.active
        assert state(found, "a") == "Ready"

    play(story())
