"""What the drill and the soak go by, and both for real, as short as they can be."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from tests.aggregator.service import ROOT
from tests.drill.__main__ import Fault, Round, main, summary
from tests.drill.nodes import Fact, Kind, Node, fit_between, trouble_with
from tests.drill.soak import Sample, grown
from tests.every import every
from tests.patience import PATIENCE

PASSED = Fact(Kind.PASSED, 100.0, told=100.5)


@every(
    ("facts", "asked", "fit"),
    [
        ([], 101.0, False),
        ([PASSED], 101.0, True),
        ([PASSED], 110.5, False),  # it was too old already when the gate was asked
        ([Fact(Kind.PASSED, 103.0)], 101.0, True),  # it ran while the gate was held
        ([Fact(Kind.PASSED, 105.0)], 101.0, False),  # it ran after the answer
        ([PASSED, Fact(Kind.FAILED, 100.6, told=100.9)], 101.0, False),
        ([PASSED, Fact(Kind.FAILED, 100.6, told=101.5)], 101.0, True),  # nobody could know when it was asked
        ([PASSED, Fact(Kind.FAILED, 100.6)], 101.0, True),  # nor later
        ([PASSED, Fact(Kind.BOOTED, 100.6, told=100.9)], 101.0, False),
        ([PASSED, Fact(Kind.BOOTED, 100.6, told=100.9), Fact(Kind.PASSED, 100.8)], 101.0, True),
        ([PASSED, Fact(Kind.LEFT, 100.6, told=100.9)], 101.0, False),
    ],
)
def test_a_node_is_fit_while_a_fresh_pass_stands(facts: list[Fact], asked: float, fit: bool) -> None:
    assert fit_between(facts, asked, asked + 2.0, 10.0) is fit


def test_an_admission_of_a_broken_or_a_quarantined_node_is_told_with_what_the_node_did() -> None:
    bad, good = Node("bad", 3.0, bad=True), Node("good", 3.0)
    now = time.monotonic()
    assert trouble_with(good, now, now + 1, 5.0) is None
    assert "a check failed" in (trouble_with(bad, now, now + 1, 5.0) or "")
    good.kept_out_since = now - 1
    assert trouble_with(good, now, now + 1, 5.0) == "a person keeps it out"


def samples(name: str, *figures: float) -> list[Sample]:
    return [Sample(seconds=60.0 * n, figures={name: figure}) for n, figure in enumerate(figures)]


def test_what_grows_is_told_and_what_swings_or_has_grown_in_the_warm_up_is_not() -> None:
    assert grown(samples("rows gates", *(1000.0 + 40 * n for n in range(20)))) == [
        "rows gates: 1300 in the first third, 1700 in the last"
    ]
    assert not grown(samples("rows gates", *(1000.0 + 900 * (n % 2) for n in range(20))))
    assert not grown(samples("MB", *([50.0, 100.0, 150.0, 200.0] + [250.0] * 16)))
    assert grown(samples("MB", *(250.0 + 3 * n for n in range(20))))


def test_summary_has_the_percentiles_of_each_fault() -> None:
    rounds = [Round(fault=Fault.CUT, held=1, leads=float(n), decides=2.0 * n, nodes=3.0 * n) for n in range(1, 102)]
    (_, line) = summary(rounds)
    assert line.split("  ")[0] == "cut"
    assert "51.00, 100.00, 101.00 s" in line
    assert "153.00, 300.00, 303.00 s" in line


def test_unknown_fault_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--faults", "killed,melted"])
    assert ended.value.code == 2
    assert "'melted' is not a valid Fault; there are: killed, frozen, cut" in capsys.readouterr().err


def run(*arguments: str) -> str:
    """Its output; a run that loses something, or ends with anything but 0, fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.system
def test_a_round_of_the_drill_says_how_long_it_took_and_that_nothing_was_lost() -> None:
    said = run("tests.drill", "--rounds", "1", "--faults", "deposed", "--nodes", "16", "--jobs", "2")
    assert re.search(r"1 the leader is told to step down +\d+ +\d+\.\d\d s +\d+\.\d\d s", said)
    assert "Answered decisions lost: 0. Double leases: 0.\nAdmissions without evidence: 0." in said


@pytest.mark.nightly
@pytest.mark.system
def test_a_soak_of_seconds_prints_its_lines_and_loses_nothing() -> None:
    said = run("tests.drill.soak", "--minutes", "0.3", "--nodes", "64", "--gates-per-second", "1")
    # Twelve where there is time for them.
    assert len(re.findall(r"^ +\d\.\d +\d+ +[1-9]\d+ +[1-9]\d+ +[1-9]\d+ ", said, re.MULTILINE)) >= 2
    assert "Answered decisions lost: 0. Double leases: 0.\nAdmissions without evidence: 0." in said
    assert "Too short to tell whether anything grows" in said
