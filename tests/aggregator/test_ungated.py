"""Jobs that run although their hook asked no gate for them are counted: in the metrics and in the report."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import httpx
from prometheus_client.core import CounterMetricFamily

from healthd.aggregator.api.sync import SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.identity.tokens import Guard
from healthd.aggregator.jobs import ungated
from healthd.aggregator.jobs.ungated import HookedJob, UngatedJobs, without_lease
from healthd.aggregator.settings import AggregatorSettings
from healthd.cli.fleet.report import report_lines
from healthd.core import wire
from healthd.core.errors import StoreError
from healthd.core.model import Allocation, GateRequest, Lease, NodeState
from tests.aggregator.api_kit import scenario
from tests.aggregator.application import parts_of_test
from tests.aggregator.engine_kit import running as running_engine
from tests.aggregator.parts import KEY, Clock, Node, fleet, state
from tests.aggregator.sync_kit import nothing_behind
from tests.aggregator.world import World
from tests.node.node_kit import eventually, lease

METRIC = "healthd_jobs_ungated_total"


def kite(workload: str) -> HookedJob | None:
    """The jobs of a scheduler whose hook asks a gate for each."""
    kind, _, job = workload.partition(":")
    return HookedJob(id=job, gate=f"kite-{job}") if kind == "kite" else None


def running(*jobs: str, leased: tuple[Lease, ...] = ()) -> NodeState:
    claims = [Allocation(by="scheduler", holder=job) for job in jobs]
    return state("n1", allocated=(Allocation(by="process", holder="python (pid 7)"), *claims), leases=leased)


def test_job_that_a_lease_names_had_a_gate_and_other_schedulers_are_not_meant() -> None:
    held = lease(workload="kite:7")
    found = without_lease(running("kite:7", "kite:8", "pod:default/x", "and 3 more", leased=(held,)), kite)
    assert found == (HookedJob(id="8", gate="kite-8"),)


async def value(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(METRIC))


async def test_jobs_that_have_no_gate_a_minute_later_are_counted_once_and_named_in_the_report(tmp_path: Path) -> None:
    world = World("n1")
    async with running_engine(world) as run:

        async def gated(job: str) -> bool:
            return bool(await run.engine.gates(limit=1, job=job))

        jobs = UngatedJobs(gated, clock=world.clock, retry_seconds=0.0, hooked=kite)
        parts = parts_of_test(tmp_path, store=run.store, fleet=fleet(), engine=run.engine)
        parts.metrics.read(METRIC.removesuffix("_total"), "", lambda: jobs.figure.jobs, family=CounterMetricFamily)
        app = make_app(dataclasses.replace(parts, ungated=jobs))
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
        task = asyncio.create_task(jobs.run())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(3):
                jobs.see(running("kite:7", "kite:8", "kite:9"))
            world.now += 59
            await asyncio.sleep(0.01)
            assert await value(client) == 0, "its hook may ask yet"
            await run.engine.ask(GateRequest(job="kite-7", nodes=("n1",), wait_seconds=0.0))
            world.now += 2
            await eventually(lambda: jobs.figure.jobs >= 2)
            jobs.see(running("kite:7", "kite:8", "kite:9"))
            world.now += 120
            await asyncio.sleep(0.01)
            assert await value(client) == 2, "job 7 had its gate, and each is counted once"
            report = (await client.get("/v1/report")).json()
            assert (report["ungated"]["jobs"], set(report["ungated"]["examples"])) == (2, {"8", "9"})
            lines = [line for line in report_lines(report) if isinstance(line, str)]
            assert any("2 jobs of Slurm started without a gate" in line for line in lines)
            assert any("healthd slurm doctor" in line for line in lines)
        task.cancel()


def test_state_of_a_former_process_of_a_node_is_not_looked_at(tmp_path: Path) -> None:
    """Nothing of it is taken in, so nothing of it may be counted."""
    seen: set[str] = set()

    async def main() -> None:
        settings, registry = AggregatorSettings(state_dir=tmp_path), fleet()

        def see(found: NodeState) -> None:
            seen.update(job.id for job in without_lease(found, kite))

        endpoint = SyncEndpoint(nothing_behind, fleet=registry, guard=Guard(None), settings=settings, on_state=see)
        node = Node(registry, Clock())
        transport = httpx.ASGITransport(app=endpoint, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for incarnation, job in (("old", "1"), ("new", "2"), ("old", "3")):
                request = dataclasses.replace(node.request(running(f"kite:{job}")), incarnation=incarnation)
                headers = {"x-healthd-node-key": KEY}
                answer = await client.post("/v1/nodes/n1/sync", content=wire.encode(request), headers=headers)
                assert answer.status_code == 200, answer.text

    asyncio.run(main())
    assert seen == {"1", "2"}


def test_where_every_job_had_its_gate_the_report_says_nothing(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        report = (await client.get("/v1/report")).json()
        assert report["ungated"]["jobs"] == 0
        assert not any("without a gate" in line for line in report_lines(report) if isinstance(line, str))

    scenario(test, tmp_path)


async def test_store_that_fails_loses_no_job_and_memory_is_bounded() -> None:
    """What cannot be looked up is looked up again; more than can be looked up is dropped, not kept for ever."""
    fails = 2

    async def gated(job: str) -> bool:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise StoreError("database is locked")
        return job == "kite-7"

    jobs = UngatedJobs(gated, clock=lambda: 0.0, grace_seconds=0.0, retry_seconds=0.0, hooked=kite)
    jobs.see(running(*(f"kite:{number}" for number in range(2 * ungated.MOST_WAITING))))
    task = asyncio.create_task(jobs.run())
    await eventually(lambda: jobs.figure.jobs >= ungated.MOST_WAITING - 1)
    assert jobs.figure.jobs == ungated.MOST_WAITING - 1
    assert len(jobs.figure.examples) == ungated.MOST_EXAMPLES
    task.cancel()
