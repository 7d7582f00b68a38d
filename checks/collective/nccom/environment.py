"""The environment and the folder of a run of nccom-test: nothing of a job's own gets into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checks.host.guard import FOLDER_PREFIX

__all__ = ["DROPPED_PREFIXES", "FOLDER_PREFIX", "environment_of"]

# What a job or a launcher sets for processes of its own: other cores, other addresses, another way to the network.
DROPPED_PREFIXES = ("NEURON_", "NCCL_", "CCOM_", "OFI_NCCL_", "FI_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_")


def environment_of(
    own: Mapping[str, str], given: Mapping[str, str], dropped: Sequence[str] = DROPPED_PREFIXES
) -> dict[str, str]:
    """Ours without what a job put there, and with what this run needs."""
    kept = {name: value for name, value in own.items() if not name.startswith(tuple(dropped))}
    return {**kept, **given}
