"""
What became of jobs: how they ended, how right the gate was, why they died.

`outcome_records` and `postmortem_records` are data, which the command line reads too: nothing is imported here.
"""

__all__ = ["calibration", "outcome_records", "postmortem_records", "postmortems", "sinks", "ungated"]
