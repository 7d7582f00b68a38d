"""
Submit a job to AWS Batch and follow it to its end, over Batch's own attempts and then over new jobs.

    python submit.py --job train-7b --queue healthd --definition train --checkpoint s3://BUCKET/train-7b

What ends a job decides what follows: 75 (the gate did not admit) and a host that went away are worth another job, after
a pause that doubles; any other end is final. Each attempt and each new job finds CHECKPOINT_PATH
in its environment, the same every time: the training script goes on from the newest whole checkpoint in there.

Started again by the same name it adopts the job that is still open instead of submitting a second one: Batch has no
token against double submission. Exit code 0: succeeded. 75: never admitted. 1: failed. 2: usage, or AWS refused.

Needs boto3 and tenacity (`pip install '.[aws]'` in a clone), nothing else of healthd. Unverified on AWS: run against
moto's server alone.
"""

from __future__ import annotations

import argparse
import enum
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOT_ADMITTED = 75
OPEN = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")

Sleep = Callable[[float], None]


class End(str, enum.Enum):
    """How one job of Batch ended. NOT_ADMITTED and HOST_LOST are worth another."""

    SUCCEEDED = "succeeded"
    NOT_ADMITTED = "not admitted"
    HOST_LOST = "host lost"
    FAILED = "failed"


