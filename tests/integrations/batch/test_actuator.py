"""Bad nodes of AWS Batch are drained in ECS, by our mark alone, and terminated only where everything speaks for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[aws]'")
from healthd.aggregator.drain.plan import ActuatorError, Done, Outcome, Removal, Why
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.core.errors import ConfigError
from healthd.integrations.batch.actuator import OWNER, BatchActuator, make
from healthd.integrations.batch.settings import BatchActuatorSettings
from tests.integrations.batch import moto_kit
from tests.integrations.batch.moto_kit import Aws

CLUSTER = "nodes"


@pytest.fixture(scope="module")
def aws() -> Iterator[Aws]:
    with moto_kit.running() as aws:
        aws.client("ecs").create_cluster(clusterName=CLUSTER)
        aws.client("ecs").create_cluster(clusterName="other")
        yield aws


class Node:
    """One machine with an ECS agent."""

    def __init__(self, aws: Aws, cluster: str = CLUSTER) -> None:
        self._aws, self._cluster = aws, cluster
        self.arn, self.id = aws.container_instance(cluster)

    @property
    def status(self) -> str:
        return str(self._described()["status"])

    @property
    def marks(self) -> dict[str, str]:
        ours = [one for one in self._described()["attributes"] if one["name"].startswith("healthd.")]
        return {one["name"]: one["value"] for one in ours}

    @property
    def machine(self) -> str:
        answer = self._aws.client("ec2").describe_instances(InstanceIds=[self.id])
        return str(answer["Reservations"][0]["Instances"][0]["State"]["Name"])

    def set(self, status: str) -> None:
        """By somebody else."""
        self._aws.client("ecs").update_container_instances_state(
            cluster=self._cluster, containerInstances=[self.arn], status=status
        )

    def give_tasks(self, count: int) -> None:
        """Tasks that run on it, in moto's own record."""
        from moto.ecs.models import ecs_backends

        known = ecs_backends[moto_kit.ACCOUNT][moto_kit.REGION].container_instances[self._cluster]
        known[self.arn.rpartition("/")[2]].running_tasks_count = count

    def _described(self) -> Any:
        answer = self._aws.client("ecs").describe_container_instances(
            cluster=self._cluster, containerInstances=[self.arn]
        )
        return answer["containerInstances"][0]


def actuator(aws: Aws, *, owner: str = "healthd", **changes: Any) -> BatchActuator:
    settings = BatchActuatorSettings(**{"clusters": (CLUSTER,), **changes})
    return BatchActuator(settings, owner=owner, clients=aws.client)


def removal(machine: Node, **changes: Any) -> Removal:
    values: dict[str, Any] = {
        "node": f"name-of-{machine.id}",
        "aliases": (),
        "instance_id": machine.id,
        "why": Why.QUARANTINE,
        "reason": "WrongResult: matmul neuron:3 (100% wrong; µ)",
        "by_person": False,
        "injected": False,
        "allocated": False,
        "since": 0.0,
    }
    return Removal(**{**values, **changes})


def remove(hand: BatchActuator, asked: Removal) -> Outcome:
    return asyncio.run(hand.remove(asked))


def test_a_bad_node_is_drained_and_marked_and_comes_back_without_a_trace(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws)
    out = remove(hand, removal(node))
    assert out.done is Done.OUT
    assert node.status == "DRAINING"
    assert node.marks == {
        "healthd.owner": "healthd",
        "healthd.node": f"name-of-{node.id}",
        "healthd.reason": "WrongResult: matmul neuron:3 100 wrong",
    }
    assert asyncio.run(hand.marked()) == {f"name-of-{node.id}": "WrongResult: matmul neuron:3 100 wrong"}
    back = asyncio.run(hand.restore(f"name-of-{node.id}"))
    assert back.done is Done.BACK
    assert node.status == "ACTIVE"
    assert node.marks == {}
    assert asyncio.run(hand.marked()) == {}


def test_everything_may_be_repeated(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws)
    assert [remove(hand, removal(node)).done for _ in range(3)] == [Done.OUT] * 3
    assert node.machine == "running"
    name = f"name-of-{node.id}"
    assert [asyncio.run(hand.restore(name)).done for _ in range(3)] == [Done.BACK, Done.LEFT, Done.LEFT]
    assert node.status == "ACTIVE"


def test_an_operators_drain_is_neither_marked_nor_undone(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws)
    node.set("DRAINING")
    left = remove(hand, removal(node))
    assert left.done is Done.LEFT
    assert "only its owner" in left.note
    assert node.marks == {}
    assert asyncio.run(hand.restore(f"name-of-{node.id}")).done is Done.LEFT
    assert node.status == "DRAINING"


