"""Jobs of Slurm that run although no gate was asked for them are counted: in the metrics and in the report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from healthd.cli.report import report_lines
from healthd.errors import StoreError
from healthd.fleet import ungated
from healthd.fleet.ungated import UngatedJobs, without_lease
from healthd.model import Allocation, Lease, NodeState
from tests.fleet.parts import state
from tests.fleet.test_api import Daemon, scenario
from tests.healthd.node_kit import eventually, lease

METRIC = "healthd_jobs_ungated_total"


def running(*jobs: str, leased: tuple[Lease, ...] = ()) -> NodeState:
    claims = [Allocation(by="scheduler", holder=job) for job in jobs]
    return state("n1", allocated=(Allocation(by="process", holder="python (pid 7)"), *claims), leases=leased)


def test_job_that_a_lease_names_had_a_gate_and_other_schedulers_are_not_meant() -> None:
    held = lease(workload="slurm:7")
    found = without_lease(running("slurm:7", "slurm:8", "pod:default/x", "slurm:x", "and 3 more", leased=(held,)))
    assert found == ("8",)


async def value(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(METRIC))


def test_jobs_without_a_gate_are_counted_once_and_named_in_the_report(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        daemon = Daemon(client, "n1")
        await daemon.sync()
        await daemon.sync()
        asked = {"job": "slurm-7", "nodes": ["n1"], "wait_seconds": 0.0, "workload": "slurm:7", "mode": "observe"}
        assert (await client.post("/v1/gates", json=asked)).status_code == 200
        assert await value(client) == 0
        jobs = tuple(Allocation(by="scheduler", holder=f"slurm:{number}") for number in (7, 8, 9))
        other = Daemon(client, "n2", allocated=jobs)
        other.state = lambda: state("n2", allocated=jobs)  # type: ignore[method-assign]
        for _ in range(3):
            await other.sync()
        async with asyncio.timeout(10):
            while await value(client) < 2:  # noqa: ASYNC110 - it is asked over HTTP
                await asyncio.sleep(0.01)
        report = (await client.get("/v1/report")).json()
        assert await value(client) == 2, "job 7 had its gate, and each is counted once"
        assert (report["ungated"]["jobs"], set(report["ungated"]["examples"])) == (2, {"8", "9"})
        lines = [line for line in report_lines(report) if isinstance(line, str)]
        assert any("2 jobs of Slurm started without a gate" in line for line in lines)
        assert any("healthd slurm doctor" in line for line in lines)

    scenario(test, tmp_path)


def test_where_every_job_had_its_gate_the_report_says_nothing(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        report = (await client.get("/v1/report")).json()
        assert report["ungated"]["jobs"] == 0
        assert not any("without a gate" in line for line in report_lines(report) if isinstance(line, str))

    scenario(test, tmp_path)


def test_store_that_fails_loses_no_job_and_memory_is_bounded() -> None:
    """What cannot be looked up is looked up again; more than can be looked up is dropped, not kept for ever."""
    fails = 2

    async def gated(job: str) -> bool:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise StoreError("database is locked")
        return job == "slurm-7"

    async def main() -> None:
        jobs = UngatedJobs(gated, now=0.0, retry_seconds=0.0)
        jobs.see(running(*(f"slurm:{number}" for number in range(2 * ungated.MOST_WAITING))))
        task = asyncio.create_task(jobs.run())
        await eventually(lambda: jobs.figure.jobs >= ungated.MOST_WAITING - 1)
        assert jobs.figure.jobs == ungated.MOST_WAITING - 1
        assert len(jobs.figure.examples) == ungated.MOST_EXAMPLES
        task.cancel()

    asyncio.run(main())
