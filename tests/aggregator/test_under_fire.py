"""Processes that are killed, frozen and stopped, disks that are full or gone: what was answered stays true."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.aggregator.cluster import Cluster, ask, asked, mounted, release
from tests.aggregator.service import Service, until
from tests.patience import PATIENCE
from tests.profile import some

needs_root = pytest.mark.system(root=True)  # mounts a file system


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as one:
        yield one


def admitted(aggregator: Service, job: str) -> list[str]:
    """The gates of a job that were admitted."""
    gates = aggregator.get(f"/v1/gates?job={job}").json()["gates"]
    return [gate["id"] for gate in gates if gate["decision"] == "admit"]


def leases_of(node: Service) -> list[str]:
    return [lease["job"] for lease in node.get("/v1/node").json()["leases"]]


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def test_aggregator_killed_in_the_middle_of_a_held_gate_answers_it_after_the_restart_once(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", "n2")
    first = ask(aggregator.url, "first", ["n1"], wait=10)
    hook = cluster.start(
        *("gate", "--aggregator", aggregator.url, "--job", "held", *asked(("n1", "n2")), "--wait", "30s", "--json")
    )
    until(lambda: len(aggregator.get("/v1/gates?job=held").json()["gates"]) == 1)
    (held,) = aggregator.get("/v1/gates?job=held").json()["gates"]
    assert held["decision"] == "hold"
    aggregator.kill()
    aggregator.start()
    release(aggregator.url, first["id"])
    said = hook.said()
    assert said.code == 0, said
    assert said.json["id"] == held["id"]
    assert admitted(aggregator, "held") == [held["id"]]


@pytest.mark.thorough
def test_what_was_admitted_is_still_admitted_after_everything_was_killed(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", "n2")
    node = cluster.services["n1"]
    decision = ask(aggregator.url, "train", ["n1", "n2"], wait=10)
    aggregator.kill()
    node.kill()
    assert decision["decision"] == "admit"
    aggregator.start()
    assert aggregator.get(f"/v1/gates/{decision['id']}").json() == decision
    other = ask(aggregator.url, "other", ["n1", "n2"], wait=1)
    assert other["decision"] == "hold"
    assert "job train" in other["reasons"][0]["message"]
    node.start()
    assert leases_of(node) == ["train"]
    until(lambda: aggregator.get("/v1/nodes/n1").json()["health"] == "healthy")
    assert ask(aggregator.url, "other", ["n1", "n2"], wait=0.5)["decision"] == "hold"
    release(aggregator.url, decision["id"])
    assert ask(aggregator.url, "other", ["n1", "n2"], wait=10)["decision"] == "admit"


class Killer(threading.Thread):
    """
    Kills one of some services at random moments and starts it again, until told to stop.

    The `calm` between two kills is a factor: what is killed must be able to start now and then, also on a slow machine.
    """

    def __init__(self, services: list[Service], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.services, self.chance = services, chance
        self.over = threading.Event()
        self.calm = 1.0
        self.kills = 0

    def run(self) -> None:
        while not self.over.wait(self.chance.uniform(0.2, 1.5) * self.calm):
            service = self.chance.choice(self.services)
            service.kill()
            self.kills += 1
            self.over.wait(self.chance.uniform(0.0, 0.3))
            service.start(ready=False)


@pytest.mark.thorough
def test_processes_killed_at_random_moments_never_share_a_node_between_two_jobs(cluster: Cluster) -> None:
    """Seen from outside: every answer stays true, and no node is in two admissions that were not given back."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    names = ("n1", "n2", "n3")
    aggregator = cluster.fleet(*names)
    killer = Killer(list(cluster.services.values()), random.Random(seed))
    killer.start()
    answered: dict[str, dict[str, object]] = {}
    held: dict[str, set[str]] = {}
    try:
        start = time.monotonic()
        jobs = (f"job-{number}" for number in itertools.count())
        job, nodes = next(jobs), list(names[:1])
        while len(answered) < 4 or killer.kills < 8:
            lasted = time.monotonic() - start
            assert lasted < 60 * PATIENCE, f"seed {seed}: {killer.kills} kills, {len(answered)} admissions"
            if not answered:
                killer.calm = max(1.0, lasted / 14)
            decision = {}
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                decision = ask(aggregator.url, job, nodes, wait=1.0, wait_seconds=30.0)
            if decision.get("decision") in ("admit", "reject"):  # else the same gate is asked again: none is forgotten
                job, nodes = next(jobs), chance.sample(names, chance.choice((1, 2)))
            if decision.get("decision") == "admit":
                taken = {node["node"] for node in decision["nodes"]}
                for gate, theirs in held.items():
                    assert not taken & theirs, f"seed {seed}: {decision['id']} and {gate} share {taken & theirs}"
                answered[decision["id"]] = decision
                held[decision["id"]] = taken
            if len(held) > 1 or (held and decision.get("decision") != "admit"):
                gate = chance.choice(list(held))
                with contextlib.suppress(httpx.HTTPError, AssertionError):
                    release(aggregator.url, gate)
                    del held[gate]  # only once it is known to be given back
    finally:
        killer.over.set()
        killer.join(20)
    until(lambda: _answers(aggregator))
    for gate, decision in answered.items():
        assert aggregator.get(f"/v1/gates/{gate}").json() == decision, f"seed {seed}"


