"""NVIDIA GPUs: found and seen held on a tree of the driver's shape; bound and probed where there is a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import DeviceMissingError, cuda, detect
from checks.contract import Status, Tier
from checks.host.machine import Host
from checks.system.devices import device_count
from checks.worker.protocol import MAX_LINE_BYTES, encode
from healthd.runner.workers.outcome import explain
from tests.fakes.gpus import GpuMachine
from tests.hosts.machine import Machine
from tests.runner.runner_kit import run_checks

TREE = Path(__file__).parent.parent / "hosts" / "gpus"
FIRST = "proc/driver/nvidia/gpus/0000:10:1c.0/information"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda.present(Host(None)), reason="no NVIDIA GPU"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Its host's own processes are seen, the first among them."""
    place = Path(shutil.copytree(TREE, tmp_path / "machine"))
    (place / "proc/1").mkdir()
    lives_in(place, "pid:[4026531836]")
    return place


def process(root: Path, pid: int, command: str, *files: str, parent: int = 1) -> None:
    """A process that has files open, as /proc shows it."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text(f"{command}\n")
    (folder / "stat").write_text(f"{pid} ({command}) S {parent} 1 1 0\n")
    for number, file in enumerate(files):
        (folder / "fd" / str(number)).symlink_to(file)


def holders(root: Path, **options: Any) -> list[str] | None:
    host = Host(root)
    return cuda.holders(host, cuda.find(host, {}), options)


def test_gpus_are_found_in_the_order_of_the_bus_with_uuid_and_model(root: Path) -> None:
    found = json.loads(json.dumps(cuda.find(Host(root), {})))
    assert (found["accelerator"], found["device_count"]) == ("cuda", 2)
    assert [(d["target"], d["serial"][:12], d["kind"], d["minor"]) for d in found["devices"]] == [
        ("cuda:0", "GPU-6a1c9b1e", "NVIDIA H100 80GB HBM3", 1),
        ("cuda:1", "GPU-0d2e7f30", "NVIDIA H100 80GB HBM3", 0),
    ]
    assert detect(Host(root)) is sys.modules["checks.accelerators.cuda"]


def on_bus(machine: Machine, address: str, *, vendor: str = "0x10de", kind: str = "0x030200", driver: str = "") -> None:
    """A device on the PCI bus, as sysfs shows it."""
    folder = f"/sys/bus/pci/devices/{address}"
    machine.write(f"{folder}/vendor", f"{vendor}\n")
    machine.write(f"{folder}/class", f"{kind}\n")
    if driver:
        (machine.root / folder.lstrip("/") / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")


@pytest.mark.parametrize("kind", ["0x030200", "0x030000"])
def test_gpu_on_the_bus_without_a_driver_makes_no_cpu_node_and_fails(kind: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    on_bus(machine, "0000:10:1c.0", kind=kind)
    results = run_checks("device_count", "memory_free", accelerator="auto", host_root=machine.root, directories=())
    found = [(item.status, item.reason, item.target) for item in results["device_count"].findings]
    assert found == [(Status.FAIL, "MissingDriver", "pci:0000:10:1c.0")]


def test_gpu_that_its_driver_left_fails_beside_those_that_it_has(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=2, instance_type=None)
    on_bus(machine, "0000:53:00.0", driver="nvidia")
    on_bus(machine, "0000:63:00.0")  # the driver shows it: its link was not recorded
    on_bus(machine, "0000:aa:00.0")
    (finding,) = [item for item in machine.findings(device_count) if item.status is not Status.PASS]
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "MissingDriver", "pci:0000:aa:00.0")


def test_machine_without_a_gpu_for_its_jobs_is_a_cpu_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    assert not cuda.present(machine.host)
    on_bus(machine, "0000:00:01.0", driver="vfio-pci")  # of a virtual machine
    on_bus(machine, "0000:00:02.0", driver="nouveau")
    on_bus(machine, "0000:00:03.0", kind="0x040300")  # the sound of a GPU
    on_bus(machine, "0000:00:04.0", kind="0x068000")  # an NVSwitch
    on_bus(machine, "0000:00:05.0", vendor="0x1d0f")  # Amazon's
    assert not cuda.present(machine.host)
    assert detect(machine.host) is sys.modules["checks.accelerators.cpu"]


def test_container_has_the_gpus_whose_files_it_was_given_though_proc_shows_all_of_the_host(root: Path) -> None:
    def targets() -> list[tuple[str, int | None]]:
        return [(device["target"], device["minor"]) for device in cuda.find(Host(root), {})["devices"]]

    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/nvidia0").touch()
    assert targets() == [("cuda:0", 1), ("cuda:1", 0)]  # on the host a file that is missing is a fault
    (root / ".dockerenv").touch()
    assert targets() == [("cuda:0", 0)]
    mounts = root / "proc/self/mountinfo"
    mounts.parent.mkdir(exist_ok=True)
    mounts.write_text("22 21 0:6 / /dev rw - devtmpfs udev rw\n")  # the host's /dev: a missing file is a fault there
    assert targets() == [("cuda:0", 1), ("cuda:1", 0)]
    mounts.unlink()
    (root / "dev/nvidia0").unlink()
    assert targets() == [("cuda:0", 1), ("cuda:1", 0)]
    (root / "dev/nvidia0").touch()
    (root / FIRST).unlink()  # which file it has is not known
    assert targets() == [("cuda:0", None), ("cuda:1", 0)]


@pytest.mark.parametrize(
    "words",
    [
        "AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later",
        "misc/strongstream.cc:395 NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'",
        "AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
        "transport/p2p.cc:275 NCCL WARN Cuda failure 220 'uncorrectable NVLink error detected during the execution'",
    ],
)
def test_bad_memory_or_link_of_a_gpu_is_the_gpus_fault_and_other_errors_of_cuda_may_be_the_programs(words: str) -> None:
    reason, message, action = explain("CheckError", words, "")
    assert (reason, action) == ("DeviceLost", None)
    assert words.splitlines()[0] in message
    assert explain("Crashed", "killed by SIGABRT", words)[0] == "DeviceLost"
    for other in ("CUDA error: an illegal memory access was encountered", "CUDA out of memory"):
        assert explain("CheckError", other, "")[0] == "CheckError"


def test_what_proc_does_not_say_is_none_never_zero(root: Path) -> None:
    found = cuda.find(Host(root), {})
    assert found["memory_bytes"] is None
    assert found["core_count"] is None
    assert "expected_device_count" not in found  # what the machine should have is not what it has


def test_machine_without_the_driver_is_not_detected_and_has_no_gpu(root: Path) -> None:
    shutil.rmtree(root / "proc/driver")
    assert not cuda.present(Host(root))
    assert cuda.find(Host(root), {})["device_count"] == 0


def test_gpu_that_the_driver_has_not_started_has_no_serial_yet(root: Path) -> None:
    page = root / FIRST
    page.write_text(
        page.read_text().replace("GPU-6a1c9b1e-5d0f-4b53-9c41-1f2f3a4b5c6d", "GPU-????????-????-????-????-????????????")
    )
    assert cuda.find(Host(root), {})["devices"][0]["serial"] is None


def test_excluded_gpu_is_no_device(root: Path) -> None:
    page = root / FIRST
    page.write_text(page.read_text().replace("GPU Excluded:\t No", "GPU Excluded:\t Yes"))
    assert [device["serial"][:12] for device in cuda.find(Host(root), {})["devices"]] == ["GPU-0d2e7f30"]


@pytest.mark.parametrize("text", [None, "", "Model\nGPU UUID: x\nDevice Minor: y\n", "\0\xff"])
def test_gpu_whose_page_is_gone_or_junk_still_counts_and_cannot_be_seen_to_be_free(
    root: Path, text: str | None
) -> None:
    page = root / FIRST
    page.unlink() if text is None else page.write_text(text)
    found = cuda.find(Host(root), {})
    assert found["device_count"] == 2
    assert (found["devices"][0]["serial"], found["devices"][0]["minor"]) == (None, None)
    assert holders(root) is None


def test_process_with_a_device_open_holds_it_by_minor_not_by_order(root: Path) -> None:
    assert holders(root) == []
    process(root, 900, "python", "/dev/null", "/dev/nvidia0", "/dev/nvidiactl")
    assert holders(root) == ["cuda:1: pid 900 (python)"]


def test_asking_after_gpus_and_looking_after_them_is_not_holding_them(root: Path) -> None:
    process(root, 901, "nvidia-smi", "/dev/nvidiactl")
    process(root, 902, "nvidia-persiste", "/dev/nvidia0", "/dev/nvidia1")
    process(root, 903, "nv-hostengine", "/dev/nvidia0")
    for pid, name in enumerate(("nvidia-device-p", "gpu-feature-dis", "nvidia-smi"), 904):  # 15 letters of each
        process(root, pid, name, "/dev/nvidia0", "/dev/nvidia1")
    assert holders(root) == []
    process(root, 910, "python", "/dev/nvidia0")
    assert holders(root) == ["cuda:1: pid 910 (python)"]


def lives_in(root: Path, namespace: str) -> None:
    """The machine's /proc as a process of this namespace sees it."""
    place = root / "proc/self/ns/pid"
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(namespace)


