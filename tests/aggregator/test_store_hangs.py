"""A database that hangs or cannot be written: everybody is answered in time, `/readyz` says so, the aggregator ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.database import UnsureError
from healthd.aggregator.store.rows import PutMeta, apply_changes
from healthd.aggregator.store.store import Store
from healthd.core.errors import StoreError
from healthd.core.model import Verdict
from tests.aggregator.cluster import Cluster
from tests.aggregator.engine_kit import running
from tests.aggregator.postgres import Server, serving
from tests.aggregator.service import until
from tests.aggregator.store_kit import QUARANTINE
from tests.aggregator.world import World
from tests.patience import PATIENCE

PROMISED_SECONDS = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that tests may freeze and stop; each leaves it running."""
    with serving() as one:
        yield one


class Held:
    """Work for the database that hangs until `go`."""

    def __init__(self) -> None:
        self.stands, self.go = threading.Event(), threading.Event()

    def __call__(self, _: object) -> None:
        self.stands.set()
        self.go.wait(20 * PATIENCE)


@contextlib.asynccontextmanager
async def hanging(store: Store) -> AsyncIterator[Held]:
    """The store hangs for as long as the block."""
    held = Held()
    work = asyncio.create_task(store.run(held, seconds=60.0))
    try:
        await asyncio.to_thread(held.stands.wait)
        yield held
    finally:
        held.go.set()
        await work


async def test_everybody_is_answered_in_time_and_what_was_not_begun_is_never_done() -> None:
    store = Store.open("sqlite://")
    held = Held()
    put = [PutMeta(key="late", value="x")]
    begun = asyncio.create_task(store.run(held, seconds=0.3))
    await asyncio.to_thread(held.stands.wait)
    behind = store.run(lambda connection: apply_changes(connection, put), seconds=0.1)
    with pytest.raises(StoreError, match=r"did not respond within 0\.1 s") as late:
        await behind
    assert not isinstance(late.value, UnsureError), "it was not begun"
    with pytest.raises(UnsureError, match=r"did not respond within 0\.3 s"):
        await begun
    held.go.set()
    await store.write([PutMeta(key="after", value="x")])
    assert store.load().meta.keys() == {"store_id", "lease_key", "schema_readable_by", "after"}
    store.close()


async def test_word_of_a_person_that_was_answered_with_an_error_is_not_carried_out_later() -> None:
    async with running(World("n1")) as run:
        async with hanging(run.store):
            first = asyncio.create_task(run.engine.note("n1", "kind", "message"))
            await asyncio.sleep(0.05)  # a turn waits for the database; what comes now is for the next
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.engine.quarantine("n1", QUARANTINE), 0.05)
        await first
        await run.settle()
        assert run.engine.quarantines() == {}


def test_store_that_hangs_is_closed_in_time_and_answers_who_waits() -> None:
    async def main() -> float:
        store = Store.open("sqlite://")
        held = Held()
        works = [asyncio.create_task(store.run(work)) for work in (held, lambda _: None)]
        await asyncio.to_thread(held.stands.wait)
        stuck = asyncio.create_task(store.give_up_when_stuck())
        for work in works:
            with pytest.raises(StoreError, match="does not respond, and the aggregator is stopping"):
                await work
        await stuck
        began = time.monotonic()
        store.close()
        held.go.set()
        return time.monotonic() - began

    assert asyncio.run(main()) < 3


async def test_readiness_follows_the_database_also_when_nothing_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    settings = AggregatorSettings(listen="127.0.0.1:0", database=f"sqlite:///{path}?timeout=0.1")
    async with aggregator(settings, Policy()) as (address, _), client_of(address) as client:
        assert (await client.get("/readyz")).status_code == 200
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert "another program holds it" in await readiness(client, 503)
            other.execute("ROLLBACK")
        await readiness(client, 200)


