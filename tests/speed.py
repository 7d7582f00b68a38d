"""
How fast this machine is: U, the wall time of `python -c "import torch"` in this environment.

Machines differ by a factor of three and more, so limits of tests and figures of benchmarks are multiples of U.

    python -m tests.speed             # `make speed`: U and the load, for a person
    python -m tests.speed --seconds   # U alone, which the Makefile hands to the tests as TESTS_UNIT_SECONDS
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

VARIABLE = "TESTS_UNIT_SECONDS"
RUNS = 3
SLOWEST_SECONDS = 3.5
"""U of the slowest machine that was seen. Where U was not measured, limits are for that one."""


def measured(runs: int = RUNS) -> float:
    """U in seconds: the median of some runs, after one that fills the page cache."""
    return statistics.median([_once() for _ in range(runs + 1)][1:])


def given() -> float:
    """U in seconds as the environment gives it; that of the slowest machine where it does not, or gives nonsense."""
    try:
        seconds = float(os.environ[VARIABLE])
    except (KeyError, ValueError):
        return SLOWEST_SECONDS
    return seconds if 0.1 < seconds < 1000 else SLOWEST_SECONDS


def _once() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import torch"], check=True)
    return time.monotonic() - began


def main(arguments: list[str]) -> None:
    """See the module."""
    load = os.getloadavg()
    unit = measured()
    if arguments == ["--seconds"]:
        print(f"{unit:.3f}")
        return
    print(f"U = {unit:.2f} s (import torch, median of {RUNS} runs)")
    print(f"load {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f} before; {os.cpu_count()} processors")


if __name__ == "__main__":
    main(sys.argv[1:])
