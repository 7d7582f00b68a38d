"""The one door to the machine: bounded, never waiting, and every failure has a reason."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from checks.host.machine import Host, HostError
from tests.hosts.machine import Machine
from tests.patience import PATIENCE


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def reason(call: object, *arguments: object, **named: object) -> str:
    """The reason with which a call is refused."""
    assert callable(call)
    with pytest.raises(HostError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return caught.value.reason


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_read_below_the_root_and_bounded(machine: Machine) -> None:
    assert machine.host.read("/etc/hostname") == "node-1\n"
    assert machine.host.read("/etc/hostname", max_bytes=4) == "node"
    machine.write("/x", b"\xff\x00a")
    assert machine.host.read("/x") == "\ufffd\x00a"


def test_what_is_not_there_or_is_no_file_has_a_reason_and_is_named(machine: Machine) -> None:
    for path in ("/nothing", "/etc"):
        with pytest.raises(HostError, match=path) as caught:
            machine.host.read(path)
        assert caught.value.reason == "NoData"
    assert reason(machine.host.listdir, "/nothing") == "NoData"
    assert reason(machine.host.readlink, "/etc/hostname") == "NoData"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; run as an ordinary user")
def test_what_may_not_be_read_says_so_with_a_remedy(machine: Machine) -> None:
    (machine.root / "etc/hostname").chmod(0)
    with pytest.raises(HostError, match="run as root") as caught:
        machine.host.read("/etc/hostname")
    assert caught.value.reason == "NoPermission"


def test_pipe_that_nobody_writes_to_is_not_waited_for(machine: Machine) -> None:
    os.mkfifo(machine.root / "pipe")
    start = time.monotonic()
    assert machine.host.read("/pipe") == ""
    writer = os.open(machine.root / "pipe", os.O_RDWR)
    try:
        assert reason(machine.host.read, "/pipe") == "NoData"
    finally:
        os.close(writer)
    assert time.monotonic() - start < 5 * PATIENCE


def test_names_are_sorted_and_matched_and_no_directory_has_none(machine: Machine) -> None:
    for name in ("b1", "a1", "c"):
        machine.write(f"/sys/class/x/{name}", "")
    assert machine.host.listdir("/sys/class/x") == ["a1", "b1", "c"]
    assert machine.host.glob("/sys/class/x", "*1") == ["/sys/class/x/a1", "/sys/class/x/b1"]
    assert machine.host.glob("/sys/class/none", "*") == []


def test_link_is_read_as_it_is_written_and_exists_though_it_leads_nowhere(machine: Machine) -> None:
    (machine.root / "link").symlink_to("/nowhere")
    assert machine.host.readlink("/link") == "/nowhere"
    assert machine.host.exists("/link")
    assert not machine.host.exists("/nowhere")


# --- programs ---------------------------------------------------------------------------------------------------------


def program(machine: Machine, script: str) -> None:
    machine.write("/bin/probe", f"#!/bin/sh\n{script}\n")
    (machine.root / "bin/probe").chmod(0o755)


def test_program_of_the_machine_comes_before_those_of_path_and_is_told_the_root(machine: Machine) -> None:
    program(machine, 'echo "$HEALTHD_HOST_ROOT $LC_ALL"; echo oops >&2; exit 3')
    done = machine.host.run(["probe"], timeout_seconds=10)
    assert done == (3, f"{machine.root} C\n", "oops\n")


def test_program_that_is_missing_or_cannot_start_is_a_missing_tool(machine: Machine) -> None:
    assert reason(machine.host.run, ["no-such-program"], timeout_seconds=1) == "MissingTool"
    machine.write("/bin/probe", b"\x7fELF nonsense")
    assert reason(machine.host.run, ["probe"], timeout_seconds=1) == "MissingTool"  # not executable
    (machine.root / "bin/probe").chmod(0o755)
    assert reason(machine.host.run, ["probe"], timeout_seconds=1) == "MissingTool"  # not for this machine


def test_program_that_hangs_is_a_timeout_that_names_it(machine: Machine) -> None:
    program(machine, "sleep 60")
    with pytest.raises(HostError, match=r"probe did not finish within 0\.3 s") as caught:
        machine.host.run(["probe"], timeout_seconds=0.3)
    assert caught.value.reason == "Timeout"


# --- the kernel -------------------------------------------------------------------------------------------------------


def test_machine_as_data_says_what_is_no_file(machine: Machine) -> None:
    host = machine.host
    assert host.file_system("/").available_bytes == 60_000_000_000
    assert host.clock().synchronized
    assert host.process_limit("nofile") == 65536
    assert host.process_limit("memlock") == float("inf")
    assert host.uptime_seconds() == 5000.0
    assert host.boot_id() == "5b0d2f0e-7f3c-4a55-9a43-0d6f1f6f2a10"
    assert host.resolve("node-1") == ["10.0.0.5"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"clock": 1, "file_systems": {"/": {"x": 1}}}', '{"clock": {}}']
)
def test_garbage_about_the_machine_is_no_data(text: str, machine: Machine) -> None:
    machine.write("/host.json", text)
    for call in (
        machine.host.clock,
        lambda: machine.host.file_system("/"),
        lambda: machine.host.process_limit("nofile"),
    ):
        assert reason(call) == "NoData"


def test_limit_of_which_nothing_is_said_is_no_data_never_unlimited(machine: Machine) -> None:
    machine.unsay("limits", "memlock")
    assert reason(machine.host.process_limit, "memlock") == "NoData"


def test_boot_that_has_no_name_is_none_and_uptime_that_is_no_number_is_no_data(machine: Machine) -> None:
    machine.write("/proc/sys/kernel/random/boot_id", "\n")
    assert machine.host.boot_id() is None
    for text in ("", "x y"):
        machine.write("/proc/uptime", text)
        assert reason(machine.host.uptime_seconds) == "NoData"


def test_unknown_name_does_not_resolve(machine: Machine) -> None:
    assert reason(machine.host.resolve, "nobody") == "NoData"


def test_this_machine_answers_for_itself() -> None:
    host = Host(None)
    assert host.file_system("/").size_bytes > 0
    assert reason(host.file_system, "/no/such/path") == "NoData"
    assert host.process_limit("nofile") > 0
    assert host.host_name() == socket.gethostname()
    assert host.resolve("127.0.0.1") == ["127.0.0.1"]
    assert host.uptime_seconds() > 0
