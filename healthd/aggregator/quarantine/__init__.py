"""
Quarantine by rule: time in the verdict.

`judge` decides for one node and is pure; `facts` says what it may see of a node; `book` holds what is remembered and
carries out what was decided. What one result says of a node, and what a gate makes of it, must not enter here.
"""

from healthd.aggregator.quarantine.counting import facts_of
from healthd.aggregator.quarantine.judge import due_at, judge, judge_inherited, released

__all__ = ["due_at", "facts_of", "judge", "judge_inherited", "released"]
