"""What the interpreter of a job has: `healthd_steps`, from the folder of its distribution."""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).parents[1] / "packages/healthd-steps")
IN_A_JOB = f"import sys; sys.path.insert(0, {FOLDER!r})\n"
"""The beginning of a script that imports it."""
