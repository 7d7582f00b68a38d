"""What a worker says is read strictly, and whatever is read can be written again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Evidence, Finding, Missing
from checks.worker.protocol import ProtocolError, decode, to_finding, to_record
from healthd.core import wire
from tests.every import every

FINDING = {
    "status": "pass",
    "reason": None,
    "message": "well",
    "target": "cpu:0",
    "measurements": [{"name": "m", "value": 1.0, "lower": None, "upper": 2, "origin": "config", "labels": {"a": "b"}}],
}
HALF = "caf\udce9"


def line(kind: str, plain: Any) -> bytes:
    return json.dumps({"kind": kind, "id": 1, kind: plain}).encode()


@every("value", ["1e999", "-1e999", "null", "true", '"1"', "[]", "1" + 400 * "0", "NaN", "Infinity"])
def test_a_pass_on_what_is_no_finite_number_is_garbage(value: str) -> None:
    raw = line("finding", FINDING).replace(b"1.0", value.encode())
    with pytest.raises(ProtocolError):
        to_finding(decode(raw)["finding"])


@pytest.mark.parametrize("order", ["1.5", "true", '"1"'])
def test_a_place_in_an_order_is_a_whole_number(order: str) -> None:
    known = {"target": "cpu:0", "reason": "Timeout", "message": "m", "progress": [], "order": 7, "action": None}
    raw = line("missing", known)
    assert to_record(Missing, decode(raw)["missing"]).order == 7
    with pytest.raises(ProtocolError):
        to_record(Missing, decode(raw.replace(b"7", order.encode()))["missing"])


@every("place", ["target", "reason", "name", "origin", "label", "value of a label", "evidence"])
def test_half_a_character_anywhere_in_it_can_be_written_and_synced_all_the_same(place: str) -> None:
    plain = json.loads(json.dumps(FINDING))
    (measured,) = plain["measurements"]
    if place in plain:
        plain[place] = HALF
    elif place in measured:
        measured[place] = HALF
    elif place == "label":
        measured["labels"] = {HALF: "b"}
    else:
        measured["labels"] = {"a": HALF}
    if place == "evidence":
        plain_evidence = {"target": HALF, "key": "k", "data": {HALF: [HALF]}}
        read: Any = to_record(Evidence, decode(line("evidence", plain_evidence))["evidence"])
    else:
        read = to_finding(decode(line("finding", plain))["finding"])
    assert "caf?" in repr(read)
    assert wire.encode(read)


TEXTS = st.text(st.characters(exclude_categories=()), max_size=5)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@given(ANYTHING, st.sampled_from([*FINDING]))
def test_whatever_stands_in_a_finding_is_a_finding_that_can_be_written_or_garbage(value: Any, name: str) -> None:
    raw = json.dumps({"kind": "finding", "id": 1, "finding": {**FINDING, name: value}}).encode()
    try:
        read = to_finding(decode(raw)["finding"])
    except ProtocolError:
        return
    assert isinstance(read, Finding)
    assert wire.encode(read)
