"""
torchrun: what its agent sets for every worker.

TORCHELASTIC_RESTART_COUNT is no attempt of the job: each agent counts the restarts that it has made itself, so that an
agent that was replaced begins at 0 while the others go on.

Source: PyTorch, torch/distributed/run.py ("Environment Variables").
"""

from __future__ import annotations

from collections.abc import Mapping

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Launcher, Place, number


def find(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun's variables describe, or None where torchrun did not start us."""
    if "TORCHELASTIC_RUN_ID" not in environ or "GROUP_RANK" not in environ:
        return None
    world, local_size = number(environ, "WORLD_SIZE"), number(environ, "LOCAL_WORLD_SIZE")
    if local_size == 0 or world % local_size:
        raise ConfigError(
            f"torchrun: {world} ranks cannot be divided into nodes of {local_size}: every node must "
            "have the same number of ranks"
        )
    run = environ["TORCHELASTIC_RUN_ID"]
    return Place(
        job=None if run == "none" else run,
        attempt=0,
        rank=number(environ, "GROUP_RANK"),
        size=world // local_size,
        main=environ.get("MASTER_ADDR", "127.0.0.1"),
        local_rank=number(environ, "LOCAL_RANK"),
        local_size=local_size,
        source="torchrun",
        evidence=f"GROUP_RANK={environ['GROUP_RANK']}, WORLD_SIZE={world} in nodes of {local_size}",
        attempt_told=False,
        renumber=renumber,
    )


def renumber(environ: Mapping[str, str], *, rank: int, size: int, main: str) -> dict[str, str]:
    """Torchrun's variables for a job of `size` nodes of which this is number `rank`; the store stays where it is."""
    local_size, local_rank = number(environ, "LOCAL_WORLD_SIZE"), number(environ, "LOCAL_RANK")
    return {
        "GROUP_RANK": str(rank),
        "RANK": str(rank * local_size + local_rank),
        "WORLD_SIZE": str(size * local_size),
        "GROUP_WORLD_SIZE": str(size),
        "HEALTHD_MAIN": main,
    }


LAUNCHER = Launcher(
    order=0,
    variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"),
    find=find,
)
