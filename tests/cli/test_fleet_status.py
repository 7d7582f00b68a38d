"""`healthd fleet status` of a fleet that is larger than what it shows."""

from __future__ import annotations

import pytest

import healthd.cli.fleet.status as status
from healthd.core import wire
from tests.core.test_client import answer, server
from tests.hooks.inside import run_inside


def test_nodes_that_are_not_listed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MOST_NODES", 2)
    row = {"node": "n1", "health": "healthy"}
    fleet, page = answer(wire.encode({"nodes": 9})), answer(wire.encode({"nodes": [row, row], "next": "n2"}))
    with server(fleet, page) as url:
        said = run_inside("fleet", "status", "--json", "--aggregator", url)
    assert (said.code, len(said.json["nodes"])) == (0, 2)
    assert said.err == "healthd: only the first 2 nodes by name are listed; --health and --pool list fewer\n"


def test_a_fleet_that_is_shown_whole_has_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MOST_NODES", 2)
    row = {"node": "n1", "health": "healthy"}
    fleet, page = answer(wire.encode({"nodes": 2})), answer(wire.encode({"nodes": [row, row], "next": None}))
    with server(fleet, page) as url:
        assert run_inside("fleet", "status", "--json", "--aggregator", url).err == ""
