"""
AWS Batch: the container instance of a bad node is set to DRAINING in ECS. Where that is asked for, the empty machine is
terminated, so that the compute environment starts another.

Batch has no way of its own to keep jobs off an instance; its compute environments are ECS clusters, and ECS places
nothing on an instance that is DRAINING, while the tasks on it run on. What we drain bears attributes with our owner's
name, and only what bears them is ever made ACTIVE again or terminated: an instance that was DRAINING before we came is
somebody else's.

Calls of AWS block, so they run in threads: bounded, and with one kind of error.

Source: botocore's service models of ecs, batch and ec2; Amazon ECS developer guide, "Draining container instances".
Unverified on AWS: run against moto's server alone; whether Batch places nodes of multi-node jobs by the same rule at
once was not seen.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from healthd.aggregator.drain.plan import ActuatorError, Done, Outcome, Removal, why_not_terminated
from healthd.core.errors import ConfigError
from healthd.integrations.batch.settings import BatchActuatorSettings

if TYPE_CHECKING:
    from healthd.aggregator.drain.settings import ActuatorSettings


T = TypeVar("T")

METHOD_SECONDS = 20.0
"""Of all calls of one method together: a call with its repeats takes some 8 s at most."""
# Codes after which asking at once makes it worse.
THROTTLED = frozenset({"ThrottlingException", "Throttling", "RequestLimitExceeded", "TooManyRequestsException"})
THROTTLED_PAUSE_SECONDS = 30.0

_over: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("over")

OWNER, NODE, REASON = "healthd.owner", "healthd.node", "healthd.reason"
# What the value of an attribute may hold, and how much.
_NOT_IN_A_VALUE = re.compile(r"[^A-Za-z0-9\-_.@/\\: ]+")
VALUE_CHARACTERS = 128
INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
# Most that DescribeContainerInstances takes.
AT_ONCE = 100
# Of one call with its repeats.
CONNECT_SECONDS, READ_SECONDS = 3.0, 5.0


class _Attribute(msgspec.Struct, frozen=True):
    name: str
    value: str | None = None


class _Instance(msgspec.Struct, frozen=True, rename="camel"):
    """A container instance as ECS describes it. What is missing has no default: then nothing is known."""

    container_instance_arn: str
    status: str
    running_tasks_count: int
    pending_tasks_count: int
    ec2_instance_id: str | None = None
    attributes: list[_Attribute] = []

    def value(self, name: str) -> str | None:
        return next((one.value for one in self.attributes if one.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """One container instance and the cluster it is in."""

    cluster: str
    arn: str
    instance_id: str | None
    draining: bool
    tasks: int
    owner: str | None
    node: str | None
    reason: str | None


class BatchActuator:
    """
    ECS container instances of the clusters of Batch. `clients(service)` gives a client of boto3.

    Calls block, so they run in threads, with time-outs of their own.
    """

    name = "batch"

    def __init__(self, settings: BatchActuatorSettings, *, owner: str, clients: Callable[[str], Any]) -> None:
        self._settings = settings
        self._owner = owner
        self._clients = functools.partial(while_awaited, clients)
        self._clusters: tuple[str, ...] = ()

    async def marked(self) -> Mapping[str, str]:
        """Nodes with our mark, by the name that they had when they were marked, and why."""
        return await in_thread(self._marked)

    async def remove(self, removal: Removal) -> Outcome:
        """Drain, and terminate where that is allowed. LEFT where ECS does not know it or somebody else drains it."""
        return await in_thread(functools.partial(self._remove, removal))

    async def restore(self, node: str) -> Outcome:
        """ACTIVE again where our mark is; LEFT where it is not."""
        return await in_thread(functools.partial(self._restore, node))

    # --- what runs in threads -----------------------------------------------------------------------------------------

    def _marked(self) -> Mapping[str, str]:
        return {found.node: found.reason or "" for found in self._ours() if found.node is not None}

    def _remove(self, removal: Removal) -> Outcome:
        instance_id = next((name for name in _ids(removal) if INSTANCE_ID.fullmatch(name)), None)
        if instance_id is None:
            return Outcome(done=Done.LEFT, note=f"{removal.node} has no EC2 instance id, so ECS cannot find it")
        found = self._find(instance_id)
        if found is None:
            return Outcome(done=Done.LEFT, note=f"no cluster of {', '.join(self._clusters)} has {instance_id}")
        if found.owner is not None and found.owner != self._owner:
            return Outcome(done=Done.LEFT, note=f"{instance_id} is drained by {found.owner}")
        if found.draining and found.owner is None:
            return Outcome(done=Done.LEFT, note=f"{instance_id} was already DRAINING; only its owner can undo that")
        # The mark first: were we to end between the two, an instance would be drained that nobody makes ACTIVE again.
        if found.owner is None:
            self._mark(found, removal)
        if not found.draining:
            self._set_state(found, "DRAINING")
            return Outcome(done=Done.OUT, note=f"{instance_id} is DRAINING; {found.tasks} tasks run on")
        return self._maybe_terminate(found, removal, instance_id)

    def _maybe_terminate(self, found: Found, removal: Removal, instance_id: str) -> Outcome:
        """A later look at an instance that we drain: nothing can be placed on it any more, so empty stays empty."""
        kept = why_not_terminated(removal, self._settings.terminate, found.tasks)
        if kept is not None:
            return Outcome(done=Done.OUT, note=f"{instance_id} is DRAINING; {kept}")
        self._clients("ec2").terminate_instances(InstanceIds=[instance_id])
        return Outcome(done=Done.OUT, note=f"{instance_id} is DRAINING and empty; terminated")

    def _restore(self, node: str) -> Outcome:
        mine = [found for found in self._ours() if found.node == _value(node)]
        for found in mine:
            if found.draining:
                self._set_state(found, "ACTIVE")
            # The mark last: until it is gone this is done again.
            names = (OWNER, NODE, REASON)
            values = dict(zip(names, (found.owner, found.node, found.reason), strict=True))
            self._ecs().delete_attributes(
                cluster=found.cluster,
                attributes=[
                    {"name": name, "value": value, "targetId": found.arn}
                    for name, value in values.items()
                    if value is not None
                ],
            )
        if not mine:
            return Outcome(done=Done.LEFT, note=f"{node} has no mark of {self._owner}")
        return Outcome(done=Done.BACK, note=f"{', '.join(found.instance_id or found.arn for found in mine)} is ACTIVE")

    # --- asking ECS ---------------------------------------------------------------------------------------------------

    def _ecs(self) -> Any:
        return self._clients("ecs")

    def _all_clusters(self) -> tuple[str, ...]:
        """Those that are named, and those of the compute environments that are, asked once: they do not change."""
        if not self._clusters:
            named = self._settings.clusters
            if self._settings.compute_environments:
                answer = self._clients("batch").describe_compute_environments(
                    computeEnvironments=list(self._settings.compute_environments)
                )
                told = {one.get("computeEnvironmentName"): one for one in answer.get("computeEnvironments", ())}
                for name in self._settings.compute_environments:
                    arn = told.get(name, {}).get("ecsClusterArn")
                    if not isinstance(arn, str) or not arn:
                        raise ActuatorError(f"Batch lists no ECS cluster for the compute environment {name!r}")
                    named += (arn,)
            self._clusters = tuple(dict.fromkeys(named))
        return self._clusters

    def _find(self, instance_id: str) -> Found | None:
        """The container instance on an EC2 instance. The filter makes it one call; that it filtered is not believed."""
        for cluster in self._all_clusters():
            pages = self._ecs().get_paginator("list_container_instances")
            arns = [
                arn
                for page in pages.paginate(cluster=cluster, filter=f"ec2InstanceId == {instance_id}")
                for arn in page["containerInstanceArns"]
            ]
            for found in self._describe(cluster, arns):
                if found.instance_id == instance_id:
                    return found
        return None

    def _ours(self) -> Iterator[Found]:
        for cluster in self._all_clusters():
            pages = self._ecs().get_paginator("list_attributes")
            asked = pages.paginate(
                cluster=cluster, targetType="container-instance", attributeName=OWNER, attributeValue=self._owner
            )
            arns = [one["targetId"] for page in asked for one in page["attributes"]]
            yield from (found for found in self._describe(cluster, arns) if found.owner == self._owner)

    def _describe(self, cluster: str, arns: Sequence[str]) -> Iterator[Found]:
        for start in range(0, len(arns), AT_ONCE):
            part = list(arns[start : start + AT_ONCE])
            answer = self._ecs().describe_container_instances(cluster=cluster, containerInstances=part)
            for one in msgspec.convert(answer.get("containerInstances"), list[_Instance]):
                yield Found(
                    cluster=cluster,
                    arn=one.container_instance_arn,
                    instance_id=one.ec2_instance_id,
                    draining=one.status == "DRAINING",
                    tasks=one.running_tasks_count + one.pending_tasks_count,
                    owner=one.value(OWNER),
                    node=one.value(NODE),
                    reason=one.value(REASON),
                )

    def _mark(self, found: Found, removal: Removal) -> None:
        values = {OWNER: self._owner, NODE: removal.node, REASON: removal.reason}
        self._ecs().put_attributes(
            cluster=found.cluster,
            attributes=[
                {"name": name, "value": _value(value), "targetId": found.arn} for name, value in values.items()
            ],
        )

    def _set_state(self, found: Found, status: str) -> None:
        """ECS answers 200 and lists what it did not do."""
        answer = self._ecs().update_container_instances_state(
            cluster=found.cluster, containerInstances=[found.arn], status=status
        )
        for failure in answer.get("failures") or ():
            raise ActuatorError(f"ECS did not set {found.instance_id} to {status}: {failure.get('reason', failure)}")


def _ids(removal: Removal) -> tuple[str, ...]:
    return (removal.instance_id, *removal.names) if removal.instance_id else removal.names


def _value(text: str) -> str:
    """Text as the value of an attribute: what may not be in it becomes a blank, and it is cut."""
    return " ".join(_NOT_IN_A_VALUE.sub(" ", text).split())[:VALUE_CHARACTERS].strip() or "-"


def make(settings: ActuatorSettings) -> BatchActuator:
    """The actuator that the settings describe. ConfigError where boto3 is missing or no cluster is named."""
    wanted = settings.of("batch", BatchActuatorSettings)
    if not wanted.clusters and not wanted.compute_environments:
        raise ConfigError("actuator.batch: name ECS clusters, or compute_environments of Batch, that contain the nodes")
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise ConfigError(
            "actuator.kind = batch needs boto3 and tenacity: run 'pip install boto3 tenacity' in healthd's environment"
        ) from None
    session = boto3.session.Session(region_name=wanted.region)
    if session.region_name is None:
        raise ConfigError("actuator.batch.region: set it, or AWS_DEFAULT_REGION")
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 3},
    )
    made: dict[str, Any] = {}

    def client(service: str) -> Any:
        # Clients may be used by several threads at once; making them may not be.
        return made[service]

    made.update({service: session.client(service, config=config) for service in ("ecs", "batch", "ec2")})
    return BatchActuator(wanted, owner=settings.owner, clients=client)


# --- calls of AWS, in threads -----------------------------------------------------------------------------------------


async def in_thread(work: Callable[[], T]) -> T:
    """
    What `work` gives, within METHOD_SECONDS; ActuatorError for all that AWS, the network or boto3 can say. After that
    it makes no further call: nothing is drained or terminated by what was decided long ago.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    over = threading.Event()
    _over.set(over)
    try:
        async with asyncio.timeout(METHOD_SECONDS):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise ActuatorError(f"AWS did not respond within {METHOD_SECONDS:g} s") from None
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        pause = THROTTLED_PAUSE_SECONDS if code in THROTTLED else None
        raise ActuatorError(f"AWS refused: {error}", retry_after_seconds=pause) from None
    except BotoCoreError as error:
        raise ActuatorError(f"AWS could not be reached: {error}") from None
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise ActuatorError(f"cannot parse the response from AWS: {error}") from None
    finally:
        over.set()


def while_awaited(clients: Callable[[str], Any], service: str) -> Any:
    """The client for one call; ActuatorError once nobody waits for the method that makes it: then all may be other."""
    if _over.get().is_set():
        raise ActuatorError("no request waits for it any more")
    return clients(service)
