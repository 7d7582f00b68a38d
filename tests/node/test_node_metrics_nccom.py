"""The series of nccom-test's collectives: one type, all ranks, a few sizes, whatever else was measured."""

from __future__ import annotations

from pathlib import Path

from checks.contract import Scope, Tier
from healthd.core.http.server import exposition
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.http.metrics import registry_of
from healthd.node.state.store import NodeStore
from tests.node.node_kit import BOOT, MovedClock, info, measured, result, settings, survey

OP = "nccom_all_reduce"


def test_collectives_of_nccom_have_series_of_one_type_and_all_ranks(tmp_path: Path) -> None:
    catalogue = {OP: info(OP, Tier.QUICK, scope=Scope.NODE)}
    book = NodeStore(
        settings(tmp_path), enabled_checks(catalogue, settings(tmp_path)), clock=MovedClock().clock, boot_id=BOOT
    )
    book.set_survey(survey())
    numbers = [
        measured(f"{OP}_{kind}", float(ranks), size_bytes=str(size), dtype=dtype, ranks=str(ranks))
        for dtype, ranks in (("fp32", 2), ("bf16", 32), ("fp32", 32), ("fp32", 8))
        for size in (2**19, 2**23, 2**27)
        for kind in ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds")
    ]
    book.record(result(OP, *numbers, tier=Tier.DEEP))
    text, _ = exposition(registry_of(book, {}), "text/plain")
    lines = [line for line in text.decode().splitlines() if line.startswith("healthd_collective_")]
    assert len(lines) == 6
    for size in (2**19, 2**23, 2**27):
        labels = f'{{op="{OP}",size_bytes="{size}"}}'
        assert f"healthd_collective_bus_bandwidth_bytes_per_second{labels} 32.0" in lines
        assert f"healthd_collective_duration_seconds{labels} 32.0" in lines
