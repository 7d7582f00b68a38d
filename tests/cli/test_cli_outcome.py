"""`healthd gate outcome` and `healthd fleet report` against a real aggregator with nodes that speak sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from checks.contract import Status
from tests.aggregator.parts import state
from tests.aggregator.service import free_port
from tests.cli.cli_gate_kit import SpeakingNode, World, aggregator, nodes
from tests.cli.cli_kit import healthd
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("outcome")
    with aggregator(folder) as world:
        states = [*map(state, ("n1", "n2", "n3", "n4")), state("bad", status=Status.FAIL)]
        speaking = [SpeakingNode(world.url, made, None) for made in states]
        assert all(node.heard.wait(20 * PATIENCE) for node in speaking)
        yield world
        for node in speaking:
            node.stop()


def test_a_job_tells_its_end_and_the_report_holds_it_against_the_gate(world: World) -> None:
    said = world.run("fleet", "report")
    assert said.code == 0
    assert "no gate was decided in the last 28 days" in said.out
    assert "stay in observe" in said.out
    assert world.gate("good", *nodes("n1"), "--attempt", "2", "--json").code == 0
    seen = world.gate("seen", *nodes("bad"), "--mode", "observe", "--json", wait="2s")
    assert (seen.code, seen.json["would"]) == (0, "reject")
    assert world.gate("stopped", *nodes("bad"), "--json", wait="2s").code == 75

    told = world.run("gate", "outcome", "--job", "good", "--attempt", "2", "infra", "--message", "NIC died", "--json")
    assert told.code == 0, told.err
    assert (told.json["job"], told.json["attempt"], told.json["status"]) == ("good", 2, "infra")
    cut = "\udcbc as the last bytes of a log may be"
    said = world.run("gate", "outcome", "ok", "--job", "seen", "--message", cut)
    assert said.out.startswith("job seen attempt 0 ended: ok"), said

    report = world.run("fleet", "report", "--days", "7", "--json").json
    assert (report["days"], report["jobs"], report["ended"]) == (7, 2, {"ok": 1, "infra": 1})
    assert (report["false_alarms"]["count"], report["false_alarms"]["of"]) == (1, 1)
    assert (report["misses"]["count"], report["misses"]["of"]) == (1, 1)
    assert [check["check"] for check in report["checks"]] == ["matmul"]
    shown = world.run("fleet", "report").out
    assert "2 jobs reported their end: 1 ok, 1 infra" in shown
    assert "1 of 1" in shown
    assert "20.7 to 100.0" in shown, "one job proves little, and the interval says so"
    assert "1 observed jobs have ended, below the 50 required" in shown
    assert "bad" in shown

    text = httpx.get(f"{world.url}/metrics", trust_env=False, verify=False).text
    assert 'healthd_job_outcomes_total{gate="admitted",outcome="infra"} 1.0' in text
    assert 'healthd_job_outcomes_total{gate="observed",outcome="ok"} 1.0' in text
    assert "healthd_gate_false_alarms_total 1.0" in text
    assert "healthd_gate_misses_total 1.0" in text


def test_options_of_the_gate_may_stand_before_the_command(world: World) -> None:
    world.gate("before", *nodes("n1"), "--min-nodes", "1", wait="2s")
    said = healthd(world.folder, "gate", "--aggregator", world.url, "--job", "before", "outcome", "failed")
    assert (said.code, said.err) == (0, "")


def test_an_end_that_nobody_asked_a_gate_for_is_1_and_named(world: World) -> None:
    said = world.run("gate", "outcome", "--job", "never", "ok")
    assert (said.code, said.out) == (1, "")
    assert "job never has no gate for attempt 0" in said.err


def test_usage_is_2_in_one_line(world: World) -> None:
    for arguments in (("--job", "j"), ("ok",), ("--job", "j", "great")):
        said = world.run("gate", "outcome", *arguments)
        assert (said.code, said.out) == (2, ""), arguments
        assert said.err.count("\n") == 1
    assert world.run("fleet", "report", "--days", "0").code != 0


def test_a_job_gives_its_nodes_back_and_an_admin_ends_the_lease_on_a_node(world: World) -> None:
    assert world.gate("given", *nodes("n3")).code == 0
    said = world.run("gate", "release", "--job", "given", "--attempt", "1")
    assert said.code == 1
    assert "no gate and no lease of job 'given' attempt 1" in said.err
    said = world.run("gate", "release", "--job", "given")
    assert (said.code, said.out) == (0, "job given attempt 0 returns n3\n")

    assert world.gate("stuck", *nodes("n4")).code == 0
    said = world.run("fleet", "release-lease", "n4")
    assert (said.code, said.out) == (0, "n4: the lease of job stuck attempt 0 is released\n")
    assert "released by loopback" in world.run("fleet", "history", "n4").out
    assert world.gate("next", *nodes("n3", "n4")).code == 0
    world.run("gate", "release", "--job", "next")


def test_an_aggregator_that_is_away_is_75_after_some_tries(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = healthd(tmp_path, "gate", "outcome", "--aggregator", url, "--job", "j", "ok")
    assert said.code == 75
    assert "cannot be reached" in said.err


def test_the_end_of_a_group_that_comes_together_anew_is_told_to_its_newest_gate(world: World) -> None:
    """A job of one name, started every week: people say attempt 0 each time, and the gates of the group count on."""
    counted = world.run("fleet", "report", "--json").json["ended"].get("failed", 0)
    for _ in range(2):
        weekly = world.run("gate", "--join", "weekly", "--size", "1", "--rank", "0", "--node", "n2", "--json")
        assert weekly.code == 0, weekly.err
        told = world.run("gate", "outcome", "failed", "--job", "weekly", "--json")
        assert (told.code, told.json["gate"]) == (0, weekly.json["id"]), told
    assert world.run("fleet", "report", "--json").json["ended"]["failed"] == counted + 2
