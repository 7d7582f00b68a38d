"""
`python -m tests.simulation --seed 7`: simulate many schedules, or replay one.

Of a schedule that breaks a promise the events are left out one after the other, as long as it still does.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.plan import STEPS, Plan, drawn
from tests.simulation.shrink import shrunk
from tests.simulation.world import Outcome, simulate


def main() -> int:
    """1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").strip())
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--schedules", type=int, default=1, help="how many seeds, from the first one on (1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"events of a schedule ({STEPS})")
    parser.add_argument("--aggregators", type=int, choices=(1, 2, 3), help="how many there are (by the seed)")
    parser.add_argument("--log", action="store_true", help="print all that happens")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for the events that matter")
    options = parser.parse_args()
    began, steps = time.process_time(), 0
    for seed in range(options.seed, options.seed + options.schedules):
        plan = drawn(seed, options.steps, options.aggregators)
        outcome = simulate(plan, keep_log=options.log)
        steps += outcome.steps
        for line in outcome.log:
            print(line)
        if outcome.broken:
            tell(plan, outcome, options.steps, shrink=not options.no_shrink)
            return 1
        if options.schedules == 1:
            print(f"seed {seed}: every promise was kept; {outcome.steps} steps, digest {outcome.digest}")
    seconds = time.process_time() - began
    print(
        f"{options.schedules} schedules, every promise kept: {options.schedules / seconds:.2f} schedules and "
        f"{steps / seconds:,.0f} steps a second of processor time"
    )
    return 0


def tell(plan: Plan, outcome: Outcome, steps: int, *, shrink: bool) -> None:
    """What was broken, and how to see it again."""
    print(f"seed {plan.seed}: {outcome.broken}")
    print(f"again: make simulate SEED={plan.seed} STEPS={steps} SCHEDULES=1 AGGREGATORS={plan.aggregators}")
    if shrink:
        less, outcome = shrunk(plan, outcome)
        print(f"{len(less.events)} of {len(plan.events)} events are enough for: {outcome.broken}")
        for event in less.events:
            print(f"  {event}")


if __name__ == "__main__":
    sys.exit(main())
