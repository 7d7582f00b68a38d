"""What people see in a terminal: what many devices say alike is one line."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from checks.contract import Action, Blame, Finding, Status, Tier
from healthd.cli.terminal import decisions, render
from healthd.cli.terminal.console import Terminal
from healthd.core.model import CheckResult, Decision, ExcludedNode, Reason, Verdict
from tests.aggregator.parts import state
from tests.cli.cli_kit import healthd
from tests.cli.render_kit import plain

COLD = "nothing is compiled here for all_gather; run 'healthd warm' on this node"


def finding(status: Status, code: str, message: str, target: str) -> Finding:
    return Finding(status=status, reason=code, message=message, target=target)


def cold(rank: int, device: int) -> Finding:
    return finding(Status.UNKNOWN, "ColdCache", f"neuroncore:{device}: {COLD}", f"rank:{rank}")


def rows(*findings: Finding) -> list[tuple[str, str]]:
    result = CheckResult(
        check="all_gather",
        tier=Tier.QUICK,
        status=Status.UNKNOWN,
        findings=findings,
        age_seconds=0.0,
        started_at=0.0,
        duration_seconds=0.1,
        attempts=1,
        error=None,
        injected=False,
        executor="check",
    )
    return [(targets, Text.from_markup(said).plain.strip()) for _, _, targets, said in render.result_rows(result)]


def test_into_a_pipe_no_row_is_folded(tmp_path: Path) -> None:
    """Each check of `healthd checks` is one line, however long its sentence; `COLUMNS` folds as ever."""
    said = healthd(tmp_path, "checks")
    assert said.code == 0, said.err
    assert max(map(len, said.out.splitlines())) > 120
    known = [line.split()[0] for line in said.out.splitlines()[1:]]
    assert {"matmul", "all_reduce"} <= set(known)
    assert all(re.fullmatch("[a-z_0-9]+", name) for name in known)
    folded = healthd(tmp_path, "checks", env={"COLUMNS": "80"})
    assert max(map(len, folded.out.splitlines())) <= 80


def test_in_a_pipe_each_row_is_a_line_of_its_own_without_padding(tmp_path: Path) -> None:
    """Tabs between its cells, so that `cut` and `awk` find them; the name of the check in each of its rows."""
    said = healthd(tmp_path, "check", "memory_free", "load", "--tier", "passive")
    head, *lines = said.out.splitlines()[1:]
    assert head.split("\t") == ["check", "status", "target", "finding"]
    cells = [line.split("\t") for line in lines if "\t" in line]
    assert [row[0] for row in cells] == ["load", "memory_free", "memory_free"]
    assert {row[1] for row in cells} <= {"✓ pass", "! warn", "✗ fail"}
    assert "  " not in "".join(lines)


def shown(*parts: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    render.show(console, parts)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_cell_of_several_lines_is_one_cell_in_a_pipe_and_a_table_stays_one_where_the_width_is_known() -> None:
    table = render.table_of("name", "found", wrapped=("found",))
    table.add_row("torch", "missing\n[dim]→ install\tit[/]")
    table.add_row("", "a longer line than that")
    assert shown(table, width=render.UNFOLDED) == (
        "name\tfound\ntorch\tmissing → install it\ntorch\ta longer line than that\n"
    )
    assert shown(table, width=60).splitlines()[1].split() == ["torch", "missing"]


AWAY = ("n1 has never reported", "n2 has never reported")
PRODUCT = "fp32 512x512x512 product is wrong (seed 1): 1 of 262144 elements"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            (f"n2: matmul cpu:0: {PRODUCT} (injected)", f"n2 is quarantined by rule:hard: {PRODUCT}; seen once"),
            (f"n2: matmul cpu:0: {PRODUCT} (injected)", "n2 is quarantined by rule:hard: see above; seen once"),
        ),
        (
            (f"waiting for: {AWAY[0]}; {AWAY[1]}", *AWAY),
            ("waiting for: see below", *AWAY),
        ),
        (
            (f"matmul cpu:0: {PRODUCT}", f"matmul cpu:1: {PRODUCT}"),
            (f"matmul cpu:0: {PRODUCT}", f"matmul cpu:1: {PRODUCT}"),
        ),
        (("it failed", "it failed again"), ("it failed", "it failed again")),
    ],
)
def test_a_rejection_has_each_sentence_once(messages: tuple[str, ...], said: tuple[str, ...]) -> None:
    assert tuple(render.once_each(messages).values()) == said


def test_what_gate_prints_of_a_rejection_has_each_sentence_once() -> None:
    found = reason("n2", "cpu:0", PRODUCT, Status.FAIL, "matmul")
    quarantined = replace(found, code="Quarantined", check=None, message=f"n2 is quarantined by rule:hard: {PRODUCT}")
    decision = Decision(
        id="g-1",
        decision=Verdict.REJECT,
        nodes=(),
        excluded=(ExcludedNode(node="n2", reasons=(found, quarantined)),),
        reasons=(found,),
        policy={},
        retryable=True,
        decided_at=0.0,
        duration_seconds=1.0,
    )
    assert "".join(plain(*decisions.decision_report(decision))).count(PRODUCT) == 1


def test_a_rejection_refers_to_nothing_that_it_does_not_print() -> None:
    """The node's own reason is only counted, since nobody is to blame, and a fourth line of a node is left out."""
    said = "digest is required but not enabled on the node"
    own = Reason(
        code="NotYetRun", message=said, status=Status.UNKNOWN, blame=Blame.CONTROL, action=Action.RETRY, node="n1"
    )
    decision = rejected(replace(own, message=f"waiting for: {said}"))
    decision = replace(decision, excluded=(ExcludedNode(node="n1", reasons=(own,)),))
    _, why, unjudged = plain(*decisions.decision_report(decision))
    assert why == f"  ? n1: NotYetRun waiting for: {said} → retry"
    assert unjudged == "  not verified: n1 (NotYetRun)"
    faults = [reason("n2", f"cpu:{n}", f"product {n} is wrong, as is told in {PRODUCT}", Status.FAIL) for n in range(3)]
    cut = reason("n2", "cpu:3", PRODUCT, Status.FAIL)
    printed = "".join(
        plain(
            *decisions.decision_report(replace(decision, excluded=(ExcludedNode(node="n2", reasons=(*faults, cut)),)))
        )
    )
    assert "see " not in printed
    assert PRODUCT in printed


