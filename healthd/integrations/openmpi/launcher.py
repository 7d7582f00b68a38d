"""
Open MPI: what mpirun sets for every process.

It numbers processes, not nodes. Where ranks are placed node by node (its default with `--map-by slot` or `ppr`), the
number of the node follows. It does not say where rank 0 is: MASTER_ADDR does, or the launcher around it.

Source: Open MPI documentation, "Environment variables set for launched processes"; Open MPI 4.1 `orterun(1)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Launcher, Place, number, whole

NAMES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def find(environ: Mapping[str, str]) -> Place | None:
    """The place that mpirun's variables describe, or None where mpirun did not start us."""
    if not any(name in environ for name in NAMES):
        return None
    whole(environ, NAMES, "Open MPI")
    rank, size, local_rank, local_size = (number(environ, name) for name in NAMES)
    if local_size == 0 or size % local_size:
        raise ConfigError(
            f"Open MPI: {size} ranks cannot be divided into nodes of {local_size}: every node must "
            "have the same number of ranks"
        )
    if rank % local_size != local_rank:
        raise ConfigError(
            f"Open MPI: rank {rank} is process {local_rank} of {local_size} on its node, so ranks are not placed "
            "node by node; use mpirun --map-by slot, or --nnodes N --node-rank R --main HOST"
        )
    return Place(
        job=None,
        attempt=0,
        rank=rank // local_size,
        size=size // local_size,
        main=environ.get("MASTER_ADDR", ""),
        local_rank=local_rank,
        local_size=local_size,
        source="Open MPI",
        evidence=f"OMPI_COMM_WORLD_RANK={rank} of {size}, {local_size} on each node",
        attempt_told=False,
    )


LAUNCHER = Launcher(order=10, variables=("OMPI_COMM_WORLD_SIZE",), find=find)
