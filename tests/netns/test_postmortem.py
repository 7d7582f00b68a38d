"""Jobs that die of the network or of a node that stops, each node in a namespace: what the aggregator says of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aggregator.cluster import HEALTHD, release
from tests.aggregator.service import ROOT, until
from tests.netns.fleet import MARK, Fleet, marks
from tests.patience import PATIENCE
from tests.postmortem.parent_kit import end, read_until

pytestmark = marks
pytest.importorskip("torch", reason="the ranks need torch")

NAMES = ("n1", "n2", "n3")
RANK = str(Path(__file__).parents[1] / "postmortem/gloo_rank.py")
MASTER_PORT = "29611"
SECONDS = 60 * PATIENCE


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        made = Fleet(tmp_path_factory.mktemp("fleet"), len(NAMES))
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
        made.no_ranks()
    finally:
        made.close()


@contextlib.contextmanager
def job(fleet: Fleet, *, by_rank: bool) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """
    A job with a rank on each node, below `healthd run`, once all ranks are there: its gate, and parents by node.

    `by_rank`: the parents know that they have one rank below them, as with srun; else they stand for their whole node.
    """
    said = fleet.gate().said(300)
    assert said.code == 0, said.err
    gate: str = said.json["id"]
    place = {"MASTER_ADDR": fleet.nodes["n1"].address, "MASTER_PORT": MASTER_PORT, "WORLD_SIZE": str(len(NAMES))}
    own = {**os.environ, MARK: fleet.mark, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
    parents: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for rank, name in enumerate(NAMES):
            tell = ("--job", f"job-{fleet.jobs}", "--node", name, "--aggregator", fleet.aggregator.url)
            # Their daemons measure, by order: what a dead link is to them is what this is about.
            told = {**place, "RANK": str(rank)}
            inner = () if by_rank else ("env", *(f"{key}={value}" for key, value in told.items()))
            command = [*HEALTHD, "run", *tell, "--no-measure", "--", *inner, sys.executable, RANK, "outside"]
            parents[name] = subprocess.Popen(
                fleet.nodes[name].inside(*command),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=ROOT,
                env={**own, **(told if by_rank else {})},
            )
        for parent in parents.values():
            assert parent.stdout is not None
            read_until(parent.stdout.fileno(), b"is here\n")
        yield gate, parents
    finally:
        for parent in parents.values():
            end(parent)
            parent.communicate()
        release(fleet.aggregator.url, gate)  # nothing here sees the end of its ranks


def record(fleet: Fleet, gate: str) -> Any:
    """What the aggregator says of the end; None where nobody has told."""
    answer = fleet.aggregator.get(f"/v1/gates/{gate}/postmortem")
    return answer.json() if answer.status_code == 200 else None


def measured(fleet: Fleet, gate: str) -> Any:
    """The same once nodes were checked by order, and that has been judged."""
    until(
        lambda: (
            bool((found := record(fleet, gate)) and found["postmortem"]["by_order"])
            and record(fleet, gate)["postmortem"]["phase"] == "final"
        ),
        240,
        lambda: f"it was not measured: {record(fleet, gate)}",
    )
    return record(fleet, gate)


@pytest.mark.nightly
def test_the_node_behind_a_dead_link_is_named_by_measurement(fleet: Fleet) -> None:
    with job(fleet, by_rank=True) as (gate, parents), fleet.cut(["n3"], ["n1", "n2"]):
        assert all(parent.wait(SECONDS) != 0 for parent in parents.values())
        found = measured(fleet, gate)
    verdict = found["postmortem"]["verdict"]
    assert found["missing"] == [], found
    assert (verdict["kind"], verdict["node"]) == ("network", "n3"), verdict
    assert {line["place"] for line in verdict["evidence"]} == {"cascade"}, verdict
    fleet.healthy("n3")


def test_a_node_that_stopped_is_missing_and_none_of_the_others_is_accused(fleet: Fleet) -> None:
    with job(fleet, by_rank=False) as (gate, parents):
        stopped = fleet.nodes["n3"].pids()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert all(parents[name].wait(SECONDS) != 0 for name in ("n1", "n2"))
            found = measured(fleet, gate)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
    verdict = found["postmortem"]["verdict"]
    assert found["missing"] == ["n3"], found
    assert (verdict["kind"], verdict["node"], verdict["waited"]) == ("unknown", None, [0, 1]), verdict
    assert {each["node"]: each["status"] for each in found["postmortem"]["by_order"]} == {"n1": "pass", "n2": "pass"}
    fleet.healthy("n3")