def test_a_report_ends_with_how_many_checks_came_to_what() -> None:
    many = [*state().results, *state(status=Status.FAIL).results]
    assert Text.from_markup(render.counts_line(many)).plain == "4 checks: 1 fail, 3 pass"
    console = Console(file=io.StringIO(), width=200)
    render.show(console, render.node_report(state(status=Status.WARN)))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().splitlines()[-1].strip() == "2 checks: 1 warn, 1 pass"


def reason(node: str, target: str, message: str, status: Status = Status.UNKNOWN, check: str = "all_gather") -> Reason:
    return Reason(
        code="ColdCache",
        message=f"{check} {target}: {message}",
        status=status,
        blame=Blame.NODE,
        action=Action.RETRY,
        node=node,
        target=target,
        check=check,
    )


def test_checks_with_nothing_to_look_at_for_one_reason_are_one_line() -> None:
    whole = state("n1")
    skips = [
        replace(
            whole.results[0],
            check=name,
            status=Status.SKIP,
            findings=(finding(Status.SKIP, "NotApplicable", why, "node"),),
        )
        for name, why in (("gpu_links", "no GPU"), ("gpu_memory", "no GPU"), ("clock", "no time service"))
    ]
    out = io.StringIO()
    console = Console(width=100, file=out)
    render.show(console, render.node_report(replace(whole, results=(*whole.results, *skips))))
    said = out.getvalue()
    assert "- skip  gpu_links, gpu_memory: no GPU" in said
    assert said.count("no GPU") == 1
    assert "no time service" in said


def test_what_all_ranks_say_alike_is_one_row_without_the_device() -> None:
    assert rows(*(cold(rank, rank) for rank in (10, 2, *range(2), *range(3, 10), *range(11, 32)))) == [
        ("rank:0-31", COLD)
    ]


@pytest.mark.parametrize(
    ("ranks", "targets"),
    [((3,), "rank:3"), ((0, 1), "rank:0, rank:1"), ((0, 1, 2, 3), "rank:0-3"), ((0, 1, 2, 9), "rank:0 ... rank:9 (4)")],
)
def test_targets_are_named_in_short(ranks: tuple[int, ...], targets: str) -> None:
    ((shown, said),) = rows(*(cold(rank, rank) for rank in ranks))
    assert shown == targets
    assert said == (COLD if len(ranks) > 1 else f"neuroncore:3: {COLD}")


def test_failures_with_other_numbers_stay_apart() -> None:
    found = rows(*(finding(Status.FAIL, "WrongResult", f"{n} of 9 elements are wrong", f"cpu:{n}") for n in (1, 2)))
    assert found == [("cpu:1", "1 of 9 elements are wrong"), ("cpu:2", "2 of 9 elements are wrong")]


def test_reasons_alike_are_one_line_a_node() -> None:
    many = [reason(node, f"rank:{n}", f"neuroncore:{n}: {COLD}") for node in ("a", "b") for n in range(32)]
    assert plain(*render.reason_lines(many)) == [
        f"? {node}: ColdCache all_gather rank:0-31: {COLD} → retry" for node in ("a", "b")
    ]


def test_reasons_alike_of_several_checks_are_one_line() -> None:
    """Without torch every probe says the same: one remedy, read once."""
    said = "python3: No module named 'torch'; name the interpreter that has it"
    many = [reason("a", f"cpu:{n}", said, check=check) for check in ("digest", "matmul") for n in (0, 1)]
    assert plain(*render.reason_lines(many)) == [f"? a: ColdCache digest, matmul cpu:0, cpu:1: {said} → retry"]


def test_reasons_that_are_cut_off_are_counted() -> None:
    many = [reason("a", f"rank:{n}", f"it took {n} s") for n in range(15)]
    assert plain(*render.reason_lines(many))[-1] == "  and 3 more (--json shows all)"


