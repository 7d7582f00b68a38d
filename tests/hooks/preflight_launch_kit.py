"""What the tests of preflight launch, and those beside them, are made with."""

from __future__ import annotations

from tests.hooks.preflight_kit import Job

PASSIVE = ("--tier", "passive", "--no-collective")  # collectives are in test_preflight_collective


BAD = (*PASSIVE, "--fault", "memory_free=fail")


def torchrun(job: Job, *, node: int, local: int, nodes: int = 2, processes: int = 2) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(processes),
        "RANK": str(node * processes + local),
        "WORLD_SIZE": str(nodes * processes),
        "MASTER_ADDR": "127.0.0.1",
        "HEALTHD_PREFLIGHT_PORT": str(job.port),
    }
