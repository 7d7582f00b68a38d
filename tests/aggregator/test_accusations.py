"""Accusations of validations stand where people look first, although the nodes are healthy by their own checks."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from checks.contract import Status
from healthd.aggregator.gate.records import Decided, Gate
from healthd.aggregator.quarantine.accusations import Accusations
from healthd.aggregator.store.rows import PutGate
from healthd.aggregator.store.store import Store
from tests.aggregator.lab import Lab
from tests.cli.cli_kit import healthd
from tests.ui.stage import stage

NAMES = ("n1", "n2", "n3", "n4", "n5")
DAY = 86400.0


def decided(*, at: float, **faults: object) -> Gate:
    """A gate of five nodes whose collectives fail in that way, as it is kept."""
    lab = Lab(NAMES, **faults)  # type: ignore[arg-type]
    decision = lab.decide(lab.ask(nodes=NAMES))
    return dataclasses.replace(lab.last, progress=Decided(decision=dataclasses.replace(decision, decided_at=at)))


BAD = {"bad": {"n3": "corrupt"}}
CUT = {"cut": [frozenset({"n2", "n5"})]}


def accusations(now: float) -> Accusations:
    return Accusations(keep_seconds=DAY, clock=lambda: now)


def test_a_culprit_is_accused_until_it_passes_is_released_or_a_day_is_over() -> None:
    found = accusations(1000.0)
    found.gate_decided(decided(at=900.0, **BAD))
    (one,) = found.all()
    assert (one.node, one.code, one.at) == ("n3", "CollectiveFault", 900.0)
    found.gate_decided(decided(at=950.0))
    assert found.all() == (), "it has passed a later validation"
    found.gate_decided(decided(at=960.0, **BAD))
    assert found.of("n3") is not None
    found.clear("n3")
    assert found.of("n3") is None
    found.gate_decided(decided(at=1000.0 - DAY - 1, **BAD))
    assert found.of("n3") is None


def test_a_fault_between_two_nodes_is_shown_at_the_end_that_jobs_go_without() -> None:
    found = accusations(1000.0)
    found.gate_decided(decided(at=900.0, **CUT))
    (one,) = found.all()
    assert (one.node, one.code) == ("n5", "PathFault")
    assert "between n2 and n5" in one.message


def test_a_gate_without_a_validation_says_nothing_of_its_nodes() -> None:
    found = accusations(1000.0)
    found.gate_decided(decided(at=900.0, **BAD))
    alone = Lab(("n3",))
    alone.decide(alone.ask(nodes=("n3",)))
    found.gate_decided(alone.last)
    assert found.of("n3") is not None


def test_a_node_that_was_left_alone_has_passed_nothing() -> None:
    found = accusations(1000.0)
    found.gate_decided(decided(at=900.0, **BAD))
    lab = Lab(("n1", "n3"), bad={"n1": "silent"})
    decision = lab.decide(lab.ask(nodes=("n1", "n3"), min_nodes=1))
    assert [one.node for one in decision.nodes] == ["n3"]
    found.gate_decided(lab.last)
    assert found.of("n3") is not None


@pytest.mark.parametrize(("fault", "node", "words"), [(BAD, "n3", "CollectiveFault"), (CUT, "n5", "PathFault")])
def test_an_accusation_is_in_fleet_status_and_on_the_page_also_after_a_restart(
    tmp_path: Path, fault: dict[str, object], node: str, words: str
) -> None:
    gate = decided(at=time.time() - 60.0, **fault)
    (tmp_path / "state").mkdir(mode=0o700)
    store = Store.open(f"sqlite:///{tmp_path}/state/aggregator.db")
    asyncio.run(store.write([PutGate(gate=gate)]))
    store.close()
    with stage(tmp_path) as found, found.http() as client:
        found.say(*NAMES)
        answer = found.nodes[node].answer
        assert answer is not None
        told = answer.accused
        assert told is not None
        assert (told.code, told.status, gate.id in told.message) == (words, Status.WARN, True)
        found.say(node, accused=told)  # as its daemon does: it is no longer green anywhere
        said = healthd(tmp_path, "fleet", "status", "--aggregator", found.url, env={"COLUMNS": "200"})
        assert said.code == 0, said.err
        assert "4 healthy" in said.out
        assert "1 accused by validations" in said.out
        assert client.get(f"/v1/nodes/{node}").json()["health"] == "degraded"
        (row,) = (line for line in said.out.splitlines() if words in line)
        assert row.startswith(f"{node} ")
        assert gate.id in row
        for path in ("/", f"/nodes/{node}"):
            text = client.get(path).text
            assert words in text
            assert f'href="/gates/{gate.id}"' in text
        assert client.get("/v1/nodes/n1").json()["accused"] is None
        assert client.delete(f"/v1/nodes/{node}/quarantine").status_code == 200
        assert client.get(f"/v1/nodes/{node}").json()["accused"] is None
        assert client.get("/v1/fleet").json()["accused"] == 0
