"""
Tests that need more than Python: `@pytest.mark.system("prometheus", root=True)` names the programs, and root if needed.

`make test` leaves them out, `make test-all` runs them. Where a program or root is missing the test is skipped with the
reason; `.ci/run` installs all of them and fails on such a skip (tests/ci.py).
"""

from __future__ import annotations

import os
import shutil

import pytest

# Program -> Debian package, where the name differs.
PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "check_dummy": "monitoring-plugins-basic",
    "ip": "iproute2",
    "mpirun": "openmpi-bin",
    "orted": "openmpi-bin",
    "promtool": "prometheus",
    "sbatch": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "systemctl": "systemd",
    "systemd-analyze": "systemd",
    "tc": "iproute2",
    "unshare": "util-linux",
}


def missing(*programs: str, root: bool = False) -> str:
    """Why a test with these needs cannot run here; empty when it can. A program may be a path."""
    for program in programs:
        if shutil.which(program) is None:
            name = program.rpartition("/")[2]
            return f"{program} is not installed: apt-get install {PACKAGES.get(name, name)}"
    return "needs root" if root and os.geteuid() != 0 else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture of the test is made."""
    for mark in item.iter_markers("system"):
        reason = missing(*mark.args, **mark.kwargs)
        if reason:
            pytest.skip(reason)
