"""The ways with a stop-watch have lines to type, and these are still the pages'. Walking them is `make first-hour`."""

from __future__ import annotations

import re

import pytest

from tests.first_hour.ways import ROOT, WAYS, Way

VALUES = {"folder": "/tmp/x", "probe": "/opt/venv/bin/python"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_way_has_lines_of_its_page_and_ends_with_an_answer(way: Way) -> None:
    lines = list(way.lines(VALUES))
    assert any(re.match(r"healthd (gate|check|preflight|demo|fleet explain)\b", line) for line in lines[-2:])
    assert any("pip install ." in line for line in lines), "from nothing"
    assert not [line for line in lines if re.search(r"\{\w+\}", line)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_what_a_person_puts_in_the_place_of_an_example_is_on_the_page(way: Way) -> None:
    text = (ROOT / way.page).read_text(encoding="utf-8")
    assert [example for example in way.own if example not in text] == []
    with pytest.raises(LookupError):
        list(Way(name="x", page=way.page, sections=("No such section",), own={}).lines(VALUES))
