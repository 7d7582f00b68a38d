"""The nodes as they report: records, names, pools."""

from healthd.aggregator.inventory.accusations import (
    CODES,
    MOST_GATES_READ,
    Accusation,
    Accusations,
    passed_in_validations,
)
from healthd.aggregator.inventory.comparison import DigestComparison, Standing
from healthd.aggregator.inventory.node_record import differences, identities_in, machine_identity, machine_of, name_of
from healthd.aggregator.inventory.registry import (
    ANYBODY,
    DuplicateError,
    Fleet,
    FullError,
    NodeView,
    NotExecutorError,
    NotVouchedError,
    Speaker,
)
from healthd.aggregator.inventory.ungated import UNGATED, UngatedFigure, UngatedJobs

__all__ = [
    "ANYBODY",
    "CODES",
    "MOST_GATES_READ",
    "UNGATED",
    "Accusation",
    "Accusations",
    "DigestComparison",
    "DuplicateError",
    "Fleet",
    "FullError",
    "NodeView",
    "NotExecutorError",
    "NotVouchedError",
    "Speaker",
    "Standing",
    "UngatedFigure",
    "UngatedJobs",
    "differences",
    "identities_in",
    "machine_identity",
    "machine_of",
    "name_of",
    "passed_in_validations",
]
