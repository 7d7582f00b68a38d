"""What nccom-test prints: read by name, and never taken for more than it says."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.collective.nccom.run import Ran, Step, believable, log_path, read_help, read_report, read_table
from checks.collective.nccom.steps import judge_step
from checks.contract import Limit, Status, worst
from tests.every import every
from tests.profile import examples

SIZES = (1024, 32768, 1048576)
STEP = Step(op="all_reduce", ranks=32, dtype="fp32", sizes_bytes=SIZES, factor=32, whole=True)
US = {1024: 22.5, 32768: 24.0, 1048576: 56.5}


def table(unit: float = 1e9, head: str = "time:avg(us)", sizes: tuple[int, ...] = SIZES) -> str:
    lines = [f"size(B)    count(elems)    type    {head}    algbw(GB/s)    busbw(GB/s)"]
    for size in sizes:
        algbw = size / US[size] * 1e6 / unit
        lines.append(f"{size:>10} {size // 4:>12} fp32 {US[size]:>10} {algbw:>10.2f} {algbw * 62 / 32:>10.2f}")
    return "\n".join([*lines, "Avg bus bandwidth:\t7.7775GB/s"]) + "\n"


def report() -> dict[str, Any]:
    return {
        "results": [
            {
                "size(B)": size,
                "count(elems)": size // 4,
                "type": "fp32",
                "algbw(GB/s)": size / US[size] / 1e3,
                "busbw(GB/s)": size / US[size] / 1e3 * 62 / 32,
                "time:avg(us)": US[size],
            }
            for size in SIZES
        ]
    }


def ran(output: str, report_text: str | None = None, returncode: int | None = 0) -> Ran:
    return Ran(
        step=STEP,
        returncode=returncode,
        output=output,
        report=report_text,
        log=None,
        log_text=None,
        seconds=1.0,
        timeout_seconds=60.0,
    )


def status_of(one: Ran) -> Status:
    findings = list(judge_step("nccom_all_reduce", one, {}, checked=True, cut_short=False, deep=False))
    return worst(finding.status for finding in findings)


@pytest.mark.parametrize("head", ["time:avg(us)", "time(us)"])
@pytest.mark.parametrize("unit", [1e9, 2**30])
def test_old_and_new_tables_give_the_same_numbers(head: str, unit: float) -> None:
    rows = read_table(table(unit, head))
    assert [row.size_bytes for row in rows] == list(SIZES)
    assert [row.seconds for row in rows] == pytest.approx([US[size] * 1e-6 for size in SIZES])
    assert all(believable(row) for row in rows)


@every(
    ("ratio", "status"),
    [(1.0, Status.PASS), (1.9, Status.PASS), (0.55, Status.PASS), (2.1, Status.UNKNOWN), (0.4, Status.UNKNOWN)],
)
def test_bus_bandwidth_that_contradicts_size_time_and_ranks_is_unknown_with_both_numbers(
    ratio: float, status: Status
) -> None:
    said = report()
    right = said["results"][-1]["busbw(GB/s)"]
    said["results"][-1]["busbw(GB/s)"] = ratio * right
    one = ran(table(), json.dumps(said))
    assert status_of(one) is status
    findings = list(judge_step("nccom_all_reduce", one, {}, checked=True, cut_short=False, deep=False))
    told = [finding for finding in findings if finding.status is Status.UNKNOWN]
    assert [finding.reason for finding in told] == ["Garbage"] * (status is Status.UNKNOWN)
    for finding in told:
        assert f"{ratio * right:g} GB/s" in finding.message
        assert f"{right:.3g} GB/s" in finding.message


def test_columns_are_found_by_name_in_any_order() -> None:
    (row,) = read_table(
        "log line before\n"
        "size(B) count(elems) total_input_size(B) total_output_size(B) type time:p50(us) time:avg(us) time:p99(us) "
        "algbw(GB/s) busbw(GB/s) algorithm\n"
        "2097152 524288 2097152 67108864 fp32 680.1 686.32 700.5 3.06 5.73 rdh\n"
    )
    assert (row.size_bytes, row.dtype, row.algorithm) == (2097152, "fp32", "rdh")
    assert row.seconds == pytest.approx(686.32e-6)
    assert row.p99_seconds == pytest.approx(700.5e-6)


def test_several_tables_one_after_the_other_are_all_read() -> None:
    assert len(read_table(table() + table(head="time(us)"))) == 6


@pytest.mark.parametrize(("head", "scale"), [("time:avg(ms)", 1e-3), ("time(ns)", 1e-9), ("time(s)", 1.0)])
def test_other_units_of_time_are_heeded(head: str, scale: float) -> None:
    (row,) = read_table(f"size(B) type {head}\n1024 fp32 5\n")
    assert row.seconds == pytest.approx(5 * scale)


def test_unit_of_time_that_nobody_knows_gives_no_time() -> None:
    (row,) = read_table("size(B) type time:avg(ticks)\n1024 fp32 5\n")
    assert row.seconds is None


def test_failure_in_the_place_of_a_row_gives_no_row() -> None:
    text = (
        "size(B) count(elems) type time(us) algbw(GB/s) busbw(GB/s)\n33554432 Failure running neuron-bench - log file "
    )
    assert read_table(text + "/tmp/nccom_test_log_7pqpdfjf.log\n1 errors found - test failed\n") == []
    assert log_path(text + "/tmp/nccom_test_log_7pqpdfjf.log\n") == "/tmp/nccom_test_log_7pqpdfjf.log"


def test_count_of_errors_is_no_row_although_it_has_as_many_words() -> None:
    header = "size(B) count(elems) type time(us) algbw(GB/s) busbw(GB/s)"
    line = "1 errors found - test failed"
    assert len(line.split()) == len(header.split())
    assert read_table(f"{header}\n{line}\n") == []


@pytest.mark.parametrize("path", ["/tmp/../etc/shadow", "relative.log", "/tmp/a b.log", "/etc/passwd"])
def test_log_that_may_be_something_else_is_not_read(path: str) -> None:
    assert log_path(f"Failure running neuron-bench - log file {path}\n") is None


def test_report_is_read_and_what_is_new_in_it_passed_over() -> None:
    said = {**report(), "config": {"nworkers": 32}, "version": None}
    rows = read_report(json.dumps(said))
    assert rows is not None
    assert [row.size_bytes for row in rows] == list(SIZES)
    assert status_of(ran("", json.dumps(said))) is Status.PASS


@every("text", ["", "{", "[]", "null", '{"results": null}', '{"results": {}}', "[" * 100_000])
def test_report_that_is_none_leaves_the_table_to_be_read(text: str) -> None:
    assert read_report(text) is None
    assert status_of(ran(table(), text)) is Status.PASS
    assert status_of(ran("", text)) is not Status.PASS


@pytest.mark.parametrize(
    ("help_text", "check"),
    [
        ("-r N --nworkers N -c [{random,all_ones}], --check [{random,all_ones}]", ("--check", "random")),
        ("-r N --nworkers N -c [{all_ones}], --check [{all_ones}]", ("--check", "all_ones")),
        ("-r N --nworkers N -c [CHECK], --check [CHECK]  random or all_ones", ("--check", "random")),
        ("-r N --nworkers N -c, --check  compare the results\n -d", ("--check",)),
        ("-r N --nworkers N", ()),
    ],
)
def test_how_values_are_checked_is_read_from_the_help(help_text: str, check: tuple[str, ...]) -> None:
    found = read_help(help_text)
    assert found is not None
    assert found.check == check


def test_what_is_no_help_is_none() -> None:
    assert read_help("nccom-test: cannot execute") is None


@pytest.mark.parametrize("factor", [1e-3, 0.5, 1.5, 1e3])
def test_row_whose_printed_bandwidth_is_of_other_size_or_time_is_not_believed(factor: float) -> None:
    text = table()
    assert status_of(ran(text)) is Status.PASS
    lines = text.splitlines()
    words = lines[3].split()
    words[3] = str(float(words[3]) * factor)
    assert status_of(ran("\n".join([*lines[:3], " ".join(words)]))) is Status.UNKNOWN


# --- fuzzed -----------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({"a": 1}),
    st.sampled_from(["nan", "inf", "1e400", "-1", "0", "22.5us"]),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_changed_report_is_never_a_crash_and_never_a_pass_with_a_wrong_number(data: st.DataObject) -> None:
    said = report()
    row = data.draw(st.sampled_from(said["results"]))
    member = data.draw(st.sampled_from(["size(B)", "type", "time:avg(us)", "algbw(GB/s)"]))
    action = data.draw(st.sampled_from(["drop", "change", "extra", "row"]))
    if action == "drop":
        del row[member]
    elif action == "change":
        row[member] = data.draw(SCALARS)
    elif action == "extra":
        row[data.draw(st.text(max_size=12))] = data.draw(SCALARS)
    else:
        said["results"].append(data.draw(st.one_of(SCALARS, st.dictionaries(st.text(max_size=8), SCALARS))))
    one = ran("", json.dumps(said))
    findings = list(judge_step("nccom_all_reduce", one, {}, checked=True, cut_short=False, deep=False))
    assert findings
    if worst(finding.status for finding in findings) is Status.PASS:
        for finding in findings:
            duration = finding.measurements[-1]
            right = US[int(duration.labels["size_bytes"])] * 1e-6
            assert duration.value is not None
            # Where no bandwidth is printed beside it, a time can be anything that is a time.
            assert math.isclose(duration.value, right) or action in ("change", "extra")


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, len(table())), st.booleans())
def test_cut_output_passes_only_with_every_row(cut: int, as_report: bool) -> None:
    text = json.dumps(report()) if as_report else table()
    part = text[:cut]
    status = status_of(ran("", part) if as_report else ran(part))
    complete = cut >= len(text) if as_report else len(read_table(part)) == 3
    assert status is not Status.PASS or complete


@settings(max_examples=examples(150), deadline=None)
@given(st.text(max_size=300), st.sampled_from([0, 1, 2, 127, -9, None]))
def test_any_text_is_judged_and_never_passes(text: str, returncode: int | None) -> None:
    for one in (ran(text, None, returncode), ran("size(B) time(us)\n" + text, text, returncode)):
        assert status_of(one) is not Status.PASS
    read_help(text)
    log_path(text)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([*table().split(), "nan", "-", "errors", "\n"]), max_size=60))
def test_shuffled_words_of_a_table_are_no_crash(words: list[str]) -> None:
    status_of(ran(" ".join(words)))


def test_failed_run_never_passes_whatever_its_rows() -> None:
    assert status_of(ran(table(), json.dumps(report()), 1)) is Status.FAIL
    assert status_of(ran(table() + "2 errors found - test failed", json.dumps(report()))) is Status.FAIL
    assert status_of(ran(table() + "0 errors found", json.dumps(report()))) is Status.PASS


@every("first", [True, False])
@every("said", ["nan", "", 0, 9e9])
def test_of_two_rows_of_one_size_the_worse_counts(said: object, first: bool) -> None:
    rows = report()
    other = {**rows["results"][0], "time:avg(us)": said}
    rows["results"].insert(0 if first else len(rows["results"]), other)
    size = rows["results"][1]["size(B)"]
    limits = {f"nccom_all_reduce_duration_seconds/{size}": Limit(lower=None, upper=1.0, origin="config")}
    one = ran("", json.dumps(rows))
    findings = judge_step("nccom_all_reduce", one, limits, checked=True, cut_short=False, deep=False)
    assert worst(finding.status for finding in findings) is not Status.PASS
