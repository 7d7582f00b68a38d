"""Dumps of the Flight Recorder: read without running their code, in every version, and what they say of late ranks."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from healthd.core.errors import BadInputError
from healthd.postmortem.flight_recorder import Dump, late_ranks, read_dump

VERSIONS = ("2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10")


def entry(sequence: int, state: str = "completed", group: str = "0", pg_id: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "record_id": sequence,
        "pg_id": pg_id,
        "process_group": (group, "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "train.py", "line": 3}],
        **more,
    }


def raw(version: str, entries: list[dict[str, Any]], ranks: str = "[0, 1, 2, 3]") -> dict[str, Any]:
    """A dump as that version writes it: 2.10 has both names of the library's version at times, 2.4 has no status."""
    whole: dict[str, Any] = {
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "entries": entries,
    }
    minor = int(version.partition(".")[2])
    whole["comm_lib_version" if minor == 10 else "nccl_version"] = "2.21.5"
    if minor >= 5:
        whole["pg_status"] = {"0": {"last_enqueued_collective": 7}}
    if minor < 6:
        for each in entries:
            each.pop("is_p2p")
    return whole


def dump(rank: int, *entries: dict[str, Any], version: str = "2.10", as_json: bool = False) -> Dump:
    whole = raw(version, list(entries))
    return read_dump(json.dumps(whole).encode() if as_json else pickle.dumps(whole), rank, f"rank {rank}")


def late(*dumps: Dump) -> list[int]:
    return [each.rank for each in late_ranks(dumps)]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_is_read_by_the_keys_that_are_there(version: str, as_json: bool) -> None:
    read = dump(2, entry(1), entry(2, "scheduled"), version=version, as_json=as_json)
    assert (read.rank, read.version) == (2, version)
    assert [(each.group, each.sequence, each.name, each.done) for each in read.operations] == [
        ("0", 1, "all_reduce", True),
        ("0", 2, "all_reduce", False),
    ]
    assert read.members == {"0": frozenset({0, 1, 2, 3})}


def test_pickle_that_names_code_is_refused(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(BadInputError, match=r"rank 1: not a .* it refers to posix.mkdir"):
        read_dump(pickle.dumps({"entries": [Bad()]}), 1, "rank 1")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}x",
        b"\x80\x05",
        pickle.dumps([1]),
        pickle.dumps({"entries": 3}),
        b"\x80\x04N.",
        b"{" * 9999,
    ],
)
def test_anything_else_is_one_clear_line(content: bytes) -> None:
    with pytest.raises(BadInputError, match="dump_3: not a Flight Recorder dump"):
        read_dump(content, 3, "dump_3")


def test_entries_of_other_kinds_are_left_out() -> None:
    read = dump(0, entry(1), {"state": "x"}, entry(2, is_p2p=True), entry(3, profiling_name="nccl:send 0->1"))
    assert [each.sequence for each in read.operations] == [1]


def test_rank_with_an_empty_buffer_is_late_where_others_wait() -> None:
    waiting = [dump(rank, entry(1, "started")) for rank in (0, 1, 3)]
    (told,) = late_ranks([*waiting, dump(2)])
    assert (told.rank, told.why) == (2, "it had called no collective while ranks 0, 1, 3 waited in one")
    assert late(dump(2), dump(0, entry(1))) == []  # nobody waits


def test_rank_whose_oldest_unfinished_collective_is_older_is_late() -> None:
    others = [dump(rank, entry(7, "scheduled"), entry(8, "scheduled")) for rank in (0, 1, 3)]
    (told,) = late_ranks([*others, dump(2, entry(5, "started"), entry(6, "scheduled"))])
    assert told.rank == 2
    assert told.why.startswith("its oldest unfinished collective in group '0' (default_pg) is number 5 (all_reduce)")


def test_one_rank_that_is_ahead_makes_nobody_late() -> None:
    assert late(dump(0, entry(7, "started")), dump(1, entry(7, "started")), dump(2, entry(8, "started"))) == []


def test_rank_that_waits_for_nothing_and_is_behind_is_late() -> None:
    others = [dump(rank, entry(7), entry(8, "started")) for rank in (0, 1, 3)]
    assert late(*others, dump(2, entry(7))) == [2]
    assert late(*others, dump(2, entry(7), entry(8))) == []  # it did come


def test_groups_are_joined_by_name_and_not_by_their_number_in_a_process() -> None:
    # Rank 1 made the groups in another order: its pg_id 0 is another group.
    first = dump(0, entry(9, "started", group="tp", pg_id=0), entry(4, "started", group="dp", pg_id=1))
    second = dump(1, entry(4, "started", group="dp", pg_id=0), entry(9, "started", group="tp", pg_id=1))
    assert late(first, second) == []


def test_point_to_point_says_nothing() -> None:
    assert late(dump(0, entry(9, "started", is_p2p=True)), dump(1, entry(4, "started", is_p2p=True))) == []
