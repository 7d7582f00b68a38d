"""The pages of jobs that died, and the same on a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.postmortem.judge import Measured
from tests.aggregator.postmortems_kit import ECC, LOST, body, notes_of
from tests.cli.cli_kit import Said, end, start
from tests.ui.stage import Stage, stage

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, str]]:
    """A job of which n2 died of a device, and n1 of the peer that it lost; and n3 has not told."""
    with stage(tmp_path_factory.mktemp("jobs")) as found:
        found.say("n1", "n2", "n3")
        with found.http() as client:
            asked = {"job": f"train-{EVIL}", "attempt": 2, "nodes": ["n1", "n2", "n3"]}
            decision = client.post("/v1/gates", json=asked).json()
            gate = decision["id"]
            while decision["decision"] == "hold":
                found.say("n1", "n2", "n3")
                decision = client.get(f"/v1/gates/{gate}").json()
            assert decision["decision"] == "admit", decision
            passed = (Measured(node="x", tier="quick", status="pass"),)
            for node, text, at in (("n1", LOST, 2.0), ("n2", f"{EVIL}\n{ECC}", 0.0)):
                notes = dataclasses.replace(notes_of(text, at=1.7e9 + at), measured=passed)
                assert client.post(f"/v1/gates/{gate}/notes", json=body(node, notes)).status_code == 200
            while client.get(f"/v1/gates/{gate}/postmortem?wait=5").json()["postmortem"]["verdict"] is None:
                pass
        yield found, gate


def explain(found: Stage, folder: Path, *words: str) -> Said:
    return end(start(folder, "fleet", "explain", *words, "--aggregator", found.url))


def test_a_job_that_died_has_a_page_that_says_why_and_is_found_from_its_gate(died: tuple[Stage, str]) -> None:
    found, gate = died
    with found.http() as client:
        listed, page, of_gate = (client.get(path).text for path in ("/jobs", f"/jobs/{gate}", f"/gates/{gate}"))
        assert client.get("/jobs/none").status_code == 404
        assert client.get("/jobs?job=other").text.count(gate) == 0
    assert f'href="/jobs/{gate}"' in listed
    assert f'href="/jobs/{gate}"' in of_gate
    assert "suspected hardware" in page
    for words in ("uncorrectable ECC error encountered", "initiating", "No report from", "n2: quick tier pass"):
        assert words in page, words
    assert EVIL not in listed + page + of_gate
    assert page.count("<h1") == 1


def test_the_same_is_told_on_a_terminal_by_gate_and_by_job_and_attempt(died: tuple[Stage, str], tmp_path: Path) -> None:
    found, gate = died
    said = explain(found, tmp_path, gate)
    assert (said.code, said.err) == (0, "")
    assert "healthd: why it died: SUSPECTED HARDWARE" in said.out
    assert "no notes of: n3" in said.out
    by_job = explain(found, tmp_path, f"train-{EVIL}:2", "--json")
    record = json.loads(by_job.out)
    assert (record["id"], record["postmortem"]["postmortem"]["verdict"]["node"]) == (gate, "n2")
    assert explain(found, tmp_path, f"train-{EVIL}:1").code == 1
