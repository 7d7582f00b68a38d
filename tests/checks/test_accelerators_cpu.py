"""CPU devices: found, shared out, held and bound, on the real machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import DeviceMissingError, accelerator_names, cpu, detect, find_accelerator
from checks.accelerators.holding import find_holders
from checks.host.machine import Host

HERE = Host(None)


@contextmanager
def process_with(path: Path | None, *, user: int | None = None) -> Iterator[int]:
    """A process that has `path` open, or none; its pid."""
    code = "import sys; f = open(sys.argv[1]) if sys.argv[1] else None; print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path or "")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user) as child:
        assert child.stdout
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
        assert child.stdin
        child.stdin.close()


@pytest.fixture
def inventory(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inventory, options) of two devices with a run directory."""
    options = {"cpu_devices": 2, "run_dir": str(tmp_path)}
    return cpu.find(HERE, options), options


def test_every_name_has_all_functions_of_an_accelerator() -> None:
    assert accelerator_names() == ("cpu", "cuda", "neuron", "xla")
    for name in accelerator_names():
        accelerator = find_accelerator(name, HERE)
        assert accelerator.DESCRIPTOR.name == name
        assert all(callable(getattr(accelerator, part)) for part in ("present", "find", "holders", "bind", "hold"))
    assert find_accelerator("auto", HERE) is detect(HERE)


def test_unknown_accelerator_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="no such accelerator: 'tpu'; choose one of: auto, cpu"):
        find_accelerator("tpu", HERE)


def test_inventory_is_json_and_has_two_devices_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEALTHD_CPU_DEVICES", raising=False)
    found = json.loads(json.dumps(cpu.find(HERE, {})))
    assert found["accelerator"] == "cpu"
    assert found["device_count"] == 2
    assert found["core_count"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 2**20
    assert [device["target"] for device in found["devices"]] == ["cpu:0", "cpu:1"]
    assert set(found["devices"][0]) == {"target", "kind", "serial", "cores", "memory_bytes"}


def test_option_beats_variable_for_the_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "3")
    assert cpu.find(HERE, {})["device_count"] == 3
    assert cpu.find(HERE, {"cpu_devices": 1})["device_count"] == 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "1.5", "257", True])
def test_number_of_devices_that_makes_no_sense_is_one_clear_line(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"cpu_devices must be a whole number from 1 to 256, not .*"):
        cpu.find(HERE, {"cpu_devices": value})
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", str(value))
    with pytest.raises(ValueError, match="HEALTHD_CPU_DEVICES must be"):
        cpu.find(HERE, {})


def test_what_the_machine_does_not_tell_is_none_never_zero(tmp_path: Path) -> None:
    found = cpu.find(Host(tmp_path), {"cpu_devices": 2})
    assert found["memory_bytes"] is None
    assert found["efa_count"] is None
    assert [device["memory_bytes"] for device in found["devices"]] == [None, None]


def test_efa_adapters_are_counted_and_other_rdma_devices_are_not(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("rdmap0", "0x1d0f", "0xefa2"),
        ("rdmap1", "0x1d0f", "0xefa3"),
        ("mlx5", "0x15b3", "0x1017"),
    ):
        folder = tmp_path / "sys/class/infiniband" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(kind + "\n")
    assert cpu.find(Host(tmp_path), {})["efa_count"] == 2


def test_cores_are_shared_out_evenly_and_in_turns_when_there_are_too_few() -> None:
    assert [cpu._share([0, 1, 2, 3, 4], index, 2) for index in range(2)] == [[0, 1], [2, 3, 4]]
    assert [cpu._share([4, 9], index, 3) for index in range(3)] == [[4], [9], [4]]


# --- holders ----------------------------------------------------------------------------------------------------------


def test_nobody_holds_devices_that_nobody_has_opened(inventory: Any) -> None:
    assert cpu.holders(HERE, *inventory) == []
    with cpu.hold("cpu:0", inventory[1]):
        pass
    assert cpu.holders(HERE, *inventory) == []


def test_without_a_run_directory_there_is_nothing_to_hold() -> None:
    assert cpu.holders(HERE, cpu.find(HERE, {}), {}) == []
    with cpu.hold("cpu:0", {}):
        pass


def test_process_that_has_the_device_file_open_holds_it_until_it_ends(tmp_path: Path) -> None:
    """Rival fault 22: who is there is seen, and told by pid and name, also through another path to the file."""
    (tmp_path / "cpu1").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/cpu1").hardlink_to(tmp_path / "cpu1")
    files = {"cpu:1": tmp_path / "cpu1"}
    for path in (tmp_path / "cpu1", tmp_path / "other/cpu1"):
        with process_with(path) as pid:
            command = Path(f"/proc/{pid}/comm").read_text().strip()
            assert find_holders(Path("/proc"), files, []) == [f"cpu:1: pid {pid} ({command})"]
        assert find_holders(Path("/proc"), files, []) == []


