"""`--on-unreachable local`: a node's own verdict, when the aggregator is away, is all that its daemon knows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from checks.contract import Status
from healthd.core.model import Quarantine
from healthd.node.http.health import Question, readiness
from healthd.node.occupancy.model import Reading, Scheduled, Workload
from healthd.node.settings import SyncSettings
from healthd.node.state.saving import StateFile
from healthd.node.state.store import NodeStore
from tests.cli.cli_kit import Said
from tests.hooks.inside import daemon_port, run_inside
from tests.hooks.local_verdict_kit import fit
from tests.hooks.preflight_kit import free_port
from tests.node.node_kit import MovedClock, finding, lease, result, survey

QUARANTINE = Quarantine(reason="new cable", owner="ann", owner_kind="person", since=0.0, until=None)


def asked(folder: Path, book: NodeStore, *arguments: str) -> Said:
    """What a hook comes to whose aggregator is away and whose node's daemon has this book."""
    with daemon_port(book) as url:
        file = folder / "hook.toml"
        file.write_text(f'[gate]\nlocal_url = "{url}"\n')
        away = ("--aggregator", f"http://127.0.0.1:{free_port()}", "--wait", "1ms", "--on-unreachable", "local")
        return run_inside("gate", *arguments, *away, "--config", str(file))


def alone(*more: str) -> tuple[str, ...]:
    return ("--job", "j", "--node", "n1", *more)


@pytest.mark.parametrize(
    "arguments",
    [
        alone(),
        ("--job", "j", "--node", "ip-10-0-0-1"),
        ("--job", "j", "--node", "n1.example.com"),
        ("--join", "g", "--size", "1", "--rank", "0", "--node", "n1"),
    ],
)
def test_fit_node_that_nobody_has_is_admitted_by_its_own_word(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    said = asked(tmp_path, fit(tmp_path), *arguments)
    assert said.code == 0, said.err
    assert "reports that it is ready" in said.err


def leased(book: NodeStore) -> None:
    book.set_leases(((lease(job="other"), 1000.0),))


def quarantine_unknown(book: NodeStore) -> None:
    book.settings = dataclasses.replace(book.settings, sync=SyncSettings(aggregators=("http://head:8090",)))


UNFIT: dict[str, tuple[Callable[[NodeStore], None], str]] = {
    "leased to another job": (leased, "taken by job other attempt 0"),
    "quarantined by a person": (lambda book: book.set_quarantine(QUARANTINE), "ann: new cable"),
    "quarantine was never told": (
        quarantine_unknown,
        "no aggregator has reported yet whether this node is quar",
    ),
    "devices are held": (lambda book: book.set_survey(survey(("python (pid 7)",))), "taken by python (pid 7)"),
    "holders cannot be seen": (lambda book: book.set_survey(survey(None)), "holders of the devices cannot be seen"),
    "leases may be missing": (lambda book: book.set_doubt("the file of the leases was damaged"), "damaged"),
    "a check fails": (lambda book: book.record(result("load", finding(Status.FAIL))), "it is fail"),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("joined", [False, True], ids=["gate", "join"])
def test_node_that_is_not_fit_is_not_admitted(tmp_path: Path, what: str, joined: bool) -> None:
    book = fit(tmp_path)
    spoil, why = UNFIT[what]
    spoil(book)
    who = ("--join", "g", "--size", "1", "--rank", "0", "--node", "n1") if joined else alone()
    said = asked(tmp_path, book, *who)
    assert said.code == 75, said
    assert why in said.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--job", "j", "--node", "n2"), "this is n1, not n2"),
        (("--job", "j", "--node", "n2.example.com"), "this is n1, not n2.example.com"),
        (alone("--node", "n2"), "2 nodes were requested"),
        (alone("--node", "n2", "--min-nodes", "1"), "2 nodes were requested"),
        (("--job", "j", "--pool", "p", "--count", "1"), "nodes of pool p were requested"),
        (("--join", "g", "--size", "2", "--rank", "0", "--node", "n1"), "group g has 2 members"),
        (("--join", "g", "--size", "1", "--rank", "0", "--node", "n2"), "this is n1, not n2"),
    ],
)
def test_daemon_speaks_for_its_own_node_alone(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    said = asked(tmp_path, fit(tmp_path), *arguments)
    assert said.code == 75, said
    assert why in said.err


def test_evidence_must_be_as_fresh_and_as_deep_as_the_gate_asks(tmp_path: Path) -> None:
    time = MovedClock()
    book = fit(tmp_path, time)
    time.move(60.0)
    assert asked(tmp_path, book, *alone("--max-age", "2m")).code == 0
    old = asked(tmp_path, book, *alone("--max-age", "30s"))
    assert (old.code, "at most 30 s is allowed" in old.err) == (75, True), old
    deep = asked(tmp_path, book, *alone("--tier", "deep"))
    assert (deep.code, "deep is required" in deep.err or "has not run yet" in deep.err) == (75, True), deep


def test_own_job_in_the_hosts_scheduler_is_no_obstacle_and_another_one_is(tmp_path: Path) -> None:
    book = fit(tmp_path)
    reading = Reading(scheduler="slurm", workloads=(Workload(name="slurm:7"),))
    book.set_scheduled(Scheduled(readings=(reading,), read_at=1000.0))
    assert asked(tmp_path, book, *alone("--workload", "slurm:7")).code == 0
    other = asked(tmp_path, book, *alone("--workload", "slurm:8"))
    assert (other.code, "taken by slurm:7" in other.err) == (75, True), other


def test_admitted_without_an_aggregator_the_host_file_is_written_all_the_same(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    assert asked(tmp_path, fit(tmp_path), *alone("--hostfile-out", str(hosts))).code == 0
    assert hosts.read_text() == "n1\n"
    away = ("--aggregator", f"http://127.0.0.1:{free_port()}", "--wait", "0s", "--on-unreachable", "admit")
    assert run_inside("gate", "--job", "j", "--node", "a", "--node", "b", "--hostfile-out", str(hosts), *away).code == 0
    assert hosts.read_text() == "a\nb\n"
    pool = run_inside("gate", "--job", "j", "--pool", "p", "--count", "2", "--hostfile-out", str(hosts), *away)
    assert (pool.code, "the nodes are unknown" in pool.err) == (75, True), pool


def test_who_does_not_rely_on_the_nodes_word_alone_is_not_refused_for_what_it_was_never_told(tmp_path: Path) -> None:
    """A hook of the scheduler must not drain a fleet because the aggregator is away."""
    book = fit(tmp_path)
    quarantine_unknown(book)
    for question in (Question(), Question(excluded=frozenset({"allocated"}))):
        assert readiness(book.snapshot(), question, quarantine_unknown=book.quarantine_unknown)["quarantine"] == ""
    named = readiness(book.snapshot(), Question(node="n1"), quarantine_unknown=book.quarantine_unknown)
    assert named["quarantine"] == book.quarantine_unknown
    book.set_quarantine(QUARANTINE)
    assert readiness(book.snapshot(), Question())["quarantine"] == "ann: new cable"


def test_what_an_aggregator_said_of_quarantines_is_known_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    sync = SyncSettings(aggregators=("http://head:8090",))
    first = fit(tmp_path, sync=sync)
    assert first.quarantine_unknown
    first.set_quarantine(None)
    StateFile(first, file).save()
    again = fit(tmp_path, sync=sync)
    assert again.quarantine_unknown
    StateFile(again, file).restore()
    assert not again.quarantine_unknown
