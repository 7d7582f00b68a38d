"""
AWS Batch: single jobs, children of array jobs, and nodes of multi-node parallel jobs.

Of a multi-node job Batch starts the main node first and takes its exit code for that of the job: a child that dies
changes nothing, and only a failure of the main node is retried. Children alone are told the main node's address.

Source: AWS Batch user guide, "AWS Batch job environment variables" and "Multi-node parallel job environment variables".
Unverified on AWS: the variables are taken from there; no job of Batch was run.
"""

from __future__ import annotations

from collections.abc import Mapping

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Launcher, Place, number, own_address, whole

NODE = ("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX")
MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def find(environ: Mapping[str, str]) -> Place | None:
    """The place that Batch's variables describe, or None where this is no job of Batch."""
    job = environ.get("AWS_BATCH_JOB_ID")
    if not job:
        return None
    # Batch counts attempts from 1.
    told = "AWS_BATCH_JOB_ATTEMPT" in environ
    attempt = max(0, number(environ, "AWS_BATCH_JOB_ATTEMPT") - 1) if told else 0
    if not any(name in environ for name in NODE):
        index = environ.get("AWS_BATCH_JOB_ARRAY_INDEX")
        kind = "AWS Batch" if index is None else f"AWS Batch, child {index} of an array"
        return Place(
            job=job,
            attempt=attempt,
            rank=0,
            size=1,
            main="127.0.0.1",
            local_rank=0,
            local_size=1,
            source=kind,
            evidence=f"AWS_BATCH_JOB_ID={job}",
            attempt_told=told,
            main_counts=True,
        )
    whole(environ, NODE, "AWS Batch")
    size, index_here, main_index = (number(environ, name) for name in NODE)
    if index_here >= size or main_index >= size:
        raise ConfigError(
            f"AWS Batch: node index {index_here} and main node index {main_index} cannot both be of {size} nodes"
        )
    is_main = index_here == main_index
    main = own_address() if is_main else environ.get(MAIN_ADDRESS, "")
    if not main:
        raise ConfigError(
            f"AWS Batch: {MAIN_ADDRESS} is not set on node {index_here}; Batch sets it for every child of a main node"
        )
    return Place(
        job=job.partition("#")[0],
        attempt=attempt,
        rank=rank_of(index_here, main_index),
        size=size,
        main=main,
        local_rank=0,
        local_size=1,
        source="AWS Batch",
        evidence=f"AWS_BATCH_JOB_NODE_INDEX={index_here} of {size}, main node {main_index}",
        attempt_told=told,
        main_counts=True,
    )


def rank_of(index: int, main_index: int) -> int:
    """The main node is rank 0, whatever its index is; the others keep their order."""
    if index == main_index:
        return 0
    return index + 1 if index < main_index else index


LAUNCHER = Launcher(order=50, variables=("AWS_BATCH_JOB_ID",), find=find)
