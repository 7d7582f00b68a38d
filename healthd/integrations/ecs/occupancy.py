"""
Reads the tasks of ECS on this host from the introspection of its agent: HTTP on the host's own loopback.

It does not say which devices a task has, so every task counts; those that never use any are named in
`node.allocations.ignore` (`ecs-family:FAMILY`). A task is listed as soon as the agent knows it, before its image is
pulled, and for hours after its end.

Source: aws/amazon-ecs-agent, agent/handlers/v1/response.go. Unverified against a real agent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from checks.json_text import parse_json
from healthd.core.bounded import read_parts
from healthd.core.errors import BadInputError
from healthd.integrations.ecs.settings import EcsSettings
from healthd.node.occupancy.model import JobScheduler, Look, Reading, Workload

NAME, KIND = "ECS", "ecs"
STOPPED = "STOPPED"
MAX_BODY_BYTES = 4 << 20
# Docker's ids of containers as they stand in control groups and mounts.
_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")

# What Docker mounts into each container, out of its own folder for that container.
_GIVEN = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")


class NotUnderstoodError(ValueError):
    """An answer in a form that is not the documented one."""


def parse_tasks(body: bytes, own: Collection[str]) -> tuple[Workload, ...]:
    """
    The tasks that have not stopped, but for ours: pure. `own` are ids of our own container, the beginning will do.

    Raises NotUnderstoodError for anything that is not as documented: then nothing is known.
    """
    return tuple(
        _workload(arn, status, task.get("Family"))
        for arn, status, task in _tasks(body)
        if status != STOPPED and not _is_own(task.get("Containers"), own)
    )


def parse_stopped(body: bytes) -> tuple[Workload, ...]:
    """The tasks that have stopped: pure. The agent lists them for hours. Raises as `parse_tasks`."""
    return tuple(_workload(arn, status, task.get("Family")) for arn, status, task in _tasks(body) if status == STOPPED)


def _tasks(body: bytes) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """ARN and status of each task, and the task."""
    try:
        answer: Any = parse_json(body)
    except ValueError:
        raise NotUnderstoodError("no JSON") from None
    tasks = answer.get("Tasks") if isinstance(answer, dict) else None
    if not isinstance(tasks, list):
        raise NotUnderstoodError("no list of Tasks")
    for task in tasks:
        if not isinstance(task, dict):
            raise NotUnderstoodError("a task that is not an object")
        arn, status = task.get("Arn"), task.get("KnownStatus")
        if not isinstance(arn, str) or not arn or not isinstance(status, str):
            raise NotUnderstoodError("a task without Arn or KnownStatus")
        yield arn, status, task


def _workload(arn: str, status: str, family: object) -> Workload:
    aliases: tuple[str, ...] = (f"ecs:{arn.rpartition('/')[2]}",)
    if isinstance(family, str) and family:
        aliases += (f"ecs-family:{family}",)
    return Workload(name=f"ecs:{arn}", aliases=aliases, uses=f"a task, {status.lower()[:32]}")


def _is_own(containers: object, own: Collection[str]) -> bool:
    """Whether one of these containers is the one that we run in."""
    if not isinstance(containers, list):
        return False
    ids = [one.get("DockerId") for one in containers if isinstance(one, dict)]
    return any(isinstance(each, str) and each.startswith(mine) for each in ids for mine in own)


def own_containers(proc: Path, host_name: str | None) -> frozenset[str]:
    """Ids of the container that this process runs in, or their beginnings; empty outside of one."""
    found = set()
    for name in ("self/cgroup", "self/mountinfo"):
        try:
            text = (proc / name).read_text(errors="replace")
        except OSError:
            continue
        rows = text.split("\n")
        if name.endswith("mountinfo"):
            # On the host itself all containers show, by the memory that is mounted for them: theirs is not ours.
            # Source: proc(5), mountinfo: the fourth field is the root of the mount, the fifth where it is mounted.
            mounts = (row.split()[3:5] for row in rows)
            rows = [each[0] for each in mounts if len(each) == 2 and "/containers/" in each[0] and each[1] in _GIVEN]
        found |= {match for row in rows for match in _CONTAINER.findall(row)}
    if host_name and re.fullmatch(r"[0-9a-f]{12}", host_name):
        found.add(host_name)  # Docker names a container's host by the beginning of its id
    return frozenset(found)


def read(url: str, own: Collection[str], timeout_seconds: float) -> Reading:
    """Ask the agent once, within `timeout_seconds`."""
    where = f"{url.rstrip('/')}/v1/tasks"
    try:
        body = _get(where, timeout_seconds)
        return Reading(scheduler=NAME, kind=KIND, workloads=parse_tasks(body, own), ended=parse_stopped(body))
    except NotUnderstoodError as error:
        why = f"the ECS agent's answer at {where} is not understood ({error})"
    except OSError as error:
        why = (
            f"the ECS agent does not respond at {where} ({error}); in a container use the host's network, or set "
            "node.allocations.ecs_url"
        )
    return Reading(scheduler=NAME, kind=KIND, workloads=None, unseen=why)


def _get(url: str, timeout_seconds: float) -> bytes:
    """The body of an answer with status 200. OSError for everything else, however slowly it comes."""
    import httpx

    from healthd.core.http.trust import verification

    until = time.monotonic() + timeout_seconds
    try:
        # No proxy of the environment: the agent is on this host.
        with (
            httpx.Client(
                trust_env=False, verify=verification(url), timeout=timeout_seconds, follow_redirects=False
            ) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                raise OSError(f"HTTP {answer.status_code}")
            return read_parts(answer.iter_bytes(), MAX_BODY_BYTES, until=until)
    except (httpx.HTTPError, httpx.InvalidURL, BadInputError) as error:
        raise OSError(str(error) or type(error).__name__) from None


def _read(look: Look) -> Reading:
    own = own_containers(Path("/proc"), look.environ.get("HOSTNAME"))
    return read(look.settings.of("ecs", EcsSettings).url, own, look.settings.timeout_seconds)


SCHEDULER = JobScheduler(
    name=NAME,
    kind=KIND,
    read=_read,
    processes=("ecs-agent", "amazon-ecs-agent"[:15], "amazon-ecs-init"),
    paths=("var/lib/ecs",),
    variables=("ECS_CONTAINER_METADATA_URI", "ECS_CONTAINER_METADATA_URI_V4"),
)
