"""
Screening in idle hours: orders a deep or soak tier on free nodes, those with the highest risk first. Off by default.

`look` says what the state of a node means, `risk` how urgent the node is and `plan` which nodes run next; all are pure.
`service` orders and remembers. What a gate decides must not enter here, and no gate knows of a screening.
"""

__all__ = ["records", "service", "settings"]