def test_two_owners_do_not_undo_each_other(aws: Aws) -> None:
    node, mine, theirs = Node(aws), actuator(aws), actuator(aws, owner="blue")
    remove(theirs, removal(node))
    left = remove(mine, removal(node))
    assert left.done is Done.LEFT
    assert "blue" in left.note
    assert asyncio.run(mine.restore(f"name-of-{node.id}")).done is Done.LEFT
    assert asyncio.run(mine.marked()) == {}
    assert node.marks[OWNER] == "blue"


def test_what_an_operator_made_active_again_loses_our_mark_alone(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws)
    remove(hand, removal(node))
    node.set("ACTIVE")
    assert asyncio.run(hand.restore(f"name-of-{node.id}")).done is Done.BACK
    assert node.status == "ACTIVE"
    assert node.marks == {}


def test_a_mark_without_its_drain_is_completed(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws)
    remove(hand, removal(node))
    node.set("ACTIVE")  # as if we had ended between the two
    assert remove(hand, removal(node)).done is Done.OUT
    assert node.status == "DRAINING"


def test_the_others_of_the_cluster_are_not_touched(aws: Aws) -> None:
    others, node = [Node(aws) for _ in range(3)], Node(aws)
    remove(actuator(aws), removal(node))
    assert [other.status for other in others] == ["ACTIVE"] * 3


def test_a_node_that_ecs_does_not_know_is_left(aws: Aws) -> None:
    node = Node(aws, "other")
    left = remove(actuator(aws), removal(node))
    assert left.done is Done.LEFT
    assert CLUSTER in left.note
    assert node.status == "ACTIVE"
    nameless = remove(actuator(aws), removal(node, instance_id=None))
    assert nameless.done is Done.LEFT
    assert "no EC2 instance id" in nameless.note


def test_a_node_is_found_by_its_name_where_that_is_the_instance_id(aws: Aws) -> None:
    node = Node(aws)
    assert remove(actuator(aws), removal(node, node=node.id, instance_id=None)).done is Done.OUT
    assert node.status == "DRAINING"


# --- terminating ------------------------------------------------------------------------------------------------------


def test_a_drained_empty_quarantined_machine_is_terminated_where_that_is_asked_for(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws, terminate=True)
    assert remove(hand, removal(node)).done is Done.OUT
    assert node.machine == "running", "never in the same look: what was placed a moment ago must show first"
    done = remove(hand, removal(node))
    assert done.done is Done.OUT
    assert done.note.endswith("terminated")
    assert node.machine in ("shutting-down", "terminated")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"injected": True}, "injected"),
        ({"by_person": True}, "an operator"),
        ({"allocated": True}, "a job uses it"),
        ({"why": Why.GATE}, "a gate's rejection alone"),
    ],
)
def test_nothing_is_terminated_as_long_as_anything_speaks_against_it(
    aws: Aws, changes: dict[str, Any], said: str
) -> None:
    node, hand = Node(aws), actuator(aws, terminate=True)
    outcomes = [remove(hand, removal(node, **changes)) for _ in range(3)]
    assert [outcome.done for outcome in outcomes] == [Done.OUT] * 3
    assert said in outcomes[-1].note
    assert node.machine == "running"


def test_a_machine_with_tasks_is_never_terminated(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws, terminate=True)
    node.give_tasks(1)
    for _ in range(3):
        last = remove(hand, removal(node))
    assert "1 tasks run on it" in last.note
    assert node.machine == "running"
    node.give_tasks(0)
    remove(hand, removal(node))
    assert node.machine in ("shutting-down", "terminated")


def test_terminating_is_off_by_default(aws: Aws) -> None:
    node, hand = Node(aws), actuator(aws)
    for _ in range(3):
        last = remove(hand, removal(node))
    assert "terminate is off" in last.note
    assert node.machine == "running"


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_compute_environment_that_is_not_there_is_an_error_and_no_answer(aws: Aws) -> None:
    with pytest.raises(ActuatorError, match="compute environment 'gone'"):
        asyncio.run(actuator(aws, clusters=(), compute_environments=("gone",)).marked())


@pytest.mark.parametrize(("code", "pause"), [("ThrottlingException", 30.0), ("AccessDeniedException", None)])
def test_what_aws_refuses_is_told_and_throttling_makes_us_wait(code: str, pause: float | None) -> None:
    from botocore.exceptions import ClientError

    def refuse(_: str) -> Any:
        raise ClientError({"Error": {"Code": code, "Message": "no"}}, "ListAttributes")

    hand = BatchActuator(BatchActuatorSettings(clusters=("c",)), owner="healthd", clients=refuse)
    with pytest.raises(ActuatorError, match=code) as caught:
        asyncio.run(hand.marked())
    assert caught.value.retry_after_seconds == pause


