"""
What runs inside a training job: reports of its steps to the healthd daemon of its node.

A distribution of its own for the job's interpreter: the standard library alone, Python 3.8, and never torch by itself,
so that a job pays nothing for it.
"""

from __future__ import annotations

from healthd_steps.reporter import StepReporter as StepReporter

__version__ = "0.1.0"
