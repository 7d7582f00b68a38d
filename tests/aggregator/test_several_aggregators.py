"""Several aggregators on one PostgreSQL, as processes: one leads, the others answer too, and one takes over."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.engine import Engine
from healthd.aggregator.identity.tokens import Scope
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import step_down
from tests.aggregator.cluster import Cluster, release
from tests.aggregator.postgres import connected
from tests.aggregator.proxy import Proxy, Rule
from tests.aggregator.secured import secure
from tests.aggregator.service import Service, readiness, until
from tests.node.node_kit import eventually
from tests.patience import PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.parametrize("url", ["postgresql"], indirect=True)]

TAKEOVER_SECONDS = 10.0
HANDOVER_SECONDS = 1.0


@dataclasses.dataclass
class Pair:
    """A leader, whose way to the database is `line`, one that stands by, and the node n1 that knows both."""

    cluster: Cluster
    line: Proxy
    leader: Service
    standby: Service

    def leads(self, service: Service) -> bool:
        return readiness(service).startswith("leader")

    def after_takeover(self, *, seconds: float = TAKEOVER_SECONDS) -> float:
        """Returns once the one that stood by leads; how long that took."""
        began = time.monotonic()
        until(lambda: self.leads(self.standby), seconds, self.standby.said)
        return time.monotonic() - began


@pytest.fixture
def pair(tmp_path: Path, url: str) -> Iterator[Pair]:
    _, _, server = url.partition("@")
    address, _, name = server.partition("/")
    with Proxy(f"tcp://{address}") as line, Cluster(tmp_path) as cluster:
        through = f"postgresql+psycopg://healthd@{line.url.rpartition('/')[2]}/{name}"
        leader = cluster.aggregator("--database", through, name="first").start()
        standby = cluster.aggregator("--database", url, name="second").start()
        cluster.node("n1", "--aggregator", standby.url, aggregator=leader.url).start()
        cluster.healthy("n1")
        yield Pair(cluster, line, leader, standby)


def gates_of(service: Service, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.get(f"/v1/gates?job={job}").json()["gates"]
    return found


def jobs_on_n1(service: Service) -> list[str]:
    return [lease["lease"]["job"] for lease in service.get("/v1/nodes/n1").json()["grants"]]


@pytest.mark.parametrize("fate", ["killed", "frozen", "cut from the database"])
def test_gate_that_a_standby_holds_goes_on_when_the_leader_is(pair: Pair, fate: str) -> None:
    cluster, leader, standby = pair.cluster, pair.leader, pair.standby
    first = cluster.gate(standby.url, "first", "--node", "n1")
    assert first.code == 0, first.err
    held = cluster.start("gate", "--aggregator", standby.url, "--job", "next", "--node", "n1", "--wait", "90s")
    until(lambda: bool(gates_of(standby, "next")))
    if fate == "killed":
        leader.kill()
    elif fate == "frozen":
        leader.signal(signal.SIGSTOP)
    else:
        pair.line.rule = Rule.CUT
    pair.after_takeover()
    assert held.process.poll() is None, "the gate must go on, held"
    if fate == "frozen":
        leader.signal(signal.SIGCONT)
    if fate != "killed":
        pair.line.rule = Rule.PASS
        until(lambda: readiness(leader) == f"standby (leader: {standby.url})\n", 20, leader.said)
    assert jobs_on_n1(standby) == ["first"]
    release(standby.url, first.json["id"])
    said = held.said(60)
    assert said.code == 0, said.err + standby.said()
    assert jobs_on_n1(standby) == ["next"]
    assert len(gates_of(standby, "next")) == 1


def test_leader_that_is_stopped_hands_over_in_under_a_second(pair: Pair) -> None:
    held = pair.cluster.start("gate", "--aggregator", pair.standby.url, "--job", "j", "--node", "n1", "--wait", "60s")
    pair.leader.signal(signal.SIGTERM)
    assert pair.after_takeover(seconds=HANDOVER_SECONDS) < HANDOVER_SECONDS * PATIENCE
    assert pair.leader.ended() == 0
    said = held.said()
    assert said.code == 0, said.err
    pair.leader.start()
    assert readiness(pair.leader) == f"standby (leader: {pair.standby.url})\n"


def test_leader_that_is_told_to_step_down_stands_by_and_answers_on(pair: Pair, url: str) -> None:
    said = pair.cluster.healthd("aggregator", "--database", url, "--step-down")
    assert said.code == 0, said.err
    assert f"at {pair.leader.url} no longer leads (term 1)" in said.out
    pair.after_takeover()
    until(lambda: readiness(pair.leader) == f"standby (leader: {pair.standby.url})\n", 5, pair.leader.said)
    admitted = pair.cluster.gate(pair.leader.url, "j", "--node", "n1")
    assert admitted.code == 0, admitted.err
    for service, leads in ((pair.leader, 0), (pair.standby, 1)):
        metrics = service.get("/metrics").text
        assert f"healthd_aggregator_leader {leads}.0" in metrics
        assert "healthd_aggregator_term 3.0" in metrics
        assert re.search(r"^healthd_aggregator_tasks [1-9]", metrics, re.MULTILINE)


async def test_who_leads_no_more_lets_go_of_what_it_knew(url: str) -> None:
    """Without the collector, which comes by now and then: until then each lost lead would cost the memory of one."""
    settings = AggregatorSettings(listen="127.0.0.1:0", database=url)
    gc.collect()
    gc.disable()
    try:
        async with aggregator(settings, Policy()):
            (engine,) = [weakref.ref(one) for one in gc.get_objects() if type(one) is Engine]
            gc.freeze()  # as the aggregator does with what is old
            await asyncio.to_thread(step_down, url)
            await eventually(lambda: engine() is None, seconds=20.0)
    finally:
        gc.enable()


def test_request_is_forwarded_once_and_its_errors_come_back_as_they_are(pair: Pair) -> None:
    twice = pair.standby.get("/v1/nodes", headers={"x-healthd-forwarded": "1"})
    assert (twice.status_code, twice.headers["content-type"]) == (503, "application/problem+json")
    for path in ("/v1/nodes/none", "/v1/nodes?limt=1", "/nothing", "/v1/gates?limit=1", "/"):
        here, there = pair.leader.get(path), pair.standby.get(path)
        assert there.status_code == here.status_code, path
        assert there.headers["content-type"] == here.headers["content-type"]
    assert "unknown query parameter 'limt'" in pair.standby.get("/v1/nodes?limt=1").text


def test_restarted_leader_finds_the_row_of_its_former_life_and_leads_at_once(pair: Pair) -> None:
    pair.standby.kill()
    pair.leader.kill()
    pair.leader.start()
    assert readiness(pair.leader).startswith("leader")


def test_over_tls_a_node_goes_to_the_leader_that_its_settings_do_not_list(tmp_path: Path, url: str) -> None:
    (tmp_path / "files").mkdir()
    files = secure(tmp_path / "files")
    with Cluster(tmp_path) as cluster:
        trust = ("--ca-file", str(files.folder / "ca.pem"))
        leader, standby = (
            cluster.aggregator("--database", url, *files.aggregator, *trust, name=name).start()
            for name in ("first", "second")
        )
        cluster.node("n1", *files.client(Scope.SYNC), aggregator=standby.url).start()
        cluster.healthy("n1")
        with files.http(Scope.READ) as reader:
            until(lambda: reader.get(f"{standby.url}/v1/nodes/n1").status_code == 200, 20, standby.said)
        assert leader.url in cluster.services["n1"].said()
        with httpx.Client(verify=trust_in(files.folder), trust_env=False) as stranger:
            wrong = stranger.get(f"{standby.url}/v1/nodes", headers={"authorization": "Bearer nobody-knows-this-one"})
            assert (wrong.status_code, "token is unknown" in wrong.text) == (401, True)
            assert stranger.get(f"{standby.url}/v1/nodes").status_code == 401
        with files.http(Scope.SYNC) as node:
            assert node.get(f"{standby.url}/v1/nodes").status_code == 403
        with connected(url) as connection:
            connection.exec_driver_sql("UPDATE leadership SET url = 'http://127.0.0.1:9'")
        with files.http(Scope.READ) as reader:
            until(lambda: "is plain HTTP" in reader.get(f"{standby.url}/v1/nodes").text, 10, standby.said)


def trust_in(folder: Path) -> Any:
    import ssl

    return ssl.create_default_context(cafile=str(folder / "ca.pem"))


def test_hook_and_commands_that_know_both_go_on_with_the_other_one(pair: Pair) -> None:
    both = ("--aggregator", pair.leader.url, "--aggregator", pair.standby.url)
    first = pair.cluster.gate(pair.leader.url, "first", "--node", "n1")
    assert first.code == 0, first.err
    hook = pair.cluster.start("gate", *both, "--job", "second", "--node", "n1", "--wait", "90s")
    until(lambda: bool(gates_of(pair.leader, "second")), 15, pair.leader.said)
    pair.leader.kill()
    pair.after_takeover()
    shown = pair.cluster.healthd("fleet", "status", "--aggregator", f"{pair.leader.url},{pair.standby.url}")
    assert shown.code == 0, shown.err
    release(pair.standby.url, first.json["id"])
    said = hook.said(60)
    assert said.code == 0, said.err
    pair.standby.kill()
    nobody = pair.cluster.healthd("fleet", "status", *both)
    assert nobody.code == 1
    (line,) = nobody.err.splitlines()
    assert line.startswith("healthd: none of 2 aggregators responds: ")
    assert pair.leader.url in line
    assert pair.standby.url in line


def test_release_and_hook_go_on_with_the_next_aggregator_when_the_first_one_freezes(pair: Pair) -> None:
    both = ("--aggregator", pair.leader.url, "--aggregator", pair.standby.url)
    first = pair.cluster.gate(pair.leader.url, "first", "--node", "n1")
    assert first.code == 0, first.err
    hook = pair.cluster.start("gate", *both, "--job", "second", "--node", "n1", "--wait", "90s")
    until(lambda: bool(gates_of(pair.leader, "second")), 15, pair.leader.said)
    pair.leader.signal(signal.SIGSTOP)
    try:
        given = pair.cluster.healthd("gate", "release", *both, "--job", "first", "--json")
        assert given.code == 0, given.err
        again = pair.cluster.healthd("gate", "release", *both, "--job", "first", "--json")
        assert again.code == 0, again.err
        assert again.json["released_at"] == given.json["released_at"]
        said = hook.said(60)
        assert said.code == 0, said.err
        assert f"aggregator {pair.leader.url} does not respond" in said.err
        assert f"aggregator {pair.standby.url}" not in said.err
    finally:
        pair.leader.signal(signal.SIGCONT)
