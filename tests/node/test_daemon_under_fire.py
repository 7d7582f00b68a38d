"""The daemon of the product, killed and starved, as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.cluster import Cluster, full_disk, mounted
from tests.aggregator.service import Service, until
from tests.patience import PATIENCE

SLEEPER = '''
"""A check that never comes back, with a grandchild in a session of its own that holds every pipe it was given."""
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from checks.contract import Context, Finding, NoParams, check


@check(tier="quick", interval_seconds=60, timeout_seconds=30, scope="node")
def sleeper(ctx: Context[NoParams]) -> Iterator[Finding]:
    """Sleeps."""
    subprocess.Popen(["setsid", "sleep", "120"], close_fds=False)
    (Path(__file__).parent / "begun").touch()
    time.sleep(60)
    yield from ()
'''

LITTER = '''
"""A check that leaves a grandchild behind, in a session of its own, which holds its pipes."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from checks.contract import Context, Finding, Limit, NoParams, check
from checks.limits import within


@check(tier="quick", interval_seconds=60, timeout_seconds=20, scope="node")
def litter(ctx: Context[NoParams]) -> Iterator[Finding]:
    """Leaves something behind."""
    code = "import time; time.sleep(120)"
    left = subprocess.Popen([sys.executable, "-c", code], close_fds=False, start_new_session=True)
    (Path(__file__).parent / "grandchild").write_text(str(left.pid))
    least = Limit(lower=0.0, upper=None, origin="config")
    yield within(1.0, name="litter_bytes", target="node", limit=least, reason="SlowDevice", subject="litter")
    left.returncode = 0  # it is nobody's any more, and no warning tells of it