def _answers(service: Service) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return service.get("/livez").status_code == 200
    return False


# --- SIGSTOP and SIGTERM ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_frozen_node_is_excluded_as_silent_and_comes_back_with_ages_that_tell_the_truth(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", "n2")
    node = cluster.services["n1"]
    node.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    said = cluster.gate(aggregator.url, "train", *asked(("n1", "n2")), "--min-nodes", "1")
    assert said.code == 0
    assert [node["node"] for node in said.json["nodes"]] == ["n2"]
    assert said.json["excluded"][0]["reasons"][0]["code"] == "Silent"
    node.signal(signal.SIGCONT)
    pause = time.monotonic() - frozen
    until(lambda: aggregator.get("/v1/nodes/n1").json()["health"] == "healthy")
    again = ask(aggregator.url, "again", ["n1"], wait=10)
    assert again["decision"] == "admit", again
    assert again["nodes"][0]["evidence_age_seconds"] > pause


@pytest.mark.thorough
def test_frozen_aggregator_answers_the_hook_when_it_goes_on(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1")
    aggregator.signal(signal.SIGSTOP)
    hook = cluster.start("gate", "--aggregator", aggregator.url, "--job", "train", "--node", "n1", "--wait", "30s")
    time.sleep(3)
    assert hook.process.poll() is None
    aggregator.signal(signal.SIGCONT)
    assert hook.said().code == 0
    assert len(admitted(aggregator, "train")) == 1


@pytest.mark.thorough
def test_stopped_aggregator_lets_its_hooks_go_on_waiting_for_the_next(cluster: Cluster) -> None:
    """SIGTERM: exit 0 at once, held requests are answered, and nothing of the gate is lost."""
    aggregator = cluster.fleet("n1")
    first = ask(aggregator.url, "first", ["n1"], wait=10)
    hook = cluster.start("gate", "--aggregator", aggregator.url, "--job", "next", "--node", "n1", "--wait", "40s")
    until(lambda: len(aggregator.get("/v1/gates?job=next").json()["gates"]) == 1)
    began = time.monotonic()
    aggregator.signal(signal.SIGTERM)
    assert aggregator.ended() == 0
    assert time.monotonic() - began < 4 * PATIENCE
    aggregator.start()
    release(aggregator.url, first["id"])
    assert hook.said().code == 0


# --- the place to write -----------------------------------------------------------------------------------------------


def refuses(service: Service, code: int) -> str:
    """A service that cannot start says so in one line; the line."""
    service.start(ready=False)
    assert service.ended(15) == code, service.said()
    # How many files may be open is a matter of the machine that the test runs on.
    lines = [line for line in service.said().splitlines() if "open files are allowed" not in line]
    assert len(lines) == 1, service.said()
    return lines[0].removeprefix("healthd: ")


def test_database_that_is_damaged_or_newer_is_refused_in_one_line(cluster: Cluster) -> None:
    aggregator = cluster.aggregator().start()
    aggregator.signal(signal.SIGTERM)
    assert aggregator.ended() == 0
    database = cluster.folder / "aggregator" / "aggregator.db"
    good = database.read_bytes()
    for bad in (os.urandom(4096), good[: len(good) // 2 + 100], good[:4096] + os.urandom(8192) + good[12288:]):
        for beside in database.parent.glob("aggregator.db-*"):
            beside.unlink()
        database.write_bytes(bad)
        aggregator.log.unlink()
        assert re.search(r"aggregator\.db.*restore a backup, or move the file away", refuses(aggregator, 1))
        assert database.read_bytes() == bad, "evidence was destroyed"
    database.write_bytes(good)
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("UPDATE meta SET value = '9999' WHERE key = 'schema_readable_by'")
    aggregator.log.unlink()
    assert "(schema 9999); upgrade healthd, or use another database" in refuses(aggregator, 1)


@needs_root
def test_state_directory_that_cannot_be_written_is_one_line(cluster: Cluster) -> None:
    with mounted("tmpfs", cluster.folder / "fixed", "ro") as place:
        for service in (cluster.aggregator(state=place / "a"), cluster.node("n1", "--state-dir", str(place / "n"))):
            line = refuses(service, 1)
            assert "Read-only file system" in line
            assert "--state-dir" in line


def test_port_in_use_is_one_line(cluster: Cluster) -> None:
    aggregator = cluster.aggregator().start()
    taken = aggregator.url.removeprefix("http://")
    for service in (cluster.aggregator("--listen", taken, name="second"), cluster.node("n1", "--listen", taken)):
        assert f"cannot listen on {taken}: Address already in use; another program has the port" in refuses(service, 1)


@needs_root
def test_full_disk_is_503_and_never_a_guess_and_goes_on_once_there_is_space(cluster: Cluster) -> None:
    with mounted("tmpfs", cluster.folder / "small", "size=8m") as place:
        aggregator = cluster.aggregator(state=place).start()
        cluster.node("n1", aggregator=aggregator.url).start()
        cluster.healthy("n1")
        ballast = place / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        answer = httpx.post(
            f"{aggregator.url}/v1/gates", json={"job": "train", "nodes": ["n1"]}, trust_env=False, timeout=15
        )
        assert answer.status_code == 503, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert "free some space" in answer.json()["detail"]
        said = cluster.gate(aggregator.url, "train", "--node", "n1", wait="1s")
        assert said.code == 75
        assert "free some space" in said.line
        assert aggregator.get("/livez").status_code == 200
        ballast.unlink()
        assert cluster.gate(aggregator.url, "train", "--node", "n1").code == 0
        aggregator.signal(signal.SIGTERM)
        assert aggregator.ended() == 0


@pytest.mark.thorough
def test_lost_database_admits_nothing_until_a_person_says_so_and_never_a_leased_node(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", "n2")
    assert ask(aggregator.url, "train", ["n1"], wait=10)["decision"] == "admit"
    for file in (cluster.folder / "aggregator").glob("aggregator.db*"):
        file.unlink()
    # SQLite itself would go on writing into the deleted file, and answer what no restart knows of.
    question = {"job": "next", "nodes": ["n2"]}
    answer = httpx.post(f"{aggregator.url}/v1/gates", json=question, trust_env=False, verify=False, timeout=60)
    assert answer.status_code == 503
    assert "was deleted or replaced while in use" in answer.json()["detail"]
    aggregator.kill()
    aggregator.start()
    # It takes two witnesses; until they are heard a node is admitted by what it says of itself.
    until(lambda: [node["health"] for node in aggregator.get("/v1/nodes").json()["nodes"]] == ["healthy", "healthy"])
    held = ask(aggregator.url, "next", ["n2"], wait=2)
    assert held["decision"] == "hold"
    assert "healthd fleet recover" in str(held["reasons"])
    assert leases_of(cluster.services["n1"]) == ["train"]
    assert cluster.healthd("fleet", "recover", "--aggregator", aggregator.url).code == 0
    assert ask(aggregator.url, "next", ["n2"], wait=10)["decision"] == "admit"
    taken = ask(aggregator.url, "thief", ["n1"], wait=1)
    assert taken["decision"] == "hold"
    assert "job train" in taken["reasons"][0]["message"]


@pytest.mark.parametrize("suffix", some(["-wal", "-shm"], 2))
def test_journal_of_the_database_that_was_removed_is_noticed_and_loses_nothing(cluster: Cluster, suffix: str) -> None:
    """The removal stops all writing within seconds; what was committed before is there after kill -9."""
    aggregator = cluster.fleet("n1", "n2")
    given = ask(aggregator.url, "train", ["n1"], wait=10)
    assert given["decision"] == "admit"
    (cluster.folder / "aggregator" / f"aggregator.db{suffix}").unlink()
    until(lambda: aggregator.get("/readyz").status_code == 503)  # nobody asks anything meanwhile
    told = f"its file aggregator.db{suffix} was deleted or replaced while in use"
    assert told in aggregator.get("/readyz?verbose").text
    question = {"job": "next", "nodes": ["n2"]}
    answer = httpx.post(f"{aggregator.url}/v1/gates", json=question, trust_env=False, verify=False, timeout=60)
    assert (answer.status_code, told in answer.json()["detail"]) == (503, True)
    assert told in aggregator.said()
    aggregator.kill()
    aggregator.start()
    assert aggregator.get(f"/v1/gates/{given['id']}").json() == given
    until(lambda: ask(aggregator.url, "thief", ["n1"], wait=1)["decision"] == "hold")
    assert ask(aggregator.url, "next", ["n2"], wait=10)["decision"] == "admit"


def test_two_daemons_of_one_name_are_both_kept_out_by_name(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", "n2")
    double = cluster.node("double", aggregator=aggregator.url, called="n1").start()
    until(lambda: "DuplicateNode" in double.said() or "409" in double.said())
    said = cluster.gate(aggregator.url, "train", *asked(("n1", "n2")))
    assert said.code == 75
    assert said.json["excluded"][0]["reasons"][0]["code"] == "DuplicateNode"
    double.signal(signal.SIGTERM)
    assert double.ended() == 0