def test_a_warning_accuses_nobody_where_a_gate_says_no() -> None:
    culprit, warned = reason("n2", "cpu:1", "is wrong", Status.FAIL), reason("n1", "node", "load", Status.WARN)
    decision = Decision(
        id="g-1",
        decision=Verdict.REJECT,
        nodes=(),
        excluded=(
            ExcludedNode(node="n2", reasons=(culprit,)),
            ExcludedNode(node="n1", reasons=(warned,)),
        ),
        reasons=(culprit,),
        policy={},
        retryable=True,
        decided_at=0.0,
        duration_seconds=1.0,
    )
    said = plain(*decisions.decision_report(decision))
    assert said[-1] == "  not verified: n1 (ColdCache)"
    assert not any("left out" in line for line in said)


def rejected(*reasons: Reason, decision: Verdict = Verdict.REJECT, would: Verdict | None = None) -> Decision:
    return Decision(
        id="g-1",
        decision=decision,
        nodes=(),
        excluded=tuple(ExcludedNode(node=one.node or "", reasons=(one,)) for one in reasons),
        reasons=reasons,
        policy={},
        retryable=True,
        decided_at=0.0,
        duration_seconds=1.0,
        would=would,
    )


WRONG = replace(
    reason("n2", "cpu:1", "product is wrong (injected)", Status.FAIL, "matmul"),
    code="WrongResult",
    action=Action.REPLACE,
    injected=True,
)


def test_a_drill_is_said_first_and_nobody_is_told_to_replace_a_node() -> None:
    first, why = plain(*decisions.decision_report(rejected(WRONG)))
    assert first.startswith("✗ REJECT  DRILL  no node")
    assert why == "  ✗ DRILL n2: WrongResult matmul cpu:1: product is wrong (injected)"
    first, second, *_ = plain(*decisions.decision_report(rejected(WRONG, decision=Verdict.ADMIT, would=Verdict.REJECT)))
    assert first.startswith("✓ ADMIT  no node")
    assert second.endswith("✗ REJECT  DRILL")


@pytest.mark.parametrize("would", [Verdict.ADMIT, Verdict.REJECT])
def test_a_gate_that_only_watched_says_so_once(would: Verdict) -> None:
    watched = Reason(
        code="Observed",
        message="enforce mode would also have admitted",
        status=Status.PASS if would is Verdict.ADMIT else Status.WARN,
        blame=Blame.CONTROL,
        action=Action.NONE,
    )
    why = () if would is Verdict.ADMIT else (replace(WRONG, injected=False),)
    decision = replace(rejected(*why, decision=Verdict.ADMIT, would=would), reasons=(watched, *why))
    said = plain(*decisions.decision_report(decision))
    signs = {Verdict.ADMIT: "✓ ADMIT", Verdict.REJECT: "✗ REJECT"}
    assert said[1] == f"  observe mode; enforce mode would have said: {signs[would]}"
    assert len(said) == 2 + len(why)
    assert plain(*render.reason_lines([replace(watched, status=Status.PASS)]))[0].startswith("✓ Observed")


def test_a_real_fault_beside_a_drill_is_no_drill_and_keeps_its_advice() -> None:
    real = replace(WRONG, node="n3", injected=False, message="matmul cpu:1: product is wrong")
    first, *whys = plain(*decisions.decision_report(rejected(WRONG, real)))
    assert "DRILL" not in first
    assert whys[0].startswith("  ✗ DRILL n2: ")
    assert whys[1] == "  ✗ n3: WrongResult matmul cpu:1: product is wrong → replace"


def test_the_report_of_a_node_in_a_drill_says_so_beside_its_name_and_before_each_check(tmp_path: Path) -> None:
    ill = state("n2", faults=("matmul=corrupt",), status=Status.FAIL)
    ill = replace(ill, results=(ill.results[0], replace(ill.results[1], injected=True)), reasons=(WRONG,))
    console = Console(file=io.StringIO(), width=200)
    render.show(console, render.node_report(ill))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert any(line.startswith("n2  ✗ unhealthy  DRILL  ") for line in lines[:2])
    assert [line.split("  ")[0] for line in lines if "matmul" in line][1] == "DRILL matmul"
    assert not any("replace" in line for line in lines)


@pytest.mark.parametrize("columns", [0, 10, 20, 40, 60, 80, 200])
def test_narrow_terminal_shows_all_of_a_table(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a host alone may be as wide as a terminal; why it is out must stand beside it."""
    cells = (
        ("node", "health", "in use by", "why"),
        ("ip-10-0-0-117.us-west-2.compute.internal", "unhealthy", "slurm:123", "matmul cpu:1: the product is wrong"),
        ("n2", "healthy", "", ""),
    )
    table = render.table_of(*cells[0], wrapped=("in use by", "why"))
    for row in cells[1:]:
        table.add_row(*row)
    Terminal(width=columns).print(table)
    shown = capsys.readouterr().out
    assert sorted(shown.replace(" ", "").replace("\n", "")) == sorted("".join(map("".join, cells)).replace(" ", ""))
    assert max(map(len, shown.splitlines())) <= max(20, columns)
