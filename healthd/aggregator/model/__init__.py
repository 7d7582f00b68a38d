"""
The seam of the aggregator: what the registry tells the gate, what the gate is, and what a step of it wants done.

Frozen data; nothing here acts. The engine uses the registry, `gate` sees only `Snapshot`. Times named `*_at` and
`deadline` are seconds of the engine's clock: seconds since the epoch when the process started, from there on by
CLOCK_BOOTTIME, so that a clock that jumps moves no deadline.

`claims` is who has which node, `nodes` the fleet as a step sees it, `gates` how far a gate is, `effects` what a step of
it wants done.
"""

__all__ = ["calibration", "gates", "kept_state", "nodes", "policy", "postmortems", "quarantines", "validations"]
