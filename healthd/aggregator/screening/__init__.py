"""
Screening in idle hours: orders a deep or soak tier on free nodes, those with the highest risk first. Off by default.

`risk` says how urgent a node is and `plan` which nodes run next; both are pure. `records` is what they work on.
"""

__all__ = ["settings"]
