"""
What runs inside a training job: reports of its steps to the daemon of its node.

Imports the standard library alone and never torch, so that a job pays nothing for it.
"""

from __future__ import annotations

from healthd.training.reporter import StepReporter as StepReporter