def test_aggregator_ends_in_time_with_a_database_and_a_request_that_never_end(tmp_path: Path) -> None:
    async def main() -> float:
        path = tmp_path / "a.db"
        settings = AggregatorSettings(listen="127.0.0.1:0", database=f"sqlite:///{path}?timeout=600")
        async with contextlib.AsyncExitStack() as stack:
            address, _ = await stack.enter_async_context(aggregator(settings, Policy()))
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                async with client_of(address) as client:
                    await readiness(client, 503)
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST /v1/gates HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
                await writer.drain()
                began = time.monotonic()
                await stack.aclose()
                took = time.monotonic() - began
                writer.close()
        return took

    assert asyncio.run(main()) < PROMISED_SECONDS


def client_of(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0, trust_env=False, verify=False)


async def readiness(client: httpx.AsyncClient, status: int) -> str:
    """What `/readyz` says once it has this status."""
    async with asyncio.timeout(12 * PATIENCE):
        while True:
            answer = await client.get("/readyz")
            if answer.status_code == status:
                return answer.text
            await asyncio.sleep(0.05)


@pytest.mark.system(root=True)  # to mount a small disk
def test_readiness_tells_of_a_full_disk(tmp_path: Path) -> None:
    async def main() -> None:
        settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
        async with aggregator(settings, Policy()) as (address, _), client_of(address) as client:
            fill = tmp_path / "fill"
            with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            assert "disk is full; free some space" in await readiness(client, 503)
            fill.unlink()
            await readiness(client, 200)

    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], check=False)
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        asyncio.run(main())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.system
async def test_readiness_tells_of_a_server_that_was_stopped_and_of_its_return(server: Server) -> None:
    settings = AggregatorSettings(listen="127.0.0.1:0", database=server.url)
    async with aggregator(settings, Policy()) as (address, _), client_of(address) as client:
        assert (await client.get("/readyz")).status_code == 200
        await asyncio.to_thread(server.stop)
        try:
            assert "database postgresql+psycopg://" in await readiness(client, 503)
        finally:
            await asyncio.to_thread(server.start)
        await readiness(client, 200)


@pytest.mark.system
async def test_statement_of_a_server_that_froze_is_ended_and_the_store_goes_on(server: Server) -> None:
    async with running(World("n1"), server.url) as run:
        with server.frozen():
            with pytest.raises(UnsureError, match=r"did not respond within 0\.2 s"):
                await run.store.run(lambda c: c.exec_driver_sql("SELECT 1"), seconds=0.2)
            with pytest.raises(StoreError):
                await run.store.run(lambda c: c.exec_driver_sql("SELECT 1"), seconds=0.2)
        _, decision = await run.admit(nodes=("n1",))
        assert decision.decision is Verdict.ADMIT


@pytest.mark.system
def test_gate_and_sigterm_keep_their_time_while_the_server_is_frozen(tmp_path: Path, server: Server) -> None:
    with Cluster(tmp_path) as cluster:
        service = cluster.aggregator("--database", server.url).start()
        late = cluster.aggregator("--database", server.url, name="late")
        with server.frozen():
            hook = cluster.start("gate", "--aggregator", service.url, "--job", "j", "--node", "n1", "--wait", "4s")
            began = time.monotonic()
            said = hook.said()
            assert (said.code, time.monotonic() - began < 4 + 2 * PATIENCE) == (75, True), said
            assert "not admitted" in said.err
            until(lambda: service.get("/readyz").status_code == 503, 8)
            began = time.monotonic()
            service.signal(signal.SIGTERM)
            assert service.ended(10) == 0
            assert time.monotonic() - began < PROMISED_SECONDS
            late.start(ready=False)
            until(lambda: _connects(late.pid, server.port))
            late.signal(signal.SIGTERM)
            assert late.ended(2) == 0
            assert "Traceback" not in late.said()


def _connects(pid: int, port: int) -> bool:
    """Whether a process has a connection to this port."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    table = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(int(row[2].rpartition(":")[2], 16) == port and f"socket:[{row[9]}]" in inodes for row in table)