def test_an_aws_that_cannot_be_reached_is_an_error_in_one_line() -> None:
    hand = actuator(Aws("http://127.0.0.1:9"))
    with pytest.raises(ActuatorError, match="could not be reached") as caught:
        asyncio.run(hand.marked())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"containerInstances": None},
        {"containerInstances": [{}]},
        {"containerInstances": [{"containerInstanceArn": "a", "status": "ACTIVE"}]},
        {"containerInstances": [{"containerInstanceArn": "a", "status": 3, "runningTasksCount": 0}]},
    ],
)
def test_an_answer_that_is_not_understood_drains_and_terminates_nothing(answer: dict[str, Any]) -> None:
    class Ecs:
        """An ECS of another age. It refuses whatever would change something."""

        def get_paginator(self, _: str) -> Ecs:
            return self

        def paginate(self, **_: object) -> list[dict[str, Any]]:
            return [{"containerInstanceArns": ["a"], "attributes": [{"targetId": "a"}]}]

        def describe_container_instances(self, **_: object) -> dict[str, Any]:
            return answer

    node = Removal(
        node="i-0123456789abcdef0",
        aliases=(),
        instance_id="i-0123456789abcdef0",
        why=Why.QUARANTINE,
        reason="r",
        by_person=False,
        injected=False,
        allocated=False,
        since=0.0,
    )
    hand = BatchActuator(BatchActuatorSettings(clusters=("c",)), owner="healthd", clients=lambda _: Ecs())
    with pytest.raises(ActuatorError, match="cannot parse"):
        asyncio.run(hand.remove(node))


def test_the_clusters_of_compute_environments_are_asked_of_batch(aws: Aws) -> None:
    role = aws.client("iam").create_role(RoleName="batch-actuator", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    batch = aws.client("batch")
    batch.create_compute_environment(
        computeEnvironmentName="nodes", type="UNMANAGED", state="ENABLED", serviceRole=role
    )
    told = batch.describe_compute_environments(computeEnvironments=["nodes"])["computeEnvironments"][0]
    cluster = told["ecsClusterArn"].rpartition("/")[2]
    node = Node(aws, cluster)
    hand = actuator(aws, clusters=(), compute_environments=("nodes",))
    assert remove(hand, removal(node)).done is Done.OUT
    assert node.status == "DRAINING"


def test_settings_that_name_no_cluster_are_an_error() -> None:
    with pytest.raises(ConfigError, match="name ECS clusters"):
        make(ActuatorSettings(kind="batch"))


def test_it_is_made_from_settings_without_asking_aws() -> None:
    wanted = BatchActuatorSettings(clusters=("c",), region="eu-west-1")
    made = make(ActuatorSettings(kind="batch", integrations={"batch": wanted}))
    assert made.name == "batch"


class Slow:
    """Clients of boto3 whose answer to `describe_container_instances` takes until `go`; what they change is noted."""

    def __init__(self) -> None:
        self.go, self.changed = threading.Event(), list[str]()

    def __call__(self, _service: str) -> Any:
        return self

    def get_paginator(self, _name: str) -> Any:
        return self

    def paginate(self, **_asked: Any) -> Any:
        return [{"containerInstanceArns": ["arn"]}]

    def describe_container_instances(self, **_asked: Any) -> Any:
        self.go.wait(30)
        marks = [{"name": OWNER, "value": "healthd"}]
        described = {"containerInstanceArn": "arn", "status": "DRAINING", "ec2InstanceId": "i-0123456789abcdef0"}
        return {
            "containerInstances": [{**described, "runningTasksCount": 0, "pendingTasksCount": 0, "attributes": marks}]
        }

    def terminate_instances(self, **asked: Any) -> Any:
        self.changed.append(f"terminated {asked}")


def test_call_that_nobody_waits_for_any_more_terminates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    aws = Slow()
    settings = BatchActuatorSettings(clusters=(CLUSTER,), terminate=True)
    hand = BatchActuator(settings, owner="healthd", clients=aws)
    asked = Removal(
        node="n1",
        aliases=(),
        instance_id="i-0123456789abcdef0",
        why=Why.QUARANTINE,
        reason="WrongResult",
        by_person=False,
        injected=False,
        allocated=False,
        since=0.0,
    )

    async def late() -> None:
        with pytest.raises(ActuatorError, match="did not respond within"):
            await hand.remove(asked)
        aws.go.set()  # and the loop waits for the thread when it closes

    monkeypatch.setattr("healthd.integrations.batch.actuator.METHOD_SECONDS", 0.05)
    asyncio.run(late())
    assert aws.changed == []
    monkeypatch.undo()
    assert remove(hand, asked).note.endswith("terminated")
    assert len(aws.changed) == 1
