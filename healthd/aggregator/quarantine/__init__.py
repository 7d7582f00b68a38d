"""
Quarantine by rule: time in the verdict.

`judge` decides for one node and is pure; `counting` says what it may see of a node, `records` what is remembered,
`accusations` what validations say of nodes, and `repairs` which repairs a node needs.
`healthd.aggregator.engine.quarantines` carries out what was decided. What one result says of a node, and what a gate
makes of it, must not enter here.
"""

from healthd.aggregator.quarantine.accusations import (
    CODES,
    MOST_GATES_READ,
    Accusation,
    Accusations,
    passed_in_validations,
)
from healthd.aggregator.quarantine.counting import facts_of
from healthd.aggregator.quarantine.judge import due_at, judge, judge_inherited, released

__all__ = [
    "CODES",
    "MOST_GATES_READ",
    "Accusation",
    "Accusations",
    "due_at",
    "facts_of",
    "judge",
    "judge_inherited",
    "passed_in_validations",
    "records",
    "released",
    "repair_records",
    "repairs",
]