@pytest.mark.parametrize("target", ["cpu:0", "cpu:1"])
def test_process_that_ends_while_it_is_looked_at_holds_nothing(tmp_path: Path, target: str) -> None:
    """
    cpu:0: between the look into its descriptors and the question whose it is. cpu:1: between the kernel's word that the
    file is open and the look into its descriptors.
    """
    files = {f"cpu:{number}": tmp_path / f"cpu{number}" for number in (0, 1)}
    for path in files.values():
        path.touch()
    with process_with(files["cpu:0"]) as first, process_with(files["cpu:1"]) as second:
        if first > second:
            pytest.skip("process ids have begun anew, and the look is in their order")
        ending = first if target == "cpu:0" else second

        def is_onlooker(pid: int, command: str) -> bool:
            """Asked once the first was seen to have its file open."""
            os.kill(ending, signal.SIGKILL)
            os.waitid(os.P_PID, ending, os.WEXITED | os.WNOWAIT)
            return pid != ending

        assert find_holders(Path("/proc"), files, [second] if target == "cpu:0" else [], is_onlooker=is_onlooker) == []


def test_own_process_and_ignored_ones_with_their_descendants_do_not_count(inventory: Any, tmp_path: Path) -> None:
    found, options = inventory
    with cpu.hold("cpu:0", options):
        assert cpu.holders(HERE, found, options) == []
        with process_with(tmp_path / "devices/cpu0"):  # our child
            assert cpu.holders(HERE, found, options) == []
    # Seen from another process, whose descendants we are not.
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from checks.accelerators import cpu;"
        "from checks.host.machine import Host; o = json.loads(sys.argv[2]);"
        "print(json.dumps(cpu.holders(Host(), cpu.find(Host(), o), o)))"
    )
    with cpu.hold("cpu:0", options):
        for ignored, expected in (([], 1), ([os.getpid()], 0), ([os.getppid()], 0)):
            arguments = [str(Path(cpu.__file__).parents[2]), json.dumps({**options, "ignore_pids": ignored})]
            output = subprocess.run(
                [sys.executable, "-c", code, *arguments], capture_output=True, check=True, timeout=20
            )
            assert len(json.loads(output.stdout)) == expected


def test_two_processes_on_two_devices_are_both_told(inventory: Any, tmp_path: Path) -> None:
    for target in ("cpu:0", "cpu:1"):
        with cpu.hold(target, inventory[1]):
            pass
    with process_with(tmp_path / "devices/cpu0") as first, process_with(tmp_path / "devices/cpu1") as second:
        seen = find_holders(Path("/proc"), {f"cpu:{i}": tmp_path / f"devices/cpu{i}" for i in (0, 1)}, [])
    assert seen is not None
    assert [line.split(" (")[0] for line in seen] == [f"cpu:0: pid {first}", f"cpu:1: pid {second}"]


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[dict[int, list[str]]], Path]:
    """A /proc as data: pid -> what it has open."""

    def make(processes: dict[int, list[str]]) -> Path:
        for pid, opened in processes.items():
            folder = tmp_path / "proc" / str(pid) / "fd"
            folder.mkdir(parents=True)
            (folder.parent / "comm").write_text("trainer\n")
            (folder.parent / "stat").write_text(f"{pid} (a) b) S {pid - 1} 0 0\n")
            for number, path in enumerate(opened):
                (folder / str(number)).symlink_to(path)
        return tmp_path / "proc"

    return make


def test_holder_in_a_recorded_machine_is_found_by_path(recorded: Any) -> None:
    proc = recorded({100: ["/dev/null", "/run/devices/cpu0"], 200: ["/tmp/other/cpu0"]})
    files = {"cpu:0": Path("/run/devices/cpu0")}
    assert find_holders(proc, files, []) == ["cpu:0: pid 100 (trainer)"]
    assert find_holders(proc, files, [100]) == []
    assert find_holders(proc, files, [99]) == []  # its parent


