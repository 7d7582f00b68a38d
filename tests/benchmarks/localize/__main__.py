"""
`make bench-localize`: the localiser over thousands of random fleets, as one table in Markdown.

    python -m tests.benchmarks.localize [--short] [--scale SHARE] [--least N] [--only WORD]

Every row is a kind of fault in fleets of one size: each run draws culprits, names and noise anew, from its own seed, so
that the same call gives the same table.

Exit code: 1 where an aim is missed. `--short` (in CI) plays a tenth of the fleets: there an aim counts as missed only
by more than chance makes of so few, or at all where the aim is every fleet.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from healthd.localize.model import Problem
from tests.benchmarks.localize.baselines import BASELINES
from tests.benchmarks.localize.hard_rows import hard_rows
from tests.benchmarks.localize.simulator import Fleet, play, problem_of
from tests.benchmarks.localize.table import Row, accused, usual_rows

SHORT_SHARE = 0.1
SURE = 4.0  # standard deviations


@dataclass(kw_only=True)
class Score:
    """What the runs of a row gave."""

    runs: int = 0
    right: int = 0
    accused: int = 0  # fleets in which a healthy member is accused
    rounds: int = 0
    most_rounds: int = 0
    tests: int = 0
    node_seconds: float = 0.0
    slowest_seconds: float = 0.0


def fleet_of(row: Row, run: int) -> tuple[Fleet, Problem]:
    """The fleet of a run, drawn from its number, and what is to be localised."""
    rng = random.Random(f"{row.kind}:{row.members}:{row.culprits}:{run}")
    problem = problem_of(row.members + row.borrowed, seed=run, switch=row.switch, noise=row.noise, told=row.told,
                         max_rounds=row.limit)  # fmt: skip
    job = dataclasses.replace(problem, members=problem.members[: row.members])
    return row.make(rng, job, run), problem


def rows() -> Iterator[Row]:
    """The whole table."""
    yield from usual_rows()
    yield from hard_rows()


def measure(row: Row, runs: int) -> Score:
    """Play a row."""
    score = Score()
    for run in range(runs):
        fleet, problem = fleet_of(row, run)
        began = time.perf_counter()
        verdict, _ = play(fleet, problem, first=row.first, borrowed=row.borrowed)
        took = time.perf_counter() - began
        score.runs += 1
        score.right += row.right(fleet, verdict)
        score.accused += bool(accused(verdict) - fleet.at_fault())
        score.rounds += verdict.rounds
        score.most_rounds = max(score.most_rounds, verdict.rounds)
        score.tests += verdict.tests
        score.node_seconds += fleet.node_seconds
        score.slowest_seconds = max(score.slowest_seconds, took / (verdict.rounds + 1))
    return score


def has_aim(row: Row) -> bool:
    """Whether a row is there for more than to be shown."""
    return bool(row.exact or row.false or row.rounds)


def is_met(row: Row, score: Score, *, sure: float = 0.0) -> bool:
    """
    Whether every aim of the row is met.

    `sure`, in standard deviations: a share counts as missed only where chance would not miss the aim by so much.
    """

    def slack(share: float) -> float:
        return sure * math.sqrt(share * (1 - share) * score.runs)

    return (
        score.right >= row.exact * score.runs - slack(row.exact)
        and score.accused <= row.false * score.runs + slack(row.false)
        and (row.rounds is None or score.most_rounds <= row.rounds)
    )


def beside(row: Row, runs: int) -> str:
    """What the three simple ways make of the same fleets: share exact, and with a healthy member accused."""
    cells: list[str] = []
    for name, baseline in BASELINES:
        exact = false = 0
        for run in range(runs):
            fleet, problem = fleet_of(row, run)
            found = baseline(fleet, problem.members[: row.members])
            exact += found == fleet.at_fault()
            false += bool(found - fleet.at_fault())
        cells.append(f"{name} {100 * exact / runs:.0f}/{100 * false / runs:.0f}")
    return ", ".join(cells)


def line(row: Row, score: Score) -> str:
    """A row of the table."""
    aims = [f"right {100 * row.exact:g} %" if row.exact else "", f"accused {100 * row.false:g} %" if row.false else ""]
    aims += [f"{row.rounds} rounds"] if row.rounds else []
    said = ", ".join(filter(None, aims)) + (": met" if is_met(row, score) else ": MISSED")
    cells = (
        row.kind,
        str(row.members),
        row.culprits,
        str(score.runs),
        f"{score.rounds / score.runs:.1f} ({score.most_rounds})",
        f"{score.tests / score.runs:.1f}",
        f"{score.node_seconds / score.runs:.0f}",
        f"{100 * score.right / score.runs:.1f} %",
        f"{score.accused} in {score.runs}" if score.accused else "0",
        f"{1e3 * score.slowest_seconds:.0f} ms",
        said if has_aim(row) else "shown",
        row.others or ("" if row.members > 512 else beside(row, min(50, score.runs))),
    )
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| fault | members | culprits | fleets | rounds, mean (most) | tests, mean | node-seconds | right "
    "| healthy accused | slowest step, mean | aim | others |"
)


def main(argv: Sequence[str] | None = None, table: Iterable[Row] | None = None) -> int:
    """Measure and print the rows of `table`; None: all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.localize", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="SHARE", help="of the fleets of each row; default 1"
    )
    parser.add_argument(
        "--least", type=int, default=1, metavar="N", help="fleets of rows of up to 64 members; default 1"
    )
    parser.add_argument("--short", action="store_true", help="a tenth of the fleets")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose kind holds this word")
    arguments = parser.parse_args(argv)
    share = SHORT_SHARE if arguments.short else arguments.scale
    began, fleets = time.monotonic(), 0
    failed: list[str] = []
    sys.stdout.write(f"{HEAD}\n|{'---|' * 12}\n")
    for row in rows() if table is None else table:
        if arguments.only in row.kind:
            least = arguments.least if row.members <= 64 else 1
            score = measure(row, max(least, round(row.runs * share)))
            fleets += score.runs
            if has_aim(row) and not is_met(row, score, sure=SURE if arguments.short else 0.0):
                failed.append(row.name)
            sys.stdout.write(line(row, score) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{fleets} fleets in {time.monotonic() - began:.0f} s\n")
    if failed:
        sys.stderr.write(f"missed: {'; '.join(failed)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
