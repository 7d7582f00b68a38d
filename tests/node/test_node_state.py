"""What the daemon knows and what survives it: stamps, history, allocation, the state file, damaged and full disks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from pathlib import Path

import pytest

from checks.contract import Status, Tier
from healthd.core import wire
from healthd.core.model import Health, Quarantine
from healthd.node.http.health import Question, readiness, readiness_document
from healthd.node.occupancy.model import allocations, describe
from healthd.node.state import files
from healthd.node.state.saving import StateFile, StateSaver
from healthd.node.state.store import NodeStore, digest_of
from healthd.runner.settings import Survey
from tests.aggregator.cluster import full_disk
from tests.node.node_kit import BOOT, MovedClock, finding, lease, result, settings, specs, survey
from tests.patience import PATIENCE


def book(folder: Path, time: MovedClock | None = None, *, boot_id: str | None = BOOT) -> NodeStore:
    return NodeStore(settings(folder), specs(), clock=(time or MovedClock()).clock, boot_id=boot_id)


def filled(folder: Path, time: MovedClock) -> NodeStore:
    one = book(folder, time)
    one.set_survey(survey())
    for name in ("disk", "load"):
        one.record(result(name))
    one.record(result("matmul", tier=Tier.QUICK))
    return one


def test_rival_fault_11_before_the_first_check_a_node_is_unknown_never_healthy(tmp_path: Path) -> None:
    state = book(tmp_path).snapshot()
    assert state.health is Health.UNKNOWN
    assert state.reasons[0].code == "NotYetRun"
    one = book(tmp_path)
    one.set_survey(survey())
    one.record(result("disk"))
    assert one.snapshot().health is Health.UNKNOWN


def test_rival_fault_15_a_result_past_its_age_is_unknown_and_says_how_old_it_is(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    assert one.snapshot().health is Health.HEALTHY
    time.move(100)
    state = one.snapshot()
    assert (state.health, state.reasons[0].code) == (Health.UNKNOWN, "Stale")
    assert state.reasons[0].message == "disk: last run 100 s ago; at most 95 s is allowed"


def test_clock_of_the_wall_moves_no_age(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    time.wall_offset -= 10 * 365 * 86400
    time.move(5)
    assert {r.age_seconds for r in one.snapshot().results} == {5.0}
    assert one.snapshot().health is Health.HEALTHY


def test_rival_fault_9_same_input_same_snapshot(tmp_path: Path) -> None:
    first, second = filled(tmp_path, MovedClock()), filled(tmp_path, MovedClock())
    assert wire.encode(first.snapshot()) == wire.encode(second.snapshot())
    assert first.snapshot() is first.snapshot()


def test_busy_never_replaces_evidence(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    time.move(50)
    one.record(result("matmul", finding(Status.SKIP, "Busy"), tier=Tier.QUICK))
    kept = one.result("matmul")
    assert kept is not None
    assert (kept.result.status, kept.as_of(time.at).age_seconds) == (Status.PASS, 50.0)


def test_a_fault_stands_while_its_device_cannot_be_looked_at(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    one.record(result("matmul", finding(Status.FAIL, target="cpu:0"), finding(target="cpu:1"), tier=Tier.QUICK))
    for _ in range(2):
        time.move(50)
        partly = finding(Status.UNKNOWN, "Busy", "cpu:0"), finding(target="cpu:1")
        one.record(result("matmul", *partly, tier=Tier.QUICK))
    stamped = one.result("matmul")
    assert stamped is not None
    assert [(f.target, f.status) for f in stamped.result.findings] == [
        ("cpu:0", Status.UNKNOWN),
        ("cpu:1", Status.PASS),
        ("cpu:0", Status.FAIL),
    ]
    assert (stamped.result.status, stamped.as_of(time.at).age_seconds) == (Status.FAIL, 100.0)
    one.record(result("matmul", finding(target="cpu:0"), finding(Status.UNKNOWN, "Busy", "cpu:1"), tier=Tier.QUICK))
    stamped = one.result("matmul")
    assert stamped is not None
    assert stamped.result.status is Status.UNKNOWN, "the device that failed was looked at"
    assert stamped.as_of(time.at).age_seconds == 0.0


def test_a_passive_check_that_sees_who_is_busy_has_looked(tmp_path: Path) -> None:
    one = filled(tmp_path, MovedClock())
    one.record(result("disk", finding(Status.FAIL, target="cuda:0")))
    one.record(result("disk", finding(Status.UNKNOWN, "Busy", "cuda:1")))
    stamped = one.result("disk")
    assert stamped is not None
    assert stamped.result.status is Status.UNKNOWN


def test_devices_that_a_job_kept_from_being_looked_at_say_nothing_while_it_runs(tmp_path: Path) -> None:
    one = filled(tmp_path, MovedClock())
    partly = finding(Status.UNKNOWN, "Busy", "cpu:0"), finding(target="cpu:1")
    one.record(result("matmul", *partly, tier=Tier.QUICK))
    assert one.snapshot().health is Health.UNKNOWN
    one.set_survey(survey(holders=("pid 7 (python)",)))
    assert one.snapshot().health is Health.HEALTHY
    one.record(result("matmul", *partly, finding(Status.UNKNOWN, target="cpu:2"), tier=Tier.QUICK))
    assert one.snapshot().health is Health.UNKNOWN


def test_history_keeps_failures_longest(tmp_path: Path) -> None:
    one = book(tmp_path)
    one.record(result("disk", finding(Status.FAIL)))
    for _ in range(40):
        one.record(result("disk"))
    history = one.history("disk")
    assert len(history) == 17
    assert history[-1].status is Status.FAIL


def test_a_survey_is_as_old_as_its_look_and_an_older_one_replaces_no_newer_one(tmp_path: Path) -> None:
    time = MovedClock()
    one = book(tmp_path, time)
    began = time.at
    time.move(8)
    one.set_survey(survey(holders=("pid 7 (python)",), looked_at=began + 5))
    assert one.surveyed_at == began + 5
    one.set_survey(survey(holders=(), looked_at=began))
    assert (one.surveyed_at, one.holders) == (began + 5, ("pid 7 (python)",))
    one.set_survey(survey(holders=(), looked_at=began + 6))
    assert (one.surveyed_at, one.holders) == (began + 6, ())
    one.set_survey(survey(looked_at=began + 100))
    assert one.surveyed_at == time.at, "no look is ahead of the clock"


# --- who has the devices ----------------------------------------------------------------------------------------------


def test_not_looked_at_and_not_to_be_seen_both_count_as_taken() -> None:
    assert [a.by for a in allocations(surveyed=False, holders=(), leases=())] == ["unseen"]
    assert [a.by for a in allocations(surveyed=True, holders=None, leases=())] == ["unseen"]
    assert allocations(surveyed=True, holders=(), leases=()) == ()


def on_gpus(seen: Survey) -> Survey:
    return dataclasses.replace(seen, inventory=dataclasses.replace(seen.inventory, accelerator="cuda"))


def test_devices_with_a_process_that_only_their_driver_shows_count_as_taken(tmp_path: Path) -> None:
    checks = (*specs(), dataclasses.replace(specs()[0], name="gpu_driver"))
    one = NodeStore(settings(tmp_path), checks, clock=MovedClock().clock, boot_id=BOOT)
    one.set_survey(on_gpus(survey()))
    one.record(result("gpu_driver"))
    assert (one.holders, one.allocated) == ((), ())
    one.record(result("gpu_driver", finding(Status.UNKNOWN, "Busy", "cuda:1")))
    assert one.holders is None
    assert [claim.by for claim in one.allocated] == ["unseen"]
    one.set_survey(on_gpus(survey(holders=("cuda:0: pid 7 (python)",))))
    assert [claim.by for claim in one.allocated] == ["process"]  # who is seen is named
    one.record(result("gpu_driver", finding(Status.UNKNOWN, "NoData")))
    one.set_survey(on_gpus(survey()))
    assert one.allocated == ()


def test_holders_leases_and_the_scheduler_all_count_and_many_are_summed_up() -> None:
    found = allocations(surveyed=True, holders=[f"pid {n}" for n in range(20)], leases=[lease()], scheduled=["pod x"])
    assert [a.by for a in found] == ["process"] * 9 + ["scheduler", "lease"]
    assert found[8].holder == "and 12 more"
    assert describe(found) == "pid 0 and 10 more"


def test_allocated_node_stays_healthy_while_its_active_evidence_ages(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    one.set_survey(survey(holders=("cpu:0: pid 7 (python)",)))
    time.move(3 * 86400)
    for name in ("disk", "load"):
        one.record(result(name))
    assert one.snapshot().health is Health.HEALTHY
    one.set_survey(survey())
    assert one.snapshot().reasons[0].code == "Stale"


# --- the state file ---------------------------------------------------------------------------------------------------


def test_restarted_daemon_knows_what_the_earlier_one_knew_with_its_true_age(tmp_path: Path) -> None:
    time = MovedClock()
    StateFile(filled(tmp_path, time), tmp_path / "state.json").save()
    time.move(30)
    again = book(tmp_path, time)
    StateFile(again, tmp_path / "state.json").restore()
    again.set_survey(survey())
    assert again.snapshot().health is Health.HEALTHY
    assert {r.age_seconds for r in again.snapshot().results} == {30.0}


async def test_a_fault_is_saved_while_its_run_goes_on_so_that_no_older_pass_counts_after_a_restart(
    tmp_path: Path,
) -> None:
    time = MovedClock()
    first, path = filled(tmp_path, time), tmp_path / "state.json"
    StateFile(first, path).save()
    saved = asyncio.Event()
    running = asyncio.create_task(StateSaver(first, settings(tmp_path), saved.set).run())
    first.set_running("quick")
    first.record(result("matmul", finding(Status.FAIL), tier=Tier.QUICK))
    async with asyncio.timeout(5.0 * PATIENCE):
        await saved.wait()
    running.cancel()
    again = book(tmp_path, time)
    StateFile(again, path).restore()
    again.set_survey(survey())
    assert again.snapshot().health is Health.UNHEALTHY


@pytest.mark.parametrize("boot_id", ["boot-2", None])
def test_results_of_another_boot_are_history_and_no_evidence(tmp_path: Path, boot_id: str | None) -> None:
    StateFile(filled(tmp_path, MovedClock()), tmp_path / "state.json").save()
    again = book(tmp_path, MovedClock(5000.0), boot_id=boot_id)
    StateFile(again, tmp_path / "state.json").restore()
    assert again.snapshot().results == ()
    assert again.snapshot().health is Health.UNKNOWN
    assert len(again.history("disk")) == 1


def test_stamps_ahead_of_the_clock_and_injected_results_are_no_evidence_after_a_restart(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    one.record(result("load", finding(Status.FAIL), injected=True))
    StateFile(one, tmp_path / "state.json").save()
    again = book(tmp_path, time)
    StateFile(again, tmp_path / "state.json").restore()
    assert again.result("load") is None
    early = book(tmp_path, MovedClock(10.0))
    StateFile(early, tmp_path / "state.json").restore()
    assert early.snapshot().results == ()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b'{"version": 1}', b"[]", b'{"version":1,"results":"x"}'])
def test_damaged_state_file_is_set_aside_in_one_line_and_stops_nobody(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    one = book(tmp_path)
    StateFile(one, path).restore()
    assert not path.exists()
    assert (tmp_path / "state.json.damaged").read_bytes() == content
    assert len(caplog.messages) == 1
    assert "moved to state.json.damaged" in caplog.text
    StateFile(one, path).save()
    assert path.exists()


def test_full_disk_is_one_line_the_old_file_stays_and_the_daemon_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    one = filled(tmp_path, MovedClock())
    full = StateFile(one, Path("/dev/full/state.json"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            full.save()
    assert len(caplog.messages) == 1
    assert "cannot be written" in caplog.messages[0]
    path = tmp_path / "state.json"
    StateFile(one, path).save()
    before = path.read_bytes()
    (tmp_path / ".state.json.new").mkdir()  # the new file cannot be made, so the old one must stay
    StateFile(one, path).save()
    assert path.read_bytes() == before


def test_node_whose_state_directory_cannot_be_written_is_not_ready_until_it_can(tmp_path: Path) -> None:
    one = filled(tmp_path, MovedClock())
    file = StateFile(one, tmp_path / "state.json")
    blocked = tmp_path / ".state.json.new"
    blocked.mkdir()
    file.save()
    ready, text = readiness_document(one.snapshot(), readiness(one.snapshot(), unwritable=one.unwritable), Question())
    assert not ready
    assert text == f"leases: no lease can be stored: {tmp_path}: Is a directory; make it writable\nn1 is not ready\n"
    blocked.rmdir()
    file.save()
    assert readiness_document(one.snapshot(), readiness(one.snapshot(), unwritable=one.unwritable), Question())[0]


@pytest.mark.system(root=True)  # mounting a file system
def test_directory_on_a_full_disk_is_used_and_said_and_gets_no_litter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk(tmp_path / "small") as place, caplog.at_level(logging.ERROR):
        for _ in range(3):
            files.prepare(place)
        assert [path.name for path in place.iterdir()] == ["ballast"]
    assert "No space left on device; free some space" in caplog.messages[0]


def test_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(files.StateDirError, match=r"cannot be written: .*; make it writable or name another"):
        files.prepare(tmp_path / "file" / "state")


def test_node_key_is_made_once_and_for_the_owner_alone(tmp_path: Path) -> None:
    key = files.node_key(tmp_path)
    assert files.node_key(tmp_path) == key
    assert len(key) == 64
    assert os.stat(tmp_path / "node.key").st_mode & 0o777 == 0o600
    (tmp_path / "node.key").write_text("nonsense")
    assert len(files.node_key(tmp_path)) == 64


# --- the digest -------------------------------------------------------------------------------------------------------


def test_digest_ignores_ages_times_and_measured_values_and_nothing_that_decides(tmp_path: Path) -> None:
    time = MovedClock()
    one = filled(tmp_path, time)
    before = digest_of(one.snapshot())
    time.move(20)
    one.record(dataclasses.replace(result("disk"), duration_seconds=9.0, started_at=5.0))
    assert digest_of(one.snapshot()) == before
    seen = {before}
    for change in (
        lambda: one.set_faults(("disk=fail",)),
        lambda: one.record(result("disk", finding(Status.WARN))),
        lambda: one.record(result("disk", injected=True)),
        lambda: one.record(result("matmul", tier=Tier.DEEP)),
        lambda: one.set_survey(survey(holders=None)),
        lambda: one.set_leases(((lease(), 0.0),)),
        lambda: one.set_running("quick"),
        lambda: time.move(100),  # stale now
    ):
        change()
        seen.add(digest_of(one.snapshot()))
    assert len(seen) == 9


def test_quarantine_survives_a_restart_and_a_reboot(tmp_path: Path) -> None:
    word = Quarantine(reason="link flaps", owner="ops", owner_kind="person", since=1.0, until=None)
    one = book(tmp_path)
    one.set_quarantine(word)
    StateFile(one, tmp_path / "state.json").save()
    for boot_id in (BOOT, "another boot"):
        again = book(tmp_path, boot_id=boot_id)
        StateFile(again, tmp_path / "state.json").restore()
        assert again.snapshot().quarantine == word
