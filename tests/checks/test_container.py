"""What is taken for a container: each sign of one, and hosts that look like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.host.container import has_own_dev, in_container
from checks.host.machine import Host
from healthd.cli.support.recording import record
from tests.hosts.machine import Machine

CONTAINER = "4026532512"


@pytest.fixture
def host(tmp_path: Path) -> Machine:
    """A host that systemd has booted, with its own namespaces."""
    machine = Machine(tmp_path / "machine")
    for kind, number in (("pid", "4026531836"), ("user", "4026531837")):
        in_namespace(machine, kind, number)
    machine.write("/run/systemd/system/.keep", "")
    (machine.root / "proc/1").mkdir(parents=True, exist_ok=True)
    (machine.root / "proc/1/root").symlink_to("../..")
    assert not in_container(machine.host)
    return machine


def in_namespace(machine: Machine, kind: str, number: str) -> None:
    place = machine.root / "proc/self/ns" / kind
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(f"{kind}:[{number}]")


def root_on(machine: Machine, kind: str) -> None:
    machine.remove("/proc/self/mountinfo")
    machine.write("/proc/self/mountinfo", f"21 1 0:30 / / rw,relatime shared:1 - {kind} source rw\n")


@pytest.mark.parametrize(
    "mark", ["/.dockerenv", "/run/.containerenv", "/run/systemd/container", "/.singularity.d/runscript"]
)
@pytest.mark.parametrize("kind", ["ext4", "overlay", "btrfs", "zfs", "squashfs"])
def test_mark_of_a_runtime_is_enough_on_any_root(mark: str, kind: str, host: Machine) -> None:
    root_on(host, kind)
    assert not in_container(host.host)
    host.write(mark, "")
    assert in_container(host.host)


@pytest.mark.parametrize("kind", ["pid", "user"])
def test_namespace_that_is_not_the_machines_is_enough(kind: str, host: Machine) -> None:
    root_on(host, "ext4")  # of a snapshotter without layers, LXC, or enroot with an image that is unpacked
    in_namespace(host, kind, CONTAINER)
    assert in_container(host.host)


def test_root_that_is_not_the_first_processs_is_enough(host: Machine) -> None:
    (host.root / "proc/1/root").unlink()
    (host.root / "proc/1/root").mkdir()
    assert in_container(host.host)


def test_root_that_is_no_mount_is_enough(host: Machine) -> None:
    host.remove("/proc/self/mountinfo")
    host.write("/proc/self/mountinfo", "22 21 0:31 / /proc rw - proc proc rw\n")
    assert in_container(host.host)  # a chroot, also where the first process may not be looked into


def test_root_in_layers_of_a_host_that_systemd_has_booted_is_no_container(host: Machine) -> None:
    root_on(host, "overlay")
    assert not in_container(host.host)
    host.remove("/run/systemd")
    assert in_container(host.host)
    root_on(host, "ext4")
    assert not in_container(host.host)


def test_root_in_layers_of_a_users_program_is_a_container(host: Machine) -> None:
    root_on(host, "fuse.fuse-overlayfs")  # enroot, Apptainer; the host's /run may be seen in it
    assert in_container(host.host)


def test_what_is_not_told_is_no_sign_of_a_container(host: Machine) -> None:
    host.remove("/proc/self")
    host.remove("/proc/1")
    assert not in_container(host.host)


def test_pod_with_the_hosts_run_and_processes_is_known_by_its_variable(
    host: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root_on(host, "overlay")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert in_container(Host(None))
    assert not in_container(host.host)  # a machine as data has no variables of ours


def test_dev_of_the_host_is_not_a_containers_own(host: Machine, tmp_path: Path) -> None:
    def mounted(kind: str) -> None:
        root_on(host, "overlay")
        mounts = host.host.read("/proc/self/mountinfo")
        host.remove("/proc/self/mountinfo")
        host.write("/proc/self/mountinfo", f"{mounts}22 21 0:31 / /dev rw - {kind} {kind} rw\n")

    mounted("devtmpfs")
    assert not has_own_dev(host.host)
    host.write("/.dockerenv", "")
    assert not has_own_dev(host.host)
    record(host.host, tmp_path / "recorded")
    assert not has_own_dev(Host(tmp_path / "recorded"))
    mounted("tmpfs")
    assert has_own_dev(host.host)
    record(host.host, tmp_path / "again")
    assert has_own_dev(Host(tmp_path / "again"))


@pytest.mark.parametrize("container", [True, False])
def test_recording_says_what_its_machine_was(container: bool, host: Machine, tmp_path: Path) -> None:
    if container:
        in_namespace(host, "user", CONTAINER)
    else:
        root_on(host, "overlay")
    record(host.host, tmp_path / "recorded")
    assert in_container(Host(tmp_path / "recorded")) is container
