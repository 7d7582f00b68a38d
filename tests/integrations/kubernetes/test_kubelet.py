"""Pods by the kubelet's pod resources: over real gRPC on a Unix socket, and the bytes by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.integrations.kubernetes import kubelet
from healthd.node.occupancy.model import Reading
from healthd.node.occupancy.occupancy import Schedulers
from healthd.node.settings import AllocationSettings
from tests.node.allocation_kit import claim, devices, field, is_here, kubelet_at, pod
from tests.node.node_kit import MovedClock

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")

TRAINING = pod("train-0", "ml", devices("cpu-plugin/x", "a"), devices("aws.amazon.com/neuron", "0", "1"))
PLAIN = pod("web", "default", devices("example.com/fuse", "f1"), b"")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def read(root: Path, seconds: float = 5.0) -> Reading:
    return kubelet.read(root, None, seconds)


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("proc/7/comm", "kubelet\n", "process 7 (kubelet)"),
        ("var/lib/kubelet/config.yaml", "", "/var/lib/kubelet/config.yaml"),
    ],
)
def test_it_is_found_by_its_process_or_files(tmp_path: Path, path: str, content: str, why: str) -> None:
    assert is_here(tmp_path, path, content, kubelet.SCHEDULER) == f"Kubernetes is on this host: {why}"


def test_a_pod_that_sees_nothing_of_the_host_knows_who_started_it(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    asked = Schedulers(AllocationSettings(), tmp_path, clock=MovedClock().clock, environ=environ)
    found = asyncio.run(asked.look())
    assert [reading.scheduler for reading in found.readings] == ["Kubernetes"]
    assert "mount the host's /var/lib/kubelet/pod-resources" in found.unseen


def test_pods_with_devices_are_seen_over_real_grpc(short: Path) -> None:
    efa = pod("nccom", "test", devices("vpc.amazonaws.com/efa", "e0"))
    claimed = pod("dra", "ml", claim("big", "neuron.aws.com"))
    with kubelet_at(short / kubelet.SOCKET.lstrip("/"), lambda *_: TRAINING + PLAIN + efa + claimed):
        found = read(short)
    assert found.unseen == ""
    assert [(one.name, one.uses) for one in found.workloads or ()] == [
        ("pod:ml/train-0", "2 aws.amazon.com/neuron"),
        ("pod:test/nccom", "1 vpc.amazonaws.com/efa"),
        ("pod:ml/dra", "claim big of neuron.aws.com"),
    ]


def test_no_pod_is_an_answer_and_not_blindness(short: Path) -> None:
    with kubelet_at(short / kubelet.SOCKET.lstrip("/"), lambda *_: b""):
        assert read(short) == Reading(scheduler="Kubernetes", kind="pod", workloads=())


def test_large_answer_is_read_whole(short: Path) -> None:
    many = b"".join(
        pod(f"p{n}", "ml", devices("nvidia.com/gpu", *(f"GPU-{n}-{i}" * 40 for i in range(8)))) for n in range(2000)
    )
    assert len(many) > 5 << 20  # the library's own bound is 4 MiB
    with kubelet_at(short / kubelet.SOCKET.lstrip("/"), lambda *_: many):
        assert len(read(short).workloads or ()) == 2000


@pytest.mark.parametrize(
    "resource", ["aws.amazon.com/neuron", "aws.amazon.com/neuroncore", "aws.amazon.com/neurondevice", "nvidia.com/gpu"]
)
def test_every_name_of_a_device_counts(resource: str) -> None:
    (found,) = kubelet.parse_pods(pod("p", "n", devices(resource, "0")), {})
    assert found.uses == f"1 {resource}"


def test_uid_is_another_name_of_a_pod(tmp_path: Path) -> None:
    for name in ("ml_train-0_7d2c", "ml_twice_1", "ml_twice_2", "nonsense"):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)
    uids = kubelet.read_uids(tmp_path)
    assert uids == {"ml/train-0": "7d2c"}
    (found,) = kubelet.parse_pods(TRAINING, uids)
    assert found.names == ("pod:ml/train-0", "pod:7d2c")


def test_missing_socket_says_what_to_mount(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.workloads is None
    assert "mount the host's /var/lib/kubelet/pod-resources" in found.unseen


def test_socket_that_nobody_answers_is_blindness(short: Path) -> None:
    path = short / kubelet.SOCKET.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text("")
    found = read(short)
    assert found.workloads is None
    assert "UNAVAILABLE" in found.unseen


def test_silent_kubelet_is_bounded_in_time(short: Path) -> None:
    end = threading.Event()

    def wait(*_: object) -> bytes:
        end.wait(10)
        return b""

    with kubelet_at(short / kubelet.SOCKET.lstrip("/"), wait):
        found = read(short, 0.2)
        end.set()
    assert (found.workloads, "DEADLINE_EXCEEDED" in found.unseen) == (None, True)


def test_kubelet_without_the_call_is_blindness(short: Path) -> None:
    with kubelet_at(short / kubelet.SOCKET.lstrip("/"), lambda *_: b"", method="Other"):
        found = read(short)
    assert (found.workloads, "UNIMPLEMENTED" in found.unseen) == (None, True)


def test_nonsense_from_the_socket_is_blindness(short: Path) -> None:
    with kubelet_at(short / kubelet.SOCKET.lstrip("/"), lambda *_: TRAINING[:-3]):
        found = read(short)
    assert (found.workloads, "is not understood" in found.unseen) == (None, True)


def test_without_the_library_the_remedy_is_named(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short / kubelet.SOCKET.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text("")
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert read(short).unseen == "pods cannot be seen without grpcio; run 'pip install grpcio' in healthd's environment"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every socket")
def test_socket_without_the_right_to_it_names_root(short: Path) -> None:
    path = short / kubelet.SOCKET.lstrip("/")
    path.parent.mkdir(parents=True)
    path.touch(mode=0)
    assert "run healthd as root" in read(short).unseen


def test_own_pod_is_known_by_what_kubernetes_told_it(tmp_path: Path) -> None:
    assert kubelet.own_pods(tmp_path, {"HOSTNAME": "h"}) == frozenset()
    assert kubelet.own_pods(tmp_path, {"POD_NAME": "d", "POD_NAMESPACE": "sys"}) == {"pod:sys/d"}
    folder = tmp_path / "var/run/secrets/kubernetes.io/serviceaccount"
    folder.mkdir(parents=True)
    (folder / "namespace").write_text("sys\n")
    assert kubelet.own_pods(tmp_path, {"HOSTNAME": "d"}) == {"pod:sys/d"}


# --- bytes --------------------------------------------------------------------------------------------------------

names = st.text("abcdefgh-.", min_size=1, max_size=8)


@given(st.binary(max_size=200))
def test_any_bytes_are_pods_or_an_error(answer: bytes) -> None:
    with contextlib.suppress(kubelet.ProtobufError):
        kubelet.parse_pods(answer, {})


@given(names, names, st.integers(1, 64), st.data())
def test_cut_answer_never_hides_a_pod_silently(name: str, namespace: str, count: int, data: st.DataObject) -> None:
    answer = pod(name, namespace, devices("aws.amazon.com/neuron", *(str(index) for index in range(count))))
    (whole,) = kubelet.parse_pods(answer, {})
    assert (whole.name, whole.uses) == (f"pod:{namespace}/{name}", f"{count} aws.amazon.com/neuron")
    cut = answer[: data.draw(st.integers(1, len(answer) - 1))]
    with pytest.raises(kubelet.ProtobufError):
        kubelet.parse_pods(cut, {})


@given(st.integers(6, 1000), st.one_of(st.integers(0, 2**63), st.binary(max_size=20)))
def test_members_of_later_versions_change_nothing(number: int, value: int | bytes) -> None:
    extra = field(number, value)
    inner = field(1, "train-0") + field(2, "ml") + extra + field(3, devices("aws.amazon.com/neuron", "0") + extra)
    (found,) = kubelet.parse_pods(extra + field(1, inner), {})
    assert found.name == "pod:ml/train-0"


def test_retyped_member_is_an_error() -> None:
    with pytest.raises(kubelet.ProtobufError):
        kubelet.parse_pods(field(1, field(1, "p") + field(2, "n") + field(3, 7)), {})
