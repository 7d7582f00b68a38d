"""
`python -m tests.simulation --seed 7`: simulate many schedules, or replay one.

Of a schedule that breaks a promise the events are left out one after the other, as long as it still does.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import time

from tests.simulation.many import Played, WorkerError, play_many
from tests.simulation.plan import STEPS, drawn
from tests.simulation.shrink import MOST_TRIES, shrunk
from tests.simulation.world import simulate

SILENT_SECONDS = 2.0
"""What takes longer shows on a terminal how far it is."""
SHOWN_SECONDS = 0.5
INTERRUPTED = 130
"""Exit code after SIGINT, as of a shell."""


def main() -> int:
    """1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").strip())
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--schedules", type=_positive, default=1, help="how many seeds, from the first one on (1)")
    parser.add_argument("--steps", type=_positive, default=STEPS, help=f"events of a schedule ({STEPS})")
    parser.add_argument("--aggregators", type=int, choices=(1, 2, 3), help="how many there are (by the seed)")
    parser.add_argument("--processes", type=_positive, default=os.cpu_count() or 1, help="how many play (one a core)")
    parser.add_argument("--log", action="store_true", help="print all that happens in the first schedule, and end")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for the events that matter")
    options = parser.parse_args()
    if options.log:
        for line in simulate(drawn(options.seed, options.steps, options.aggregators), keep_log=True).log:
            print(line)
        return 0
    seeds = range(options.seed, options.seed + options.schedules)
    done: list[Played] = []
    shown, began = Progress(), time.monotonic()
    code = 0
    try:
        played = play_many(seeds, steps=options.steps, aggregators=options.aggregators, processes=options.processes)
        with contextlib.closing(played):
            for one in played:
                done.append(one)
                shown.show(f"{len(done):,} of {len(seeds):,} schedules")
                if one.broken:
                    break
    except KeyboardInterrupt:
        code = INTERRUPTED
    except WorkerError as error:
        shown.clear()
        print(error, file=sys.stderr)
        code = 1
    seconds = time.monotonic() - began
    shown.clear()
    broken = next((one for one in done if one.broken), None)
    if broken is not None:
        tell(broken, options.steps, options.aggregators, shown, shrink=not options.no_shrink)
        code = 1
    print(summary(done, seeds, seconds))
    return code


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def summary(done: list[Played], seeds: range, seconds: float) -> str:
    """The closing line: what was played, and how many events of each kind happened."""
    events: collections.Counter[str] = sum((one.events for one in done), collections.Counter())
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(events.items()))
    kept = "every promise kept" if not any(one.broken for one in done) else "a promise was broken"
    return (
        f"{len(done):,} of {len(seeds):,} schedules (seeds {seeds[0]} to {seeds[-1]}): {kept}; "
        f"{sum(one.steps for one in done):,} steps in {seconds:,.1f} s ({len(done) / seconds:.1f} schedules a second); "
        f"events: {kinds}"
    )


def tell(played: Played, steps: int, aggregators: int | None, shown: Progress, *, shrink: bool) -> None:
    """What was broken, and how to see it again."""
    plan = drawn(played.seed, steps, aggregators)
    print(f"seed {played.seed}: {played.broken}")
    print(
        f"again: make simulate SEED={played.seed} STEPS={steps} SCHEDULES=1 AGGREGATORS={plan.aggregators}", flush=True
    )
    if not shrink:
        return
    outcome = simulate(plan)
    if not outcome.broken:
        print("it keeps every promise when it is played again: something in it does not follow from the seed")
        return
    less, outcome = shrunk(plan, outcome, lambda tries: shown.show(f"shrinking: {tries} of at most {MOST_TRIES} tries"))
    shown.clear()
    print(f"{len(less.events)} of {len(plan.events)} events are enough for: {outcome.broken}")
    for event in less.events:
        print(f"  {event}")


class Progress:
    """One line on a terminal that is overwritten."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = time.monotonic() + SILENT_SECONDS

    def show(self, text: str) -> None:
        """Show it, unless the last one is too new."""
        if self._live and time.monotonic() >= self._next:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._next = time.monotonic() + SHOWN_SECONDS

    def clear(self) -> None:
        """Leave the terminal to what is printed next."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