'''


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as one:
        yield one


def own_check(cluster: Cluster, name: str, text: str) -> Path:
    folder = cluster.folder / "checks"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder


def results(node: Service) -> dict[str, float]:
    return {r["check"]: r["age_seconds"] for r in node.get("/v1/node").json()["results"]}


def test_daemon_killed_during_a_run_leaves_no_worker(cluster: Cluster) -> None:
    folder = own_check(cluster, "sleeper", SLEEPER)
    cluster.checks = ("memory_free", "sleeper")
    node = cluster.node("n1").start()
    until(lambda: (folder / "begun").exists())
    assert len(cluster.alive()) > 1
    node.kill()
    until(lambda: not cluster.alive(), 3, lambda: str(cluster.alive()))


def test_daemon_that_stops_during_a_run_kills_its_children_and_keeps_what_it_knew(cluster: Cluster) -> None:
    folder = own_check(cluster, "sleeper", SLEEPER)
    cluster.checks = ("memory_free", "sleeper")
    node = cluster.node("n1").start()
    until(lambda: (folder / "begun").exists() and "memory_free" in results(node))
    began = time.monotonic()
    node.signal(signal.SIGTERM)
    assert node.ended() == 0
    assert time.monotonic() - began < 4 * PATIENCE
    assert not cluster.alive()
    saved = json.loads((cluster.folder / "n1" / "state" / "state.json").read_text())
    assert "memory_free" in json.dumps(saved)


def test_killed_daemon_knows_after_its_restart_what_it_knew_with_the_true_age(cluster: Cluster) -> None:
    node = cluster.node("n1").start()
    cluster.healthy("n1")
    state = cluster.folder / "n1" / "state" / "state.json"
    until(lambda: state.exists() and '"proof"' in state.read_text())  # once the devices were seen to be free again
    before, at = results(node)["proof"], time.monotonic()
    node.kill()
    (cluster.folder / "checks" / "number").write_text("nonsense")  # a new run could not pass
    time.sleep(1)
    node.start()
    asked = time.monotonic()
    after = results(node)["proof"]
    assert after >= before + (asked - at) - 0.5
    cluster.healthy("n1")


def test_corrupt_state_is_set_aside_and_the_daemon_starts_from_nothing(cluster: Cluster) -> None:
    node = cluster.node("n1").start()
    cluster.healthy("n1")
    node.kill()
    state = cluster.folder / "n1" / "state"
    for file in ("state.json", "orders.json"):
        (state / file).write_bytes(b'{"version": 1, "results": [' + os.urandom(200))
    node.log.unlink()
    node.start()
    aside = [file.name for file in state.iterdir() if file.name.startswith(("state.json.", "orders.json."))]
    assert len(aside) == 2, list(state.iterdir())
    assert "state.json: cannot be used" in node.said(), node.said()
    assert "orders.json: cannot be used" in node.said(), node.said()
    cluster.healthy("n1")


@pytest.mark.system(root=True)  # mounting a file system
def test_run_directory_that_cannot_be_written_is_one_clear_line(cluster: Cluster) -> None:
    place = cluster.folder / "n1" / "run"
    node = cluster.node("n1")
    with mounted("tmpfs", place, "ro"):
        node.start(ready=False)
        assert node.ended() == 1
    (line,) = node.said().splitlines()
    assert str(place) in line
    assert "ead-only file system" in line


@pytest.mark.system(root=True)  # mounting a file system
def test_daemon_that_restarts_on_a_full_disk_is_there_and_says_that_it_is_full(cluster: Cluster) -> None:
    cluster.checks = ("memory_free", "disk_space")
    with full_disk(cluster.folder / "small") as place:
        extra = f'[checks.disk_space]\npaths = ["{place}"]\n'
        node = cluster.node("n1", "--state-dir", str(place), extra=extra).start()
        until(lambda: "DiskFull" in node.get("/health").text, why=node.said)
        why = f"no lease can be stored: {place}: No space left on device; free some space"
        assert why in node.said()
        until(lambda: f"leases: {why}\n" in node.get("/readyz").text, why=node.said)
        assert node.get("/readyz").status_code == 503
        assert f"[-] leases failed: {why}\n" in node.get("/readyz?verbose").text
        (place / "ballast").unlink()
        until(lambda: "[+] leases ok\n" in node.get("/readyz?verbose").text, why=node.said)
        assert not list(place.glob(".probe-*"))
        node.signal(signal.SIGTERM)
        assert node.ended() == 0
        assert "Traceback" not in node.said()


def test_typo_in_the_file_is_one_line_with_its_place_and_the_nearest_key(cluster: Cluster) -> None:
    node = cluster.node("n1")
    file = cluster.folder / "n1.toml"
    file.write_text(file.read_text().replace("passive_floor", "pasive_floor"))
    number = 1 + next(n for n, line in enumerate(file.read_text().splitlines()) if "pasive" in line)
    node.start(ready=False)
    assert node.ended() == 2
    said = f"healthd: {file}:{number}: unknown key 'node.pasive_floor'; did you mean 'passive_floor'?\n"
    assert node.said() == said


def test_rival_faults_1_and_7_no_check_and_an_unknown_check_are_errors_at_the_start(cluster: Cluster) -> None:
    for checks, words in (
        (("memory_free", "matmull"), "no such check: 'matmull'; did you mean 'matmul'?"),
        (("memory_free",), "no check"),
    ):
        cluster.checks = checks
        node = cluster.node("n1")
        if len(checks) == 1:
            file = cluster.folder / "n1.toml"
            file.write_text(file.read_text().replace("[node]", '[node]\ndisabled = ["memory_free"]'))
        node.log.unlink(missing_ok=True)
        node.start(ready=False)
        assert node.ended() == 2, node.said()
        (line,) = node.said().splitlines()
        assert words in line


def test_grandchild_that_holds_the_pipes_of_its_check_holds_up_nobody(cluster: Cluster) -> None:
    folder = own_check(cluster, "litter", LITTER)
    cluster.checks = ("memory_free", "litter", "proof")
    node = cluster.node("n1").start()
    cluster.healthy("n1", seconds=10)  # the grandchild would live for two minutes
    until(lambda: not Path(f"/proc/{(folder / 'grandchild').read_text()}").exists())
    node.signal(signal.SIGTERM)
    assert node.ended(5) == 0


@pytest.mark.parametrize("checks", [("memory_free", "proof"), ("proof",)])
def test_end_of_a_job_is_seen_whatever_checks_are_enabled(cluster: Cluster, checks: tuple[str, ...]) -> None:
    """Without a passive check nobody looked at the devices again, and the node stayed taken for ever."""
    cluster.checks = checks
    job = cluster.job(cluster.run_dir("n1") / "devices" / "cpu0")
    node = cluster.node("n1").start()
    until(lambda: f"pid {job.pid}" in str(node.get("/v1/node").json()["allocated"]))
    assert node.health("?tier=quick&max_age=60") == 503
    job.kill()
    job.wait()
    until(lambda: node.health("?tier=quick&max_age=60") == 200)


@pytest.mark.skip(
    reason="a time namespace shifts CLOCK_BOOTTIME before its first process starts and never CLOCK_REALTIME, and "
    "setting the clock of the machine would hurt others; test_node_state and test_engine jump the injected clock"
)
def test_clock_that_jumps_moves_no_age() -> None:
    """See test_clock_of_the_wall_moves_no_age."""