def test_process_of_another_container_is_out_of_sight_never_nobody(root: Path) -> None:
    lives_in(root, "pid:[4026532512]")
    process(root, 1, "healthd")
    assert holders(root) is None
    assert holders(root, in_job=True) == []  # what there is in a job's container was given to it
    process(root, 900, "python", "/dev/nvidia0")
    assert holders(root) == ["cuda:1: pid 900 (python)"]


def test_proc_that_hides_the_processes_of_others_does_not_show_that_devices_are_free(root: Path) -> None:
    """Mounted with hidepid=2, and we are not root: not even process 1 is there."""
    (root / "proc/1").rmdir()
    process(root, 4711, "healthd")
    assert holders(root) is None
    process(root, 1, "systemd")
    assert holders(root) == []


def test_caretaker_that_is_seen_does_not_hide_that_others_are_not(root: Path) -> None:
    lives_in(root, "pid:[4026532512]")
    process(root, 902, "nvidia-persiste", "/dev/nvidia0", "/dev/nvidia1")
    assert holders(root) is None


def test_large_job_on_all_gpus_of_a_node_fits_a_line(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=8)
    for pid in range(4_000_000, 4_000_256):
        process(machine.root, pid, "a-long-name-of-", *(f"/dev/nvidia{minor}" for minor in range(8)))
    found = cuda.find(machine.host, {})
    held = cuda.holders(machine.host, found, {})
    assert held is not None
    assert held[-1] == "1889 more"
    assert len(encode({"kind": "surveyed", "inventory": found, "holders": held})) < MAX_LINE_BYTES


