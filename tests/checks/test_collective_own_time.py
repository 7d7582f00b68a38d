"""What a rank spends on its own account."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from checks.collective.ranks import OwnTime, cpu_wait_seconds
from checks.host.machine import Host


def machine(root: Path, **threads: str) -> Host:
    for thread, text in threads.items():
        folder = root / "proc/self/task" / thread.removeprefix("t")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(text)
    return Host(root)


def test_waiting_for_a_processor_is_summed_over_all_threads(tmp_path: Path) -> None:
    host = machine(tmp_path, t1="500000000 250000000 7\n", t2="1 1250000000 3\n")
    assert cpu_wait_seconds(host) == 1.5
    own = OwnTime(host)
    machine(tmp_path, t2="1 3250000000 9\n")
    assert own.spent(without_seconds=0.0)["cpu_wait_seconds"] == 2.0


@pytest.mark.parametrize("text", ["", "1", "1 x 2", "nothing here"])
def test_what_the_kernel_does_not_count_is_none_and_never_zero(tmp_path: Path, text: str) -> None:
    assert cpu_wait_seconds(Host(tmp_path)) is None
    host = machine(tmp_path, t1="1 2 3", t2=text)
    assert cpu_wait_seconds(host) is None
    assert OwnTime(host).spent(without_seconds=0.0)["cpu_wait_seconds"] is None


def test_time_that_ranks_share_is_not_their_own() -> None:
    own = OwnTime(Host(None))
    time.sleep(0.05)
    spent = own.spent(without_seconds=0.03)["own_seconds"]
    assert spent is not None
    assert 0.02 <= spent < 0.5
    assert own.spent(without_seconds=100.0)["own_seconds"] == 0.0
