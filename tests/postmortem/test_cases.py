"""Jobs that died in known ways: the class, who is named, and what a change that says nothing must not change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from healthd.core.wire import decode, encode
from healthd.postmortem.catalogue import Kind
from healthd.postmortem.judge import JobVerdict, accuses, judge
from healthd.postmortem.notes import Notes, case_of, read_notes
from tests.postmortem.case_kit import LOST, STARTED, CaseOf, all_cases

CASES = all_cases()


def verdict_of(notes: list[Notes]) -> JobVerdict:
    return judge(case_of(notes))


def said(verdict: JobVerdict) -> tuple[Kind, str | None, bool]:
    """The class, the accused, and whether it is certain."""
    accused = verdict.node if accuses(verdict.kind, verdict.outlook) else None
    return verdict.kind, accused, verdict.suspected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: CaseOf) -> None:
    verdict = verdict_of(case.notes())
    assert case.faults(verdict) == [], verdict.sentence


def with_lines(notes: Notes, *lines: tuple[float, str]) -> Notes:
    words = notes.streams[0]
    chunks = sorted(
        (*words.chunks, *((STARTED + at, f"{text}\n") for at, text in lines)), key=lambda each: each[0] or 0
    )
    return dataclasses.replace(notes, streams=(dataclasses.replace(words, chunks=tuple(chunks)),))


def shifted(notes: Notes, seconds: float) -> Notes:
    """The same notes by a clock that is `seconds` wrong."""
    words = notes.streams[0]
    chunks = tuple(((at or 0.0) + seconds, text) for at, text in words.chunks)
    return dataclasses.replace(
        notes,
        started=notes.started + seconds,
        ended=notes.ended + seconds,
        streams=(dataclasses.replace(words, chunks=chunks),),
        kernel=tuple((at + seconds, text) for at, text in notes.kernel),
        signals=tuple(dataclasses.replace(each, at=each.at + seconds) for each in notes.signals),
    )


def test_what_says_nothing_of_the_job_changes_neither_the_class_nor_the_accused() -> None:
    old = (
        "NVRM: Xid (PCI:0000:59:00): 48, pid=99, DBE (double bit error) ECC Error",
        "mlx5_core 0000:5e:00.0 ens1f1np1: Link down",
        "Memory cgroup out of memory: Killed process 98 (java) total-vm:4kB",
    )
    for case in CASES:
        notes = case.notes()
        expected = said(verdict_of(notes))
        for change, changed in {
            "an unrelated line": [with_lines(each, (100.0, "loading 17 shards of the data set")) for each in notes],
            "an older line of the kernel": [
                dataclasses.replace(each, kernel=(*((STARTED + 60.0, text) for text in old), *each.kernel))
                for each in notes
            ],
            "the end of other ranks": [
                with_lines(each, *((37000.0 + rank / 100, f"[rank{rank}]: {LOST}") for rank in range(50, 60)))
                for each in notes
            ],
        }.items():
            assert said(verdict_of(changed)) == expected, f"{case.name}: {change}"
        for seconds in (-40.0, 3600.0):
            assert said(verdict_of([shifted(notes[0], seconds), *notes[1:]])) == expected, f"{case.name}: a clock"


def test_without_a_measurement_no_verdict_is_more_certain() -> None:
    for case in CASES:
        notes = case.notes()
        whole = verdict_of(notes)
        for index, each in enumerate(notes):
            for left in range(len(each.measured)):
                fewer = (*each.measured[:left], *each.measured[left + 1 :])
                less = verdict_of([*notes[:index], dataclasses.replace(each, measured=fewer), *notes[index + 1 :]])
                certain = not less.suspected and less.kind is not Kind.UNKNOWN
                assert not (certain and whole.suspected), f"{case.name}: without {each.measured[left]}"


def test_order_of_the_nodes_does_not_matter() -> None:
    for case in CASES:
        notes = case.notes()
        assert said(verdict_of(notes[::-1])) == said(verdict_of(notes)), case.name


def test_notes_and_verdicts_of_the_former_version_are_read() -> None:
    """As 421a37d4 wrote them."""
    notes = b"""{"version": 1, "host": "n1", "command": ["python", "train.py"], "directory": "/", "started": 1.0,
        "ended": 9.0,
        "code": 1, "signal": null, "dumped_core": false, "signals": [], "environment": {"RANK": "3"}, "files": [],
        "streams": [{"name": "stderr", "bytes": 9, "chunks": [[8.0, "KeyError: 'x'\\n"]],
        "rank": null, "modified": null}],
        "memory_events": {"before": {}, "after": {}}, "kernel": [], "dumps": [], "measured": [], "unread": []}"""
    verdict = judge(case_of([read_notes(notes, "n1")]))
    assert (verdict.kind, verdict.rank) == (Kind.SOFTWARE, 3)
    told = json.loads(encode(verdict))
    del told["measured"]
    assert not decode(json.dumps(told).encode(), JobVerdict, what="a verdict").measured