def test_our_own_probes_and_their_children_do_not_count(root: Path) -> None:
    process(root, 910, "python", "/dev/nvidia1")
    process(root, 911, "python", "/dev/nvidia1", parent=910)
    assert holders(root, ignore_pids=[910]) == []
    assert holders(root) == ["cuda:0: pid 910 (python)", "cuda:0: pid 911 (python)"]


def test_device_that_is_not_in_the_inventory_is_missing(root: Path) -> None:
    with pytest.raises(DeviceMissingError, match="no such device: cuda:7; this node has cuda:0, cuda:1"):
        cuda.bind("cuda:7", cuda.find(Host(root), {}), {})


def test_torch_without_cuda_is_said_with_the_remedy_and_blames_no_device(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from checks.accelerators import cuda\n"
        "import torch\n"
        "torch.version.cuda = None\n"
        "try: cuda.bind('cuda:0', {'devices': [{'target': 'cuda:0', 'serial': None}]}, {})\n"
        "except RuntimeError as error: print(error)\n"
    )
    done = run_with_torch(code, str(Path(cuda.__file__).parents[2]))
    assert "is built without CUDA; set python under [probe] to" in done.stdout, done.stderr


PART = "MIG-3f5c5e2a-6b1c-5d2e-9a77-0c1d2e3f4a5b"


