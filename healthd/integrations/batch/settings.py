"""Settings of the actuator for Batch: `[actuator.batch]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchActuatorSettings:
    """Draining of ECS container instances, for AWS Batch. At least one cluster or compute environment must be named."""

    clusters: tuple[str, ...] = ()
    """ECS clusters, by name or ARN."""

    compute_environments: tuple[str, ...] = ()
    """Compute environments of Batch, by name; healthd asks Batch for their clusters."""

    region: str | None = None
    """AWS region; None: as boto3 finds it (AWS_DEFAULT_REGION, its files)."""

    terminate: bool = False
    """Terminate a machine that a rule has quarantined, once it is drained and empty, so that another one replaces
    it. Off: healthd does nothing that a person cannot undo."""
