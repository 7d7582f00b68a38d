"""Two versions of healthd side by side: nodes, hooks, aggregators, and a database that goes from one to the other."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from healthd.aggregator.store import Store
from healthd.core.errors import StoreError
from tests.aggregator.cluster import EXECUTED, Cluster, asked, release
from tests.aggregator.postgres import connected
from tests.aggregator.service import Service, readiness, until
from tests.aggregator.versions import WITH_SHARDS, former_tree, next_tree

pytestmark = pytest.mark.system

NODES = ("n1", "n2")


@dataclasses.dataclass
class Versions:
    """Today's code and another version's, each with a folder of its own."""

    today: Cluster
    other: Cluster

    def of(self, name: str) -> Cluster:
        return self.today if name == "today" else self.other


@contextlib.contextmanager
def side_by_side(folder: Path, tree: Path) -> Iterator[Versions]:
    for name in ("today", "other"):
        (folder / name).mkdir()
    with Cluster(folder / "today") as today, Cluster(folder / "other", tree=tree) as other:
        yield Versions(today, other)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return former_tree(tmp_path_factory.mktemp("former") / "tree")


@pytest.fixture
def versions(tmp_path: Path, former: Path) -> Iterator[Versions]:
    with side_by_side(tmp_path, former) as both:
        yield both


# --- the version before several aggregators ---------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("leader", ["today", "other"])
def test_nodes_and_hooks_of_both_versions_work_with_an_aggregator_of_either(
    versions: Versions, url: str, leader: str
) -> None:
    aggregator = versions.of(leader).aggregator("--database", url).start()
    versions.today.node("n1", aggregator=aggregator.url).start()
    versions.other.node("n2", aggregator=aggregator.url).start()
    versions.today.healthy("n1")
    versions.other.healthy("n2")
    for name in ("today", "other"):
        hook = versions.of(name)
        admitted = hook.gate(aggregator.url, f"by-{name}", *asked(NODES))
        assert admitted.code == 0, admitted.err + aggregator.said()
        assert {row["node"] for row in admitted.json["nodes"]} == set(NODES)
        named = ("--aggregator", aggregator.url)
        for command in ("status", "explain", "history"):
            of = {"status": (), "explain": (admitted.json["id"],), "history": ("n2",)}[command]
            shown = hook.healthd("fleet", command, *of, *named)
            assert shown.code == 0, shown.err
        released = hook.healthd("gate", "release", "--job", f"by-{name}", "--attempt", "0", *named)
        assert released.code == 0, released.err
    for broken, hook in ((versions.today, versions.other), (versions.other, versions.today)):
        broken.prove(0.5)
        rejected = hook.gate(aggregator.url, "none", *asked(NODES), "--max-age", "1s")
        assert rejected.code == 75, rejected.out + rejected.err
        assert "SlowDevice" in rejected.out
        broken.prove(1.0)


@pytest.mark.parametrize(
    ("url", "stopped"), [("sqlite", signal.SIGTERM), ("postgresql", signal.SIGKILL)], indirect=["url"]
)
def test_database_of_the_former_version_is_taken_over_while_a_gate_has_a_lease_and_another_one_waits(
    versions: Versions, url: str, stopped: int
) -> None:
    before = versions.other.aggregator("--database", url).start()
    for name in NODES:
        versions.other.node(name, aggregator=before.url).start(ready=False)
    versions.other.healthy(*NODES)
    admitted = versions.other.gate(before.url, "first", "--node", "n1")
    assert admitted.code == 0, admitted.err
    kept = ("fleet", "quarantine", "n2", "--reason", "link flaps", "--aggregator", before.url)
    assert versions.other.healthd(*kept).code == 0
    known = before.get(f"/v1/gates/{admitted.json['id']}").json()
    waits = versions.other.start("gate", "--aggregator", before.url, "--job", "next", "--node", "n1", "--wait", "120s")
    until(lambda: bool(before.get("/v1/gates?job=next").json()["gates"]))
    before.signal(stopped)
    before.ended()
    listen = before.command[before.command.index("--listen") + 1]
    after = versions.today.aggregator("--database", url, "--listen", listen).start()
    until(lambda: after.get("/v1/nodes/n1").json()["confirmed"], 40, after.said)
    found = after.get(f"/v1/gates/{admitted.json['id']}").json()
    assert {key: found.get(key) for key in known} == known
    shown = after.get("/v1/nodes/n1").json()
    assert [lease["lease"]["job"] for lease in shown["grants"]] == ["first"]
    assert after.get("/v1/nodes/n2").json()["quarantine"]["reason"] == "link flaps"
    assert waits.process.poll() is None, "the gate waits on"
    release(after.url, admitted.json["id"])
    said = waits.said(90)
    assert said.code == 0, said.err + after.said()
    back = versions.other.healthd("aggregator", "--database", url, "--listen", "127.0.0.1:0")
    assert back.code == 1, back.err


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_database_is_not_taken_from_a_former_version_that_runs(versions: Versions, url: str) -> None:
    before = versions.other.aggregator("--database", url).start()
    refused = versions.today.healthd("aggregator", "--database", url, "--listen", "127.0.0.1:0")
    assert refused.code == 1, refused.err
    assert "another program holds it; end that program" in refused.err
    assert before.get("/readyz").status_code == 200


# --- the last version with shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_database_of_the_version_with_shards_is_taken_over_once_that_has_ended_and_a_divided_one_is_refused(
    tmp_path: Path, url: str
) -> None:
    with side_by_side(tmp_path, former_tree(tmp_path / "tree", WITH_SHARDS)) as versions:
        today, former = versions.today, versions.other
        before = former.aggregator("--database", url, name="before").start()
        for cluster, name in ((former, "n1"), (today, "n2")):
            cluster.node(name, aggregator=before.url).start(ready=False)
        former.healthy("n1")
        today.healthy("n2")
        admitted = former.gate(before.url, "job", *asked(NODES))
        assert admitted.code == 0, admitted.err
        new = ("aggregator", "--database", url, "--listen", "127.0.0.1:0")
        refused = today.healthd(*new)
        assert refused.code == 1, refused.err
        assert before.url in refused.err, "it names the one that must be stopped"
        before.signal(signal.SIGTERM)
        assert before.ended() == 0
        divided = "import sys; from healthd.aggregator.store import Directory; Directory(sys.argv[1]).register('b')"
        subprocess.run([EXECUTED, "-P", "-c", divided, url], env=former.env, check=True, capture_output=True)
        until(lambda: "shards b, default" in today.healthd(*new).err, 30)
        removed = former.healthd("aggregator", "--database", url, "--remove-shard", "b")
        assert removed.code == 0, removed.err
        listen = before.command[before.command.index("--listen") + 1]
        after = today.aggregator("--database", url, "--listen", listen).start()
        until(lambda: after.get("/v1/nodes/n1").json().get("confirmed"), 40, after.said)
        assert [row["lease"]["job"] for row in after.get("/v1/nodes/n1").json()["grants"]] == ["job"]
        assert former.healthd(*new).code == 1


# --- the next version, one schema apart, on one database --------------------------------------------------------------


@pytest.fixture
def beside_next(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Versions]:
    with side_by_side(tmp_path, next_tree(tmp_path / "next", additive=request.param)) as both:
        yield both


def leads(service: Service) -> Callable[[], bool]:
    return lambda: readiness(service).startswith("leader")


def schema_of(url: str) -> int:
    with connected(url) as connection:
        return int(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())


@pytest.mark.nightly
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("beside_next", [True], indirect=True)
def test_two_versions_stand_in_for_each_other_where_the_next_schema_only_adds(beside_next: Versions, url: str) -> None:
    today, after = beside_next.today, beside_next.other
    first = today.aggregator("--database", url, name="first").start()
    third = today.aggregator("--database", url, name="third").start()
    made = schema_of(url)
    second = after.aggregator("--database", url, name="second").start()
    assert schema_of(url) == made + 1
    today.node("n1", "--aggregator", second.url, "--aggregator", third.url, aggregator=first.url).start()
    after.node("n2", "--aggregator", second.url, "--aggregator", third.url, aggregator=first.url).start()
    today.healthy("n1")
    after.healthy("n2")
    admitted = after.gate(second.url, "job", *asked(NODES))
    assert admitted.code == 0, admitted.err
    assert readiness(first).startswith("leader")
    third.kill()
    first.signal(signal.SIGTERM)
    until(leads(second), 10, second.said)
    assert first.ended() == 0
    first.start()  # of the older version, on the newer schema
    third.start()
    second.kill()
    until(lambda: leads(first)() or leads(third)(), 10, first.said)
    until(lambda: first.get("/v1/nodes/n2").json().get("confirmed"), 20, first.said)
    for service in (first, third):
        shown = service.get("/v1/nodes/n1").json()
        assert [lease["lease"]["job"] for lease in shown["grants"]] == ["job"]
    release(third.url, admitted.json["id"])
    again = today.gate(third.url, "again", "--node", "n1")
    assert again.code == 0, again.err + third.said()
    assert schema_of(url) == made + 1


@pytest.mark.nightly
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("beside_next", [False], indirect=True)
def test_schema_that_older_code_cannot_use_waits_until_its_aggregators_are_stopped(
    beside_next: Versions, url: str
) -> None:
    today, after = beside_next.today, beside_next.other
    first = today.aggregator("--database", url, name="first").start()
    made = schema_of(url)
    refused = after.healthd("aggregator", "--database", url, "--listen", "127.0.0.1:0")
    assert refused.code == 1, refused.err
    assert f"schema {made} to {made + 1}" in refused.err
    assert f"the older healthd of {first.url} cannot use; stop these aggregators, then start this one" in refused.err
    assert (schema_of(url), readiness(first).startswith("leader")) == (made, True)
    first.signal(signal.SIGSTOP)
    until(lambda: prepared(url, after), 20)
    first.signal(signal.SIGCONT)
    until(lambda: "it cannot take over: database" in first.said(), 20, first.said)
    assert "no longer leads" in first.said() or "leads now" in first.said()
    assert not leads(first)()
    with pytest.raises(StoreError, match="is from a newer healthd"):
        Store.prepare(url)
    second = after.aggregator("--database", url, name="second").start()
    until(leads(second), 10, second.said)
    again = today.healthd("aggregator", "--database", url, "--listen", "127.0.0.1:0")
    assert again.code == 1, again.err
    assert f"is from a newer healthd, or from a development version before 0.1.0 (schema {made + 1})" in again.err


def prepared(url: str, cluster: Cluster) -> bool:
    """Have the code of this cluster bring the schema up to date, as it does at a start; False where it refuses."""
    code = "import sys; from healthd.aggregator.store import Store; Store.prepare(sys.argv[1])"
    done = subprocess.run([EXECUTED, "-P", "-c", code, url], env=cluster.env, capture_output=True, text=True)
    assert done.returncode == 0 or "cannot use" in done.stderr, done.stderr
    return done.returncode == 0
