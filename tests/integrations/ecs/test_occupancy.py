"""Tasks by the introspection of the ECS agent: over real HTTP, and the bodies by themselves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.integrations.ecs import occupancy as ecs
from healthd.integrations.ecs.settings import EcsSettings
from healthd.node.occupancy.model import Look
from healthd.node.settings import AllocationSettings
from tests.every import every
from tests.integrations.ecs.ecs_kit import ARN, body, task
from tests.node.allocation_kit import http_server, is_here
from tests.patience import PATIENCE

MINE = "ab" * 32


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("proc/7/comm", "amazon-ecs-agen\n", "process 7 (amazon-ecs-agen)"),
        ("var/lib/ecs/data", "", "/var/lib/ecs"),
    ],
)
def test_it_is_found_by_its_process_or_files(tmp_path: Path, path: str, content: str, why: str) -> None:
    assert is_here(tmp_path, path, content, ecs.SCHEDULER) == f"ECS is on this host: {why}"


def test_the_url_is_a_setting(tmp_path: Path) -> None:
    with http_server(body(task())) as url:
        asked = AllocationSettings(integrations={"ecs": EcsSettings(url=url)})
        found = ecs.SCHEDULER.read(Look(root=tmp_path, processes=(), environ={}, settings=asked))
    assert [one.name for one in found.workloads or ()] == [f"ecs:{ARN}"]


@pytest.mark.parametrize(
    ("status", "counts"), [("RUNNING", True), ("PENDING", True), ("NEW", True), ("STOPPED", False)]
)
def test_task_counts_until_it_has_stopped(status: str, counts: bool) -> None:
    with http_server(body(task(status))) as url:
        found = ecs.read(url, (), 5.0)
    assert found.unseen == ""
    assert [one.name for one in found.workloads or ()] == ([f"ecs:{ARN}"] if counts else [])
    assert found.has_ended(f"ecs:{ARN}") is not counts
    assert not found.has_ended("ecs:a/other")


def test_task_is_known_by_its_id_and_family_too() -> None:
    (found,) = ecs.parse_tasks(body(task()), ())
    assert found.names == (f"ecs:{ARN}", "ecs:1f2a4f5c54ae4b2c9c35aa35fd1a3ec6", "ecs-family:train")


def test_own_task_does_not_count() -> None:
    answer = body(task(container=MINE, arn="a/1"), task(arn="a/2"))
    assert [one.name for one in ecs.parse_tasks(answer, {MINE})] == ["ecs:a/2"]
    assert [one.name for one in ecs.parse_tasks(answer, {MINE[:12]})] == ["ecs:a/2"]


def test_own_container_is_found_in_control_groups_and_mounts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"9:memory:/ecs/1f2a/{MINE}\n0::/\n")
    other = "0c" * 32
    (tmp_path / "self/mountinfo").write_text(
        f"1 2 8:1 /var/lib/docker/overlay2/{'ee' * 32} / rw\n"
        f"3 2 8:1 /var/lib/docker/containers/{other}/hosts /etc/hosts rw\n"
    )
    assert ecs.own_containers(tmp_path, MINE[:12]) == {MINE, other, MINE[:12]}
    assert ecs.own_containers(tmp_path / "none", "ip-10-0-0-1") == frozenset()


def test_containers_of_the_host_are_not_ours_where_we_run_on_the_host(tmp_path: Path) -> None:
    """Docker mounts memory for each container in the host's own tree; a job of those tasks must not be overlooked."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/system.slice/healthd.service\n")
    (tmp_path / "self/mountinfo").write_text(
        f"412 29 0:61 / /var/lib/docker/containers/{'cd' * 32}/mounts/shm rw,nosuid - tmpfs shm rw,size=65536k\n"
        f"413 29 8:1 /var/lib/docker/containers/{'cd' * 32}/x /mnt/logs rw - ext4 /dev/sda1 rw\n"
        "cut\n"
    )
    own = ecs.own_containers(tmp_path, "ip-10-0-0-1")
    assert own == frozenset()
    assert len(ecs.parse_tasks(body(task()), own)) == 1


@every(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"Tasks": null}',
        b'{"Tasks": [null]}',
        b'{"Tasks": [{"Arn": "a"}]}',
        b'{"Tasks": [{"KnownStatus": "STOPPED"}]}',
        body(task())[:-9],
        b"[" * 50_000 + b"]" * 50_000,
    ],
)
def test_answer_of_another_form_is_blindness(answer: bytes) -> None:
    with http_server(answer) as url:
        found = ecs.read(url, (), 5.0)
    assert found.workloads is None
    assert "is not understood" in found.unseen


@pytest.mark.parametrize("status", [204, 301, 404, 500])
def test_any_other_status_is_blindness(status: int) -> None:
    answer = b"" if status == 204 else body()
    with http_server(answer, status=status, headers=[("Location", "/v1/other")]) as url:
        found = ecs.read(url, (), 5.0)
    assert (found.workloads, f"HTTP {status}" in found.unseen) == (None, True)


def test_endless_answer_is_cut() -> None:
    with http_server(b" " * (ecs.MAX_BODY_BYTES + 1)) as url:
        found = ecs.read(url, (), 5.0)
    assert (found.workloads, "more than" in found.unseen) == (None, True)


def test_agent_that_is_away_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = ecs.read(f"http://127.0.0.1:{port}", (), 5.0)
    assert found.workloads is None
    assert "node.allocations.ecs_url" in found.unseen


def test_address_that_is_none_is_blindness() -> None:
    assert ecs.read("http://[", (), 1.0).workloads is None


def test_agent_that_drips_is_left_in_time() -> None:
    end = threading.Event()

    def drip(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not end.wait(0.02):
                peer.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        began = time.monotonic()
        found = ecs.read(f"http://127.0.0.1:{server.getsockname()[1]}", (), 0.3)
        took = time.monotonic() - began
        end.set()
        thread.join()
    assert (found.workloads, took < 5 * PATIENCE) == (None, True)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_task_whose_members_changed_is_seen_or_blindness_but_never_lost(data: st.DataObject) -> None:
    one = task()
    for name in data.draw(st.sets(st.sampled_from(sorted(one)))):
        if data.draw(st.booleans()):
            del one[name]
        else:
            one[name] = data.draw(values)
    one.update(data.draw(st.dictionaries(st.sampled_from(["Extra", "Tags", "x"]), values, max_size=2)))
    if one.get("KnownStatus") == "STOPPED":
        return
    try:
        found = ecs.parse_tasks(body(one), (MINE,))
    except ecs.NotUnderstoodError:
        return
    assert [each.name for each in found] == [f"ecs:{one['Arn']}"]
