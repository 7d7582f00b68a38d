"""What a daemon tells other healthd processes of its leases."""

from __future__ import annotations

from pathlib import Path

from healthd.core.model import Lease
from healthd.node.clock import system_clock
from healthd.node.daemon import LeasesFile
from healthd.node.state.store import NodeStore
from healthd.runner.device_claim import read_leases_file
from tests.node.node_kit import settings, specs


def test_lease_is_told_in_run_dir_while_it_lasts(tmp_path: Path) -> None:
    book = NodeStore(settings(tmp_path), specs(), clock=system_clock(), boot_id="b1")
    LeasesFile(book, tmp_path)
    lease = Lease(
        id="l1",
        gate="g1",
        job="train",
        attempt=0,
        issuer="a",
        workload=None,
        grace_seconds=60,
        max_seconds=600,
        age_seconds=0,
    )
    book.set_leases(((lease, 0.0),))
    assert read_leases_file(tmp_path, "b1") == f"leased to job train (gate g1) ({tmp_path}/leased)"
    assert read_leases_file(tmp_path, "b1", past="g0") is not None
    assert read_leases_file(tmp_path, "b1", past="g1") is None  # for the `healthd run` of the job that died
    book.set_leases(())
    assert read_leases_file(tmp_path, "b1") is None
    assert not (tmp_path / "leased").exists()