@pytest.mark.system(root=True)  # to become somebody else
def test_holder_that_may_not_be_looked_into_is_unseen_never_nobody(tmp_path: Path) -> None:
    """As an ordinary user: root's processes are closed to us, but the kernel tells whether the file is open."""
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:3]:
        folder.chmod(folder.stat().st_mode | 0o011)
    path = tmp_path / "cpu0"
    path.touch()
    os.chown(path, 65534, 65534)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import os\n"
        "from checks.accelerators.holding import find_holders\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for line in sys.stdin: print(find_holders(Path('/proc'), {'cpu:0': Path(sys.argv[2])}, []), flush=True)\n"
    )
    arguments = [sys.executable, "-c", code, str(Path(cpu.__file__).parents[2]), str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdin
        assert asker.stdout

        def ask() -> str:
            assert asker.stdin
            assert asker.stdout
            asker.stdin.write("?\n")
            asker.stdin.flush()
            return asker.stdout.readline().strip()

        assert ask() == "[]"
        with path.open():  # by root, out of the asker's sight
            assert ask() == "None"
        assert ask() == "[]"
        asker.stdin.close()


# --- bind -------------------------------------------------------------------------------------------------------------


def test_device_that_is_not_there_is_named(inventory: Any) -> None:
    with pytest.raises(DeviceMissingError, match="no such device: cpu:7; this node has cpu:0, cpu:1"):
        cpu.bind("cpu:7", inventory[0], inventory[1])


def test_two_generations_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def features(text: str | None) -> str:
        if text is not None:
            (tmp_path / "proc").mkdir(exist_ok=True)
            (tmp_path / "proc/cpuinfo").write_text(text)
        return cpu._features(Host(tmp_path))

    assert features(None) == "unknown"
    rome = "processor : 0\nmodel name : AMD EPYC\ncpu family : 23\nmodel : 49\ncpu MHz : 3000\nflags : fpu avx2\n"
    one = features(rome)
    assert features(rome.replace("3000", "2999").replace("fpu avx2", "avx2 fpu") + rome) == one
    assert features(rome.replace("fpu avx2", "fpu avx2 avx512f")) != one
    assert features(rome.replace("model : 49", "model : 1")) != one


@pytest.mark.parametrize(
    ("folder", "names", "cache"),
    [
        ("", ("memory.max", "memory.current"), "inactive_file"),
        ("memory/", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_container_whose_limit_is_filled_by_the_cache_of_files_has_memory(
    tmp_path: Path, folder: str, names: tuple[str, str], cache: str
) -> None:
    place = tmp_path / "sys/fs/cgroup" / folder
    place.mkdir(parents=True)
    most, used = (place / name for name in names)
    most.write_text("1000000\n")
    used.write_text("999000\n")
    assert cpu._cgroup_free_bytes(Host(tmp_path)) == 1000
    (place / "memory.stat").write_text(f"anon 1\n{cache} 600000\nactive_file 300000\n")
    assert cpu._cgroup_free_bytes(Host(tmp_path)) == 601000
    (place / "memory.stat").write_text(f"{cache}\n")
    assert cpu._cgroup_free_bytes(Host(tmp_path)) == 1000
    most.write_text("max\n")
    assert cpu._cgroup_free_bytes(Host(tmp_path)) is None


def test_bound_worker_runs_on_its_share_of_cores_with_torch(inventory: Any) -> None:
    """Pinned before torch is imported, so that its pools have the right size; devices of one node share a key."""
    code = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from checks.accelerators import cpu
assert "torch" not in sys.modules
before = sorted(os.sched_getaffinity(0))
device = cpu.bind("cpu:1", json.loads(sys.argv[2]), {})
x = device.torch.arange(6.0, device=device.torch_device).view(2, 3)
print(json.dumps({
    "before": before, "after": sorted(os.sched_getaffinity(0)), "threads": device.torch.get_num_threads(),
    "key": device.key, "available": device.available_bytes(), "backend": device.collective_backend,
    "fpmath": os.environ.get("DNNL_DEFAULT_FPMATH_MODE"), "read": device.read(x.t()).is_contiguous(),
    "measured": len(device.measure(lambda: x + 1, repeats=3, warmup=1)),
}))
"""
    arguments = [
        sys.executable,
        "-W",
        "error",
        "-c",
        code,
        str(Path(cpu.__file__).parents[2]),
        json.dumps(inventory[0]),
    ]
    environment = {**os.environ, "DNNL_DEFAULT_FPMATH_MODE": "BF16"}
    output = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert output.returncode == 0, output.stderr
    told = json.loads(output.stdout)
    assert told["after"] == cpu._share(told["before"], 1, 2)
    assert told["threads"] == len(told["after"])
    assert told["key"].startswith("cpu | ")
    assert "torch 2" in told["key"]
    assert told["available"] > 0
    assert (told["backend"], told["fpmath"], told["read"], told["measured"]) == ("gloo", None, True, 3)