RETRYABLE = (End.NOT_ADMITTED, End.HOST_LOST)
EXIT_CODES = {End.SUCCEEDED: 0, End.NOT_ADMITTED: NOT_ADMITTED, End.HOST_LOST: 1, End.FAILED: 1}


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to submit. `checkpoint` None: the definition's own. `nodes` None: as the definition says."""

    job: str
    queue: str
    definition: str
    checkpoint: str | None = None
    nodes: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to go on. Pauses between jobs double from the first to the longest; jobs are looked at as slowly."""

    jobs: int = 5
    first_pause_seconds: float = 60.0
    longest_pause_seconds: float = 900.0
    first_look_seconds: float = 5.0
    longest_look_seconds: float = 60.0


def request_of(order: Order, definition: Mapping[str, Any]) -> dict[str, Any]:
    """
    The arguments of SubmitJob. Where the environment of a container is overridden depends on the definition's shape.

    Names of environment variables are added to the definition's, so the rest of it stays.
    """
    request: dict[str, Any] = {"jobName": order.job, "jobQueue": order.queue, "jobDefinition": order.definition}
    if order.parameters:
        request["parameters"] = dict(order.parameters)
    found = [] if order.checkpoint is None else [{"name": "CHECKPOINT_PATH", "value": order.checkpoint}]
    nodes = definition.get("nodeProperties")
    if nodes is None:
        if order.nodes is not None:
            raise ValueError(f"{order.definition} is for one node; --nodes is for multi-node definitions")
        if found:
            request |= _override(definition, found)
        return request
    overrides: dict[str, Any] = {} if order.nodes is None else {"numNodes": order.nodes}
    if found:
        overrides["nodePropertyOverrides"] = [
            {"targetNodes": part["targetNodes"], **_override(part, found)} for part in nodes["nodeRangeProperties"]
        ]
    return {**request, "nodeOverrides": overrides} if overrides else request


def _override(shape: Mapping[str, Any], variables: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """For a single container, or for all containers of a task."""
    if "ecsProperties" not in shape:
        return {"containerOverrides": {"environment": list(variables)}}
    tasks = shape["ecsProperties"]["taskProperties"]
    return {
        "ecsPropertiesOverride": {
            "taskProperties": [
                {"containers": [{"name": one["name"], "environment": list(variables)} for one in task["containers"]]}
                for task in tasks
            ]
        }
    }


def judge(job: Mapping[str, Any], main: Mapping[str, Any] | None = None) -> tuple[End, str]:
    """
    How a job that is over ended, and a sentence. `main` is the description of a multi-node job's main node.

    Without an exit code the job counts as failed and is not submitted again.
    """
    if job.get("status") == "SUCCEEDED":
        return End.SUCCEEDED, "succeeded"
    reason = str(job.get("statusReason") or (main or {}).get("statusReason") or "no reason given")
    if any((one or {}).get(said) for one in (job, main) for said in ("isTerminated", "isCancelled")):
        # A stopped gate also exits with 75, and a job that a person stopped is not submitted again.
        return End.FAILED, f"a person ended it: {reason}"
    codes = exit_codes(job) or exit_codes(main or {})
    if NOT_ADMITTED in codes:
        return End.NOT_ADMITTED, f"the gate did not admit it on any attempt ({reason})"
    if not codes and reason.startswith("Host EC2"):
        return End.HOST_LOST, reason
    said = f"exit code {', '.join(map(str, codes))}" if codes else "no exit code"
    return End.FAILED, f"{said}: {reason}"


def exit_codes(job: Mapping[str, Any]) -> tuple[int, ...]:
    """The non-zero codes of each container of the last attempt; empty if unknown."""
    attempts = job.get("attempts") or []
    last = attempts[-1] if attempts else job
    tasks = last.get("taskProperties") or (last.get("ecsProperties") or {}).get("taskProperties") or []
    containers = [last.get("container") or {}, *(one for task in tasks for one in task.get("containers") or [])]
    if attempts and not any("exitCode" in one for one in containers):
        containers = [job.get("container") or {}]
    return tuple(one["exitCode"] for one in containers if isinstance(one.get("exitCode"), int) and one["exitCode"] != 0)


def follow(batch: Any, job_id: str, patience: Patience, *, sleep: Sleep, say: Callable[[str], None]) -> tuple[End, str]:
    """Look at a job until it is over. Never gives up by itself: jobs wait in queues for days."""
    told = ""

    def look() -> Mapping[str, Any]:
        nonlocal told
        found = batch.describe_jobs(jobs=[job_id])["jobs"]
        if not found:
            return {"status": "FAILED", "statusReason": f"Batch does not know {job_id} any more"}
        status = f"{found[0]['status']}, {len(found[0].get('attempts') or [])} attempts over"
        if status != told:
            say(f"{job_id}: {status}")
            told = status
        job: Mapping[str, Any] = found[0]
        return job

    import tenacity

    over = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda job: job["status"] in OPEN),
        wait=tenacity.wait_exponential(
            multiplier=patience.first_look_seconds, min=patience.first_look_seconds, max=patience.longest_look_seconds
        ),
        sleep=sleep,
    )(look)
    main = None
    if over["status"] == "FAILED" and "nodeProperties" in over:
        index = over["nodeProperties"].get("mainNode", 0)
        found = batch.describe_jobs(jobs=[f"{job_id}#{index}"])["jobs"]
        main = found[0] if found else None
    return judge(over, main)


def open_job(batch: Any, order: Order) -> str | None:
    """The id of a job of this name in this queue that is not over; None where there is none."""
    pages = batch.get_paginator("list_jobs").paginate(
        jobQueue=order.queue, filters=[{"name": "JOB_NAME", "values": [order.job]}]
    )
    for page in pages:
        for job in page["jobSummaryList"]:
            if job["jobName"] == order.job and job.get("status") in OPEN:
                return str(job["jobId"])
    return None


def run(
    batch: Any,
    order: Order,
    patience: Patience,
    *,
    sleep: Sleep,
    say: Callable[[str], None],
    submitter: Any = None,
) -> End:
    """
    Submit and follow, again while a retry can help. Raises botocore's errors if AWS refuses.

    `submitter` is a client that repeats no call by itself: a submission whose answer is lost must not be sent twice.
    None: `batch`.
    """
    definitions = batch.describe_job_definitions(**_which(order.definition))["jobDefinitions"]
    if not definitions:
        raise ValueError(f"{order.definition}: Batch has no active job definition of this name")
    newest = max(definitions, key=lambda one: int(one["revision"]))
    request = request_of(order, newest)
    ends: list[End] = []

    def once() -> End:
        job_id = open_job(batch, order)
        if job_id is None:
            job_id = (submitter or batch).submit_job(**request)["jobId"]
            say(f"{job_id}: submitted as {order.job}")
        else:
            say(f"{job_id}: adopted, it is still open under the name {order.job}")
        end, why = follow(batch, job_id, patience, sleep=sleep, say=say)
        say(f"{job_id}: {end.value}: {why}")
        ends.append(end)
        return end

    import tenacity

    return tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda end: end in RETRYABLE),
        stop=tenacity.stop_after_attempt(patience.jobs),
        wait=tenacity.wait_exponential(
            multiplier=patience.first_pause_seconds,
            min=patience.first_pause_seconds,
            max=patience.longest_pause_seconds,
        ),
        sleep=sleep,
        retry_error_callback=lambda _: ends[-1],
    )(once)


def _which(definition: str) -> dict[str, Any]:
    """Arguments that find a definition by name, by name and revision, or by ARN."""
    if ":" in definition:
        return {"jobDefinitions": [definition]}
    return {"jobDefinitionName": definition, "status": "ACTIVE"}


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="submit.py", description="Submit to AWS Batch and follow over retries.")
    parser.add_argument("--job", required=True, help="name of the job; the same name adopts a job that is still open")
    parser.add_argument("--queue", required=True)
    parser.add_argument("--definition", required=True, help="name, name:revision or ARN")
    parser.add_argument("--checkpoint", help="what each attempt finds as CHECKPOINT_PATH")
    parser.add_argument("--nodes", type=int, help="nodes of a multi-node job (default: the definition's)")
    parser.add_argument("--jobs", type=int, default=Patience.jobs, help="jobs at most, each with Batch's own attempts")
    parser.add_argument("--region", help="default: AWS_REGION, or that of the AWS profile")
    asked = parser.parse_args(arguments)
    if not NAME.fullmatch(asked.job):
        parser.error(f"--job {asked.job!r}: at most 128 letters, digits, '-' and '_', and no sign first")
    if asked.jobs < 1 or (asked.nodes is not None and asked.nodes < 1):
        parser.error("--jobs and --nodes must be at least 1")
    try:
        import boto3
        import tenacity  # noqa: F401  (for `run`)
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError, NoRegionError
    except ImportError as error:
        sys.stderr.write(f"submit.py: {error.name} is not installed; run in a clone of healthd: pip install '.[aws]'\n")
        return 2

    def say(line: str) -> None:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        sys.stderr.flush()

    order = Order(
        job=asked.job, queue=asked.queue, definition=asked.definition, checkpoint=asked.checkpoint, nodes=asked.nodes
    )
    try:
        # Days of asking meet throttling and short outages: botocore's own retries take care of each call.
        calm = Config(retries={"mode": "adaptive", "total_max_attempts": 10})
        batch = boto3.client("batch", region_name=asked.region, config=calm)
        single = boto3.client("batch", region_name=asked.region, config=Config(retries={"total_max_attempts": 1}))
        end = run(batch, order, Patience(jobs=asked.jobs), sleep=time.sleep, say=say, submitter=single)
    except (BotoCoreError, ClientError, ValueError) as error:
        remedy = " Name it with --region or AWS_REGION." if isinstance(error, NoRegionError) else ""
        say(f"submit.py: {error}{remedy}")
        return 2
    return EXIT_CODES[end]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
