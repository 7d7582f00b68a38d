"""When a daemon probes unprompted by rule of its host, and what it tells other healthd processes of its leases."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.model import Lease
from healthd.node.clock import system_clock
from healthd.node.daemon import LeasedFile, _ruled
from healthd.node.hosting import unprompted_here
from healthd.node.settings import ActiveSettings, Unprompted
from healthd.node.state import NodeBook
from healthd.runner.lock import read_leased
from tests.healthd.node_kit import settings, specs


@pytest.mark.parametrize(
    ("path", "content", "rule", "words"),
    [
        ("proc/7/comm", "bash\n", Unprompted.IDLE, "no job scheduler"),
        ("proc/7/comm", "slurmd\n", Unprompted.BOOT, "Slurm is on this host: process 7"),
        ("proc/7/comm", "slurmdbd\n", Unprompted.IDLE, "no job scheduler"),
        ("proc/7/comm", "kubelet\n", Unprompted.BOOT, "Kubernetes"),
        ("proc/7/comm", "amazon-ecs-agen\n", Unprompted.BOOT, "ECS"),
        ("var/run/slurmd.pid", "7\n", Unprompted.BOOT, "Slurm is on this host: /var/run/slurmd.pid"),
        ("var/lib/kubelet/config.yaml", "", Unprompted.BOOT, "Kubernetes"),
        ("var/lib/ecs/data", "", Unprompted.BOOT, "ECS"),
    ],
)
def test_rule_is_boot_beside_a_job_scheduler(
    tmp_path: Path, path: str, content: str, rule: Unprompted, words: str
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(content)
    found, why = unprompted_here(tmp_path)
    assert found is rule
    assert words in why


def test_rule_is_resolved_with_its_reason_and_what_is_set_wins(tmp_path: Path) -> None:
    (tmp_path / "var/lib/ecs").mkdir(parents=True)
    assert ActiveSettings().unprompted is None
    by_rule, why = _ruled(settings(tmp_path, active=ActiveSettings(), host_root=tmp_path))
    assert by_rule.active.unprompted is Unprompted.BOOT
    assert why == "'boot': ECS is on this host: /var/lib/ecs"
    chosen = ActiveSettings(unprompted=Unprompted.IDLE)
    as_set, why = _ruled(settings(tmp_path, active=chosen, host_root=tmp_path))
    assert as_set.active.unprompted is Unprompted.IDLE
    assert why == "'idle': as set"


def test_lease_is_told_in_run_dir_while_it_lasts(tmp_path: Path) -> None:
    book = NodeBook(settings(tmp_path), specs(), clock=system_clock(), boot_id="b1")
    LeasedFile(book, tmp_path)
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
    assert read_leased(tmp_path, "b1") == f"leased to job train (gate g1) ({tmp_path}/leased)"
    book.set_leases(())
    assert read_leased(tmp_path, "b1") is None
    assert not (tmp_path / "leased").exists()
