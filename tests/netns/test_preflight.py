"""`healthd preflight` on four nodes with addresses of their own and no standing service, over IPv6."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.service import ROOT, until
from tests.hooks.preflight_kit import CONFIG
from tests.netns.hosts import Host, Net, marks, pids_in
from tests.patience import PATIENCE

pytestmark = marks

COUNT = 4
COMMAND = (
    'import os; print("started", os.environ["HEALTHD_RANK"], os.environ["HEALTHD_NNODES"], os.environ["HEALTHD_MAIN"])'
)
POLICY = """
[checks.all_reduce]
sizes_bytes = [1024, 1048576]
iterations = 2
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        net = Net()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield [net.host(f"p{number}", number) for number in range(1, COUNT + 1)]
    finally:
        net.remove()


def start(hosts: list[Host], folder: Path, main: str, *options: str, fault: int) -> list[subprocess.Popen[str]]:
    found = []
    for rank, host in enumerate(hosts):
        # All have this machine's files, so each needs a place of its own for its locks.
        config = folder / f"healthd{rank}.toml"
        own = f'[node]\nrun_dir = "{folder}/run{rank}"\nchecks = ["all_reduce", '
        config.write_text(CONFIG.replace("[node]\nchecks = [", own) + POLICY)
        told = ("--nnodes", str(COUNT), "--node-rank", str(rank), "--main", main, "--config", str(config), *options)
        more = ("--fault", f"all_reduce@rank:{fault}=corrupt") if rank == fault else ()
        line = ("healthd", "preflight", *told, "--tier", "passive", *more, "--", sys.executable, "-c", COMMAND)
        found.append(
            subprocess.Popen(
                host.inside("env", "HEALTHD_CPU_DEVICES=1", sys.executable, "-m", *line),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
    return found


@pytest.mark.nightly
def test_one_spoilt_rank_is_left_out_and_the_other_three_run_renumbered_over_ipv6(
    hosts: list[Host], tmp_path: Path
) -> None:
    processes = start(hosts, tmp_path, f"[{hosts[0].address6}]:8099", "--min-nodes", "3", fault=2)
    ended = [(*process.communicate(timeout=60 * PATIENCE), process.returncode) for process in processes]
    assert [code for _, _, code in ended] == [0, 0, 0, 0], ended
    said = [out.strip() for out, _, _ in ended]
    main = hosts[0].address6
    assert said == [f"started 0 3 {main}", f"started 1 3 {main}", "", f"started 2 3 {main}"], ended
    words = " ".join(ended[2][1].split())
    assert "this node was left out" in words
    assert re.search(r"CollectiveFault \S+ \(rank 2\)", words), words
    until(lambda: not any(pids_in(host.space) for host in hosts), 8)  # sidecars linger until all have heard the end
