"""
Takes bad nodes out of the scheduler that places jobs: a taint, a drain. Off unless it is configured.

`healthd.aggregator.drain.plan` says, purely, which nodes are to be out. `healthd.aggregator.drain.controller` applies
this plan to the scheduler, slowly and within bounds. Integrations say how: each has a
`healthd.aggregator.drain.plan.Actuator`, which `healthd.aggregator.drain.targets` makes. What judges nodes, and what a
gate decides, must not enter here.
"""

__all__ = ["controller", "plan", "settings", "targets"]
