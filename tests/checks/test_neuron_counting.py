"""Histories of counters and places of leaves, of any shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators.neuron.sysfs import HARDWARE_STATUSES, REQUIRED, parse_count, sort_leaves
from checks.host.machine import Host
from checks.system.neuron.neuron_counters import KINDS, WINDOW_SECONDS, next_history
from checks.worker.protocol import MAX_LINE_BYTES, encode

names = st.sampled_from(["neuron:0", "neuron:1"])
readings = st.dictionaries(names, st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9)), max_size=2)


@given(st.lists(st.tuples(readings, st.integers(1, 2), st.floats(0, 9000)), max_size=8))
def test_history_of_any_readings_is_bounded_and_never_negative(
    looks: list[tuple[dict[str, dict[str, int]], int, float]],
) -> None:
    data, total = None, 0
    for counts, inode, elapsed in looks:
        history = next_history(data, elapsed, counts, dict.fromkeys(counts, inode))
        total += sum(sum(row.values()) for row in counts.values())
        data = json.loads(json.dumps(history.as_data()))
        rises = [n for table in (history.rises, history.before) for row in table.values() for n in row.values()]
        assert all(0 < rise <= total for rise in rises)
        assert history.seconds < WINDOW_SECONDS
        assert all(history.recent_per_hour(target, name) >= 0 for target in counts for name in ("a", "b"))


def test_worst_evidence_fits_into_a_line_of_the_protocol() -> None:
    counts = {f"neuron:{index}": dict.fromkeys(KINDS, 10**9) for index in range(16)}
    inodes = dict.fromkeys(counts, 2**31)
    history = next_history(None, 0.0, {target: dict.fromkeys(KINDS, 0) for target in counts}, inodes)
    for elapsed, back in ((4000.0, False), (1.0, True), (1.0, False)):
        history = next_history(history.as_data(), elapsed, {} if back else counts, inodes)
        if back:
            inodes = dict.fromkeys(counts, 2**31 + 1)
            counts = {target: dict.fromkeys(KINDS, 10**9 + 1) for target in counts}
    line = encode({"kind": "evidence", "id": 1, "evidence": {"data": history.as_data()}})
    assert MAX_LINE_BYTES / 4 < len(line) < MAX_LINE_BYTES


def test_what_another_version_has_left_is_taken_as_far_as_it_is_known() -> None:
    counts = {"neuron:0": {"a": 3}}
    data = {**next_history(None, 0.0, counts, {"neuron:0": 1}).as_data(), "later": 1}
    del data["before"]
    history = next_history(data, 60.0, {"neuron:0": {"a": 5}}, {"neuron:0": 1})
    assert history.recent("neuron:0", "a") == 2
    assert next_history({}, 60.0, counts, {"neuron:0": 1}).counts == counts


@pytest.mark.parametrize(
    ("name", "rise"),
    [("timeout", 1), ("execute_completed_with_error", 1), ("hw_collectives_error", 1), ("mem_ecc_uncorrected", 0)],
)
def test_same_count_after_a_reload_is_new_unless_it_is_of_a_register(name: str, rise: int) -> None:
    counts = {"neuron:0": {name: 1}}
    first = next_history(None, 0.0, counts, {"neuron:0": 1})
    after = next_history(first.as_data(), 60.0, counts, {"neuron:0": 2})
    assert after.recent("neuron:0", name) == rise
    assert next_history(after.as_data(), 60.0, counts, {"neuron:0": 2}).recent("neuron:0", name) == rise


# --- parsers ----------------------------------------------------------------------------------------------------------


@given(st.text(max_size=40) | st.integers().map(str))
def test_count_is_a_number_from_zero_on_or_nothing(text: str) -> None:
    count = parse_count(text)
    assert count is None or count == int(text) >= 0


parts = st.sampled_from(
    [*REQUIRED, *HARDWARE_STATUSES, "stats", "status", "total", "present", "neuron_core0", "core7", "nc_1", "hw_x", "a"]
)


@given(st.lists(st.lists(parts, min_size=1, max_size=6).map("/".join), max_size=12))
def test_places_of_any_tree_are_of_known_names_and_never_twice(paths: list[str]) -> None:
    leaves = sort_leaves(sorted(paths, key=lambda path: path.count("/")))
    assert len({(leaf.name, leaf.core) for leaf in leaves}) == len(leaves)
    assert all(leaf.path in paths and not leaf.path.endswith("present") for leaf in leaves)
    assert all(leaf.name in REQUIRED if leaf.core is None else leaf.name.startswith("hw_") for leaf in leaves)


@pytest.mark.parametrize("path", ["", "/x"])
def test_tree_deeper_and_wider_than_the_bounds_is_left_unread(path: str, tmp_path: Path) -> None:
    place = tmp_path / "top"
    for _ in range(30):
        place /= "deep"
    place.mkdir(parents=True)
    (place / "mem_ecc_uncorrected").write_text("1")
    assert Host(tmp_path).walk(f"/top{path}", skip=(), max_depth=8, max_folders=100) == []