@pytest.mark.parametrize(
    ("visible", "parts", "gpus", "container", "words"),
    [
        ("all", [0], 1, False, "turn MIG off (nvidia-smi -mig 0), or disable the checks"),
        (PART, [0], 1, False, "CUDA shows only one partition (NVIDIA H100 80GB HBM3 MIG 1g.10gb)"),
        (PART, [0, 1], 1, True, f"opened {PART}"),
        (PART, None, 1, True, f"opened {PART}"),
        ("void", [3], 1, True, "opened GPU-"),  # given by CDI
        (f"{PART},{PART}", [0], 1, True, "opened GPU-"),
        (PART, [0], 2, True, "opened GPU-"),
        (PART, [0, 1], 2, True, "give the container a single MIG partition"),  # it may be the other GPU's
        (f"{PART},{PART}", [0, 1], 1, True, "give the container a single MIG partition"),
        ("all", [0, 1], 1, True, "give the container a single MIG partition"),  # the daemon's own pod
        ("all", None, 1, True, "give the container a single MIG partition"),
        ("", [], 1, True, "give the container a single MIG partition"),
    ],
)
def test_part_of_a_gpu_is_not_taken_for_the_gpu_unless_a_container_was_given_it_alone(
    visible: str,
    parts: list[int] | None,
    gpus: int,
    container: bool,
    words: str,
    tmp_path: Path,
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """`parts`: which NVML shows; None: it cannot be asked."""
    machine = GpuMachine(tmp_path / "machine", gpus)
    machine.gpu(0, parts=parts)
    if parts is None:
        machine.error("nvmlInit", 12)
    code = (
        "import json, os, sys; sys.path[:0] = sys.argv[1:3]\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from checks.accelerators import cuda\n"
        "import torch\n"
        f"cuda.in_container = lambda host: {container}\n"
        "sys.modules.pop('pynvml', None)\n"  # torch imports the real one where it is installed
        f"os.environ['NVIDIA_VISIBLE_DEVICES'] = {visible!r}\n"
        "torch.version.cuda = '12.8'\n"
        "torch.cuda.device_count = lambda: 1\n"
        "torch.cuda.get_device_name = lambda index: 'NVIDIA H100 80GB HBM3 MIG 1g.10gb'\n"
        "def opened(index): raise RuntimeError('opened ' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "torch.cuda.set_device = opened\n"
        "try: cuda.bind('cuda:0', json.loads(sys.argv[3]), {})\n"
        "except RuntimeError as error: print(error)\n"
    )
    places = str(Path(cuda.__file__).parents[2]), str(machine.root / "python")
    done = run_with_torch(code, *places, json.dumps(cuda.find(machine.host, {})))
    assert words in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_cublas_that_is_loaded_says_its_version(tmp_path: Path) -> None:
    source, library = tmp_path / "cublas.c", tmp_path / "libcublas.so.12"
    source.write_text("int cublasGetProperty(int part, int *value) { *value = (int[]){12, 9, 1}[part]; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import ctypes\n"
        "from checks.accelerators import cuda\n"
        "print(cuda._cublas_version())\n"
        "ctypes.CDLL(sys.argv[2])\n"
        "print(cuda._cublas_version())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(cuda.__file__).parents[2]), library], capture_output=True, text=True
    )
    assert done.stdout.split() == ["None", "12.9.1"], done.stderr


def run_here(*names: str, **others: Any) -> Mapping[str, Any]:
    python = os.environ.get("HEALTHD_CUDA_PYTHON")
    return run_checks(
        *names,
        tier=Tier.QUICK,
        accelerator="cuda",
        directories=(),
        options={"in_job": True},  # whoever runs these tests has the GPUs, also in a container
        probe_python=Path(python) if python else None,
        **others,
    )


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_every_probe_passes_on_each_gpu(self) -> None:
        results = run_here("matmul", "memory", "digest", "transfer")
        assert {name: result.status for name, result in results.items()} == dict.fromkeys(results, Status.PASS), results
        devices = {device["target"] for device in cuda.find(Host(None), {})["devices"]}
        assert {finding.target for finding in results["memory"].findings} == devices

    def test_collectives_pass_by_nccl_or_say_that_one_gpu_is_no_group(self) -> None:
        names = ("all_gather", "all_reduce", "reduce_scatter")
        wanted = Status.PASS if cuda.find(Host(None), {})["device_count"] > 1 else Status.SKIP
        assert {result.status for result in run_here(*names).values()} == {wanted}

    def test_one_flipped_bit_is_found_in_every_probe(self) -> None:
        names = ("matmul", "memory", "digest", "transfer")
        results = run_here(*names, faults=[f"{name}@cuda:0=corrupt" for name in names])
        assert {result.status for result in results.values()} == {Status.FAIL}
