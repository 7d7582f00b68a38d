"""What a store that fails looks like to its checks: each fault on a real file system, with a reason of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Evidence, Finding, Limit, Previous, Status, Tier
from checks.reasons import REASONS
from checks.storage.checkpoint_store import checkpoint_store
from checks.storage.data_store import data_store
from checks.storage.store_access import store_access
from checks.stores import probes
from checks.stores.operations import FileStore, StoreFault, open_store
from checks.stores.probes import PREFIX
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan, RunnerSettings
from tests.checks.store_kit import ext4, fuse, mounted, tmpfs

QUICK_SECONDS = 10.0
SMALL = 1 << 20
Context = Callable[..., Any]


@pytest.fixture
def save(context: Context) -> Callable[..., list[Finding]]:
    """Run checkpoint_store on one path; its findings, each with a reason of the catalogue, within its time."""

    def run(path: Path | str, **params: Any) -> list[Finding]:
        params = {"size_bytes": SMALL, **params}
        limits = params.pop("limits", None)
        begun = time.monotonic()
        found = list(checkpoint_store(context(checkpoint_store, paths=[str(path)], limits=limits, **params)))
        assert time.monotonic() - begun < QUICK_SECONDS
        findings = [one for one in found if isinstance(one, Finding)]
        assert all(one.reason in REASONS for one in findings if one.status is not Status.PASS)
        return findings

    return run


def bad(findings: list[Finding]) -> list[str | None]:
    return [one.reason for one in findings if one.status is not Status.PASS]


def test_without_a_path_the_checks_do_not_concern_the_node(context: Context) -> None:
    for check in (checkpoint_store, data_store, store_access):
        (finding,) = check(context(check))
        assert isinstance(finding, Finding)
        assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")


def test_good_store_passes_with_numbers_and_nothing_is_left_behind(
    save: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    findings = save(tmp_path)
    assert bad(findings) == []
    values = {item.name: item.value for one in findings for item in one.measurements}
    assert {"checkpoint_write_bytes_per_second", "checkpoint_read_bytes_per_second"} <= set(values)
    assert all(value and value > 0 for value in values.values())
    assert list(tmp_path.iterdir()) == []


def test_what_others_wrote_is_never_touched(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    host = os.uname().nodename
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100/__0_0.distcp").write_bytes(b"weights")
    (tmp_path / "data").write_text("of a job")
    # A folder that looks like one of ours, old enough to be cleared away, with a file in it that we never write.
    strange = tmp_path / f"{PREFIX}{host}.0123"
    strange.mkdir()
    (strange / "model.pt").write_text("of a job")
    os.utime(strange, (1.0, 1.0))
    others = tmp_path / f"{PREFIX}other-node.0123"
    others.mkdir()
    (others / "data").write_text("of another node")
    os.utime(others, (1.0, 1.0))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert bad(save(tmp_path)) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_a_killed_run_of_this_node_left_is_removed_by_a_later_one(
    save: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    left = tmp_path / f"{PREFIX}{os.uname().nodename}.0123"
    left.mkdir()
    (left / "data.part").write_bytes(b"x")
    assert bad(save(tmp_path)) == []
    assert left.exists()  # young: another run may be at it
    os.utime(left, (1.0, 1.0))
    assert bad(save(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_path_that_is_not_there_is_said(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    assert bad(save(tmp_path / "nothing")) == ["StoreMissing"]


def test_room_for_less_than_a_save_is_no_space(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    assert bad(save(tmp_path, needed_bytes=1e18)) == ["StoreNoSpace"]


def test_slow_store_is_told_by_its_limit(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    limits = {"checkpoint_write_bytes_per_second": Limit(lower=1e15, upper=None, origin="config")}
    assert bad(save(tmp_path, limits=limits)) == ["StoreSlow"]


# --- faults of real file systems ------------------------------------------------------------------------------------

needs_root = pytest.mark.system("mount", "mkfs.ext4", root=True)


@needs_root
def test_full_store(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    with ext4(tmp_path / "store", 8) as store:
        assert bad(save(store, size_bytes=16 << 20)) == ["StoreNoSpace"]
        assert [path.name for path in store.iterdir()] == ["lost+found"]


def test_url_that_is_given_to_the_check_of_directories_is_no_missing_store(context: Context) -> None:
    (finding,) = store_access(context(store_access, writable=["s3://bucket/checkpoints"]))
    assert isinstance(finding, Finding)
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "CheckError")
    assert "checkpoint_store" in finding.message


@needs_root
def test_store_that_is_full_to_the_brim_is_seen_while_a_job_runs(context: Context, tmp_path: Path) -> None:
    """Whatever a save needs: without any room it fails."""
    with tmpfs(tmp_path / "store", "size=1m") as store:
        (store / "whole").write_bytes(b"x" * SMALL)
        for params, expected in (({"writable": [str(store)]}, ["StoreNoSpace"]), ({"readable": [str(store)]}, [])):
            found = store_access(context(store_access, **params))
            assert bad([one for one in found if isinstance(one, Finding)]) == expected


@needs_root
def test_store_without_inodes(save: Callable[..., list[Finding]], context: Context, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "store", "size=16m,nr_inodes=4") as store:
        for number in range(3):
            (store / str(number)).touch()
        assert bad(save(store)) == ["StoreNoInodes"]
        (finding,) = store_access(context(store_access, writable=[str(store)]))
        assert isinstance(finding, Finding)
        assert finding.reason == "StoreNoInodes"


@needs_root
def test_used_up_quota(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    with fuse(tmp_path / "store", {"WRITE": "EDQUOT"}):
        assert bad(save(tmp_path / "store")) == ["StoreQuota"]
        assert list((tmp_path / "store").iterdir()) == []


@needs_root
def test_store_that_became_read_only(save: Callable[..., list[Finding]], context: Context, tmp_path: Path) -> None:
    with ext4(tmp_path / "store", 8) as store:
        subprocess.run(["mount", "-o", "remount,ro", str(store)], check=True)
        assert bad(save(store)) == ["StoreReadOnly"]
        (finding,) = (one for one in store_access(context(store_access, writable=[str(store)])))
        assert isinstance(finding, Finding)
        assert finding.reason == "StoreReadOnly"


@needs_root
def test_job_that_may_not_write_where_root_may(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o055 != 0o055 and "pytest-" in str(above):
            above.chmod(0o755)
    assert bad(save(tmp_path)) == []
    assert bad(save(tmp_path, user="nobody")) == ["StoreNoPermission"]


@needs_root
def test_stale_handle(save: Callable[..., list[Finding]], context: Context, tmp_path: Path) -> None:
    with fuse(tmp_path / "store", {"MKDIR": "ESTALE", "OPENDIR": "ESTALE"}):
        assert bad(save(tmp_path / "store")) == ["StoreStale"]
        found = list(store_access(context(store_access, readable=[str(tmp_path / "store")])))
        assert [one.reason for one in found if isinstance(one, Finding)] == ["StoreStale"]


@needs_root
def test_server_of_a_mount_that_died(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    with fuse(tmp_path / "store", {}) as server:
        server.kill()
        server.wait()
        assert bad(save(tmp_path / "store")) == ["StoreStale"]


@needs_root
def test_writes_to_the_local_disk_beneath_are_not_taken_for_the_store(
    save: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    point = tmp_path / "store"
    with ext4(point, 8):
        assert bad(save(point, file_systems=["ext4"])) == []
    assert bad(save(point, file_systems=["ext4", "lustre"])) == ["StoreNotMounted"]
    assert list(point.iterdir()) == []


@needs_root
@pytest.mark.parametrize("operation", ["STATFS", "MKDIR", "WRITE", "FSYNC", "READ"])
def test_store_that_hangs_costs_no_more_than_its_time_and_the_step_is_named(
    operation: str, save: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    with fuse(tmp_path / "store", {operation: "hang"}):
        (finding,) = [one for one in save(tmp_path / "store", seconds=2.0) if one.status is not Status.PASS]
    assert finding.reason == "StoreHangs"
    step = {"STATFS": "check the free space", "MKDIR": "make a folder", "READ": "read back"}.get(
        operation, "write and flush"
    )
    assert step in finding.message


@needs_root
def test_process_that_the_kernel_holds_is_not_joined_by_another_one(context: Context, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with fuse(tmp_path / "store", {"OPENDIR": "hang"}):
        first = list(store_access(context(store_access, readable=[store], seconds=1.0)))
        evidence = [one for one in first if isinstance(one, Evidence)]
        (pid,) = [pid for pid, _ in evidence[0].data["stuck"].values()]
        assert Path(f"/proc/{pid}").exists()
        before = Previous(evidence=tuple(evidence), elapsed_seconds=60.0, boot_id=None)
        begun = time.monotonic()
        second = list(store_access(context(store_access, readable=[store], seconds=1.0, previous=before)))
        assert time.monotonic() - begun < 0.5
        (finding,) = [one for one in second if isinstance(one, Finding)]
        assert finding.reason == "StoreHangs"
        assert f"process {pid}" in finding.message
    (again,) = [one for one in second if isinstance(one, Evidence)]
    before = Previous(evidence=(again,), elapsed_seconds=60.0, boot_id=None)
    deadline = time.monotonic() + 20
    while (state := Path(f"/proc/{pid}")).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists()  # the server is gone, so the kernel let go of it
    third = store_access(context(store_access, readable=[str(tmp_path)], previous=before))
    assert {one.status for one in third if isinstance(one, Finding)} == {Status.PASS}


@needs_root
def test_checks_go_on_while_the_kernel_holds_a_process_in_a_store(tmp_path: Path) -> None:
    """By the runner: neither the worker nor the checks after it wait for what hangs."""
    params = {"store_access": {"readable": [str(tmp_path / "store")], "seconds": 1.0}}
    runner = Runner(RunnerSettings(params=params))
    plan = Plan(tier=Tier.PASSIVE, checks=("store_access", "memory_free"), executor="test")
    with fuse(tmp_path / "store", {"OPENDIR": "hang"}):
        for message in ("look at the mount: did not finish", "of an earlier run still hangs"):
            access, memory = asyncio.run(runner.run(plan))
            (finding,) = access.findings
            assert finding.reason == "StoreHangs"
            assert message in finding.message
            assert memory.status is Status.PASS
            assert runner.stuck() == ()


@needs_root
def test_stopped_server_is_a_hang_and_a_killed_child(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    with fuse(tmp_path / "store", {}) as server:
        server.send_signal(signal.SIGSTOP)
        (finding,) = save(tmp_path / "store", seconds=1.0)
        assert finding.reason == "StoreHangs"


@needs_root
def test_slow_store_has_a_speed_and_is_no_hang(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    limits = {"checkpoint_write_bytes_per_second": Limit(lower=50e6, upper=None, origin="baseline")}
    with fuse(tmp_path / "store", {"WRITE": 0.05}):
        assert bad(save(tmp_path / "store", size_bytes=32 << 20, limits=limits)) == ["StoreSlow"]


# --- over nodes -----------------------------------------------------------------------------------------------------


def exchange(root: Path, node: str, *peers: str, seconds: float = 60.0, wait: float = 0.3) -> list[tuple[str, str]]:
    """What one node says of the markers of its peers: (reason, message)."""
    from checks.stores.operations import FileStore
    from checks.stores.probes import exchange as run

    class Faults:
        def __init__(self) -> None:
            self.found: list[tuple[str, str]] = []

        def fault(self, reason: str, message: str) -> None:
            self.found.append((reason, message))

        def step(self, text: str) -> None: ...
        def reading(self, name: str, value: float) -> None: ...

    report: Any = Faults()
    order = {"node": node, "peers": peers, "marker_seconds": seconds, "wait_seconds": wait}
    run(FileStore(str(root)), order, report)
    found: list[tuple[str, str]] = report.found
    return found


def test_nodes_of_one_store_see_each_other_and_replace_their_own_marker(tmp_path: Path) -> None:
    assert exchange(tmp_path, "n1") == []
    assert exchange(tmp_path, "n2", "n1") == []
    assert exchange(tmp_path, "n1", "n1", "n2") == []
    assert sorted(path.name for path in (tmp_path / ".healthd-markers").iterdir()) == ["n1", "n2"]


def test_peer_is_seen_among_more_markers_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MOST_MARKERS", 2)
    for name in ("n1", "n2", "n3"):
        exchange(tmp_path, name)
    folder = tmp_path / ".healthd-markers"
    for name in (".nfs000000000001", "n0.0123abcd.part", "n1.4567cdef.part"):
        (folder / name).write_text("a part of a marker")
    assert exchange(tmp_path, "n9", "n3") == []
    assert exchange(tmp_path, "n9", "n1", "n2", "n3") == []


def test_folder_of_markers_that_leads_elsewhere_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/n1").write_text("of somebody")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/.healthd-markers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreFault, match="is a link"):
        exchange(tmp_path / "store", "n1")
    assert (tmp_path / "elsewhere/n1").read_text() == "of somebody"


def test_node_on_another_store_does_not_see_its_peer(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "local").mkdir()
    assert exchange(tmp_path / "shared", "n1") == []
    ((reason, message),) = exchange(tmp_path / "local", "n2", "n1")
    assert reason == "StoreNotShared"
    assert "n1" in message


def test_marker_that_is_not_whole_is_said_and_an_old_one_is_not_seen(tmp_path: Path) -> None:
    exchange(tmp_path, "n1")
    marker = tmp_path / ".healthd-markers/n1"
    whole = marker.read_bytes()
    marker.write_bytes(whole[:-100])
    ((reason, message),) = exchange(tmp_path, "n2", "n1")
    assert reason == "StoreNotShared"
    assert "of 65536 bytes" in message
    head, _, rest = whole.partition(b"\n")
    marker.write_bytes(json.dumps({**json.loads(head), "written_at": time.time() - 3600}).encode() + b"\n" + rest)
    ((reason, message),) = exchange(tmp_path, "n2", "n1")
    assert (reason, "under 60 s" in message) == ("StoreNotShared", True)


@needs_root
def test_not_visible_on_another_node(save: Callable[..., list[Finding]], tmp_path: Path) -> None:
    """Two nodes with one path; on the second one it is another file system (a bind mount of a local directory)."""
    for name in ("server", "other", "store"):
        (tmp_path / name).mkdir()
    with mounted(tmp_path / "store", "--bind", str(tmp_path / "server")) as store:
        exchange(store, "n1")
        assert bad(save(store, marker_seconds=60.0, peers=["n1"])) == []
    with mounted(tmp_path / "store", "--bind", str(tmp_path / "other")) as store:
        assert bad(save(store, marker_seconds=60.0, peers=["n1"], peers_wait_seconds=0.3)) == ["StoreNotShared"]


# --- data sets ------------------------------------------------------------------------------------------------------


def test_data_set_is_read_in_order_and_at_random(context: Context, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        (tmp_path / f"train/{number}.bin").write_bytes(os.urandom(300_000))
    found = [one for one in data_store(context(data_store, paths=[str(tmp_path)])) if isinstance(one, Finding)]
    assert bad(found) == []
    names = {item.name for one in found for item in one.measurements}
    assert names == {"data_sequential_bytes_per_second", "data_random_bytes_per_second", "data_random_read_seconds"}


def test_of_a_folder_with_very_many_files_no_more_are_looked_at_than_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is a question to the server: for a million of them the time would be up, and the store be blamed."""
    monkeypatch.setattr(probes, "_MOST_FILES", 5)
    for number in range(9):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
        (tmp_path / f"of-a-class-{number}").mkdir()
    looked: list[str] = []

    class Counting(FileStore):
        def folders(self, name: str) -> list[str]:
            looked.append(name)
            return super().folders(name)

    assert len(list(probes.find_files(Counting(str(tmp_path))))) == 5
    assert looked == []


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_hidden_files_take_no_place_of_the_data(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MOST_FILES", 5)
    for number in range(9):
        (tmp_path / f".{number}.swp").write_bytes(b"x")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/1.bin").write_bytes(b"xy")
    assert list(probes.find_files(open_store(f"{scheme}{tmp_path}"))) == [("data/1.bin", 2)]
    assert len(open_store(f"{scheme}{tmp_path}").sizes("")) == 9, "without a bound they are files as others"


def test_data_set_without_data_is_missing(context: Context, tmp_path: Path) -> None:
    found = [one for one in data_store(context(data_store, paths=[str(tmp_path)])) if isinstance(one, Finding)]
    assert bad(found) == ["StoreMissing"]
    (tmp_path / "empty").touch()
    found = [one for one in data_store(context(data_store, paths=[str(tmp_path)])) if isinstance(one, Finding)]
    assert bad(found) == ["StoreMissing"]
    assert "empty" in found[0].message
