"""A baseline that the whole fleet has drifted away from is told without being asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from healthd.aggregator.store import baseline_rows
from healthd.aggregator.store.store import Store
from healthd.baselines.model import Baseline, Kind, Learned, Series, State
from healthd.cli.terminal.fleet_view import fleet_report
from tests.aggregator.test_api import running
from tests.patience import PATIENCE

KIND = Kind(hardware="trn1.32xlarge", accelerator="neuron", versions=(("neuron_driver", "2.18"),))
LEARNED = Learned(median=90e12, mad=1e11, samples=200, sources=40, factor=5.0, lower=80e12, upper=None, outside=0)


def series(name: str, drift: float | None) -> Series:
    approved = Baseline(version=1, state=State.APPROVED, learned=LEARNED, learned_at=0.0, by="ana", decided_at=0.0)
    return Series(kind=KIND, name=name, in_force=approved, drift=drift)


def test_drift_is_counted_for_the_alert_and_stands_in_the_status(tmp_path: Path) -> None:
    async def main() -> dict[str, object]:
        store = Store.open(f"sqlite:///{tmp_path}/aggregator.db")
        kept = [
            baseline_rows.Kept(series=series(name, drift), samples=())
            for name, drift in (("matmul_flops_per_second/bf16", -0.12), ("memory_bytes_per_second", None))
        ]
        await store.run(lambda connection: baseline_rows.write(connection, kept, [], []))
        store.close()
        async with running(tmp_path) as client, asyncio.timeout(20 * PATIENCE):
            assert (await client.get("/v1/baselines")).status_code == 200  # waits until what is on disk was read
            assert "healthd_baseline_drifts 1.0" in (await client.get("/metrics")).text
            found: dict[str, object] = (await client.get("/v1/fleet")).json()
            return found

    summary = asyncio.run(main())
    said = " ".join(map(str, fleet_report(summary, [])))
    assert "! baseline drift:[/] matmul_flops_per_second/bf16 on trn1.32xlarge" in said
    assert "-12.0 % from the approved 90 TFLOP/s" in said
    assert "memory_bytes" not in said
