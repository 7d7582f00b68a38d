"""The nodes as they report: membership, names, pools, and comparisons between nodes."""

from healthd.aggregator.fleet.digests import DigestComparison, Standing
from healthd.aggregator.fleet.node_record import differences, identities_in, machine_identity, machine_of, name_of
from healthd.aggregator.fleet.registry import (
    ANYBODY,
    DuplicateError,
    Fleet,
    FullError,
    NodeView,
    NotExecutorError,
    NotVouchedError,
    Speaker,
)

__all__ = [
    "ANYBODY",
    "DigestComparison",
    "DuplicateError",
    "Fleet",
    "FullError",
    "NodeView",
    "NotExecutorError",
    "NotVouchedError",
    "Speaker",
    "Standing",
    "differences",
    "history",
    "identities_in",
    "job_records",
    "machine_identity",
    "machine_of",
    "name_of",
    "packed_records",
    "records",
    "slow",
]
