"""Profiles of slow probes: kept by the daemon within bounds, read at its socket, and what is left by a killed one."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from checks.contract import PROFILE_FORMAT, Profile
from healthd.cli.profiles import new_folder
from healthd.core import wire
from healthd.core.errors import ConfigError, UnreachableError
from healthd.node.http import control_socket
from healthd.node.http.control_socket import ProfileList, RefusedError
from healthd.node.settings import NodeSettings, ProfileSettings
from healthd.node.state.saving import ProfileFolder
from tests.cli.cli_kit import end, healthd, start
from tests.node.node_daemon_kit import until

DAY = 86400.0


def named(number: int) -> str:
    return f"matmul-fp32-cpu-0-20261123t0157{number:02d}z-{number:06x}"


def profile(number: int, content: bytes = b"x" * 100) -> Profile:
    return Profile(id=named(number), target="cpu:0", said="said", format=PROFILE_FORMAT, content=content)


class Time:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def folder(path: Path, time: Time | None = None, **settings: Any) -> ProfileFolder:
    return ProfileFolder(path / "profiles", ProfileSettings(**settings), clock=time or Time())


def fill(kept: ProfileFolder, time: Time, count: int) -> None:
    for number in range(count):
        time.now += 1.0
        assert kept.keep(profile(number))


def ids(kept: ProfileFolder) -> list[str]:
    return [record.id for record in kept.records()]


@pytest.mark.parametrize("bound", [{"count": 3}, {"max_bytes": 350}])
def test_the_oldest_go_where_there_are_too_many_or_too_large(tmp_path: Path, bound: dict[str, int]) -> None:
    time = Time()
    kept = folder(tmp_path, time, **bound)
    fill(kept, time, 6)
    assert ids(kept) == [named(5), named(4), named(3)]
    assert len(os.listdir(tmp_path / "profiles")) == 6
    assert kept.read(named(5)) == b"x" * 100
    assert kept.read(named(2)) is None


def test_what_is_too_old_is_not_shown_and_goes(tmp_path: Path) -> None:
    time = Time()
    kept = folder(tmp_path, time, age_seconds=DAY)
    fill(kept, time, 2)
    time.now += DAY + 0.5
    assert ids(kept) == []
    assert kept.read(named(1)) is None
    kept.keep(profile(7))
    assert ids(kept) == [named(7)]
    assert len(os.listdir(tmp_path / "profiles")) == 2


def test_a_clock_that_was_ahead_once_does_not_stop_the_keeping_of_profiles(tmp_path: Path) -> None:
    time = Time()
    kept = folder(tmp_path, time, count=2)
    time.now += 365 * DAY
    fill(kept, time, 2)
    time.now -= 365 * DAY
    for number in (2, 3, 4):
        time.now += 1.0
        assert kept.keep(profile(number))
    assert ids(kept) == [named(4), named(3)]


def test_a_link_in_the_place_of_a_profile_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "profiles" / f"{named(1)}.trace.json.gz").symlink_to(tmp_path / "secret")
    assert not folder(tmp_path).keep(profile(1))
    assert (tmp_path / "secret").read_text() == "kept"


def test_what_is_larger_than_all_may_be_is_not_kept_and_neither_is_any_with_count_0(tmp_path: Path) -> None:
    assert not folder(tmp_path, max_bytes=99).keep(profile(1))
    assert not folder(tmp_path, count=0).keep(profile(1))
    assert not (tmp_path / "profiles").exists()


def test_a_new_daemon_keeps_what_is_whole_and_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    time = Time()
    fill(folder(tmp_path, time), time, 3)
    place = tmp_path / "profiles"
    (place / f"{named(0)}.json").unlink()  # killed between the two files
    (place / f"{named(1)}.json").write_text("{half")
    (place / f".{named(8)}.json.new").write_text("{")
    (place / "notes.json").write_text("a person's")
    again = folder(tmp_path, time)
    again.tidy()
    assert ids(again) == [named(2)]
    assert sorted(os.listdir(place)) == [f"{named(2)}.json", f"{named(2)}.trace.json.gz", "notes.json"]


def test_a_folder_that_cannot_be_written_is_one_line_and_no_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file")
    kept = folder(tmp_path)
    assert not kept.keep(profile(1))
    assert not kept.keep(profile(2))
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/profiles: the profile cannot be kept: File exists"
    ]
    assert kept.records() == ()


@pytest.mark.parametrize("name", ["", "..", "../state", "matmul", "/etc/passwd", "a" * 300, named(1) + ".json"])
def test_only_the_id_of_a_kept_profile_is_read(tmp_path: Path, name: str) -> None:
    kept = folder(tmp_path)
    kept.keep(profile(1))
    assert kept.read(name) is None


SETTINGS = """
[node]
listen = "127.0.0.1:0"
checks = ["matmul"]
[checks.matmul]
sizes = [64, 64]
repeats = 1
[limits.matmul_flops_per_second]
lower = 1e30
"""


@pytest.mark.thorough
def test_a_slow_probe_of_a_daemon_has_its_profile_at_the_socket_and_in_the_bundle(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text(SETTINGS)
    sock = tmp_path / "run" / "node.sock"

    def slow() -> dict[str, str]:
        """Profiles that findings name, and their messages."""
        try:
            state = control_socket.node_state(sock)
        except UnreachableError:
            return {}
        found = [one for result in state.results for one in result.findings if one.reason == "SlowDevice"]
        assert all(one.profile for one in found)
        return {str(one.profile): one.message for one in found}

    running = start(tmp_path, "node", "--config", str(file))
    try:
        until(lambda: bool(slow()))
        named_by = slow()
        listed = wire.decode(control_socket.call(sock, "GET", "/v1/profiles"), ProfileList, what="answer")
        kept = {record.id: record for record in listed.profiles}
        assert named_by.keys() <= kept.keys()
        assert {record.target for record in kept.values()} == {"cpu:0", "cpu:1"}
        for name, message in named_by.items():
            assert message.endswith(kept[name].said)
            trace = json.loads(gzip.decompress(control_socket.call(sock, "GET", f"/v1/profiles/{name}")))
            assert {event["name"] for event in trace["traceEvents"]} >= {"aten::mm"}
        with pytest.raises(RefusedError, match="no profile 'matmul-1'"):
            control_socket.call(sock, "GET", "/v1/profiles/matmul-1")
    finally:
        running.terminate()
        end(running)
    said = healthd(tmp_path, "bundle", "--config", str(file), "--output", str(tmp_path / "bundle.tgz"))
    assert said.code == 0, said.err
    import tarfile

    with tarfile.open(tmp_path / "bundle.tgz") as archive:
        held = {name.removeprefix("healthd-bundle/") for name in archive.getnames()}
        listed = archive.extractfile("healthd-bundle/profiles.json")
        assert listed is not None
        shown = {record["id"] for record in json.load(listed)}
    assert named_by.keys() <= shown
    newest = {name for name in held if name.startswith("profiles/")}
    assert 0 < len(newest) <= 5
    assert newest <= {f"profiles/{name}.trace.json" for name in shown}


@pytest.mark.thorough
def test_profiles_on_demand_need_no_daemon_and_say_where_they_are(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("[checks.matmul]\nsizes = [64, 64]\n")
    place = tmp_path / "profiles"
    arguments = ("check", "matmul", "--config", str(file), "--profile", "--profile-dir", str(place), "--json")
    said = healthd(tmp_path, *arguments)
    assert said.code == 0, said.err
    findings = [one for result in said.json["results"] for one in result["findings"]]
    lines = said.err.splitlines()
    assert len(lines) == len(findings) == 4
    for one in findings:
        trace = place / f"{one['profile']}.trace.json.gz"
        assert json.loads(gzip.decompress(trace.read_bytes()))["otherData"]["target"] == one["target"]
        assert any(
            line.startswith(f"{trace}: {one['target']}: in one more run, most time was spent in aten::")
            for line in lines
        )
    again = healthd(tmp_path, *arguments)
    assert again.code == 2
    assert again.err == f"healthd: {place}: is not empty; name a new directory with --profile-dir\n"


@pytest.mark.thorough
def test_a_folder_on_demand_holds_profiles_whatever_the_daemon_keeps_and_says_why_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("[node.profiles]\ncount = 0\n[checks.matmul]\nsizes = [64, 64]\n")
    place = tmp_path / "profiles"
    arguments = ("check", "matmul", "--config", str(file), "--profile-dir", str(place), "--json")
    assert healthd(tmp_path, *arguments, "--tier", "heavy").code == 2
    assert not place.exists()
    said = healthd(tmp_path, *arguments)
    assert "nothing was profiled: no probe was slow (--profile profiles all)" in said.err
    assert len(healthd(tmp_path, *arguments, "--profile").err.splitlines()) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "profiles"
    place.mkdir()
    os.chown(place, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        new_folder(NodeSettings(name="a", state_dir=tmp_path, run_dir=tmp_path), place)


@pytest.mark.thorough
def test_without_a_place_for_profiles_a_slow_probe_says_its_sentence_and_names_none(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text(SETTINGS)
    said = healthd(tmp_path, "check", "matmul", "--config", str(file), "--json")
    assert said.code == 1
    found = [one for result in said.json["results"] for one in result["findings"]]
    assert {one["profile"] for one in found} == {None}
    assert all("; in one more run, most time was spent in aten::" in one["message"] for one in found)
