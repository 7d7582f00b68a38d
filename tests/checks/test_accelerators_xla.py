"""PyTorch/XLA: configured and refused without it; every probe and collective on the real one where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import DeviceMissingError, detect, find_accelerator, xla
from checks.accelerators.holding import find_holders
from checks.contract import Status, Tier
from checks.host.machine import Host
from healthd.core.model import CheckResult
from tests.runner.runner_kit import make_runner, run_checks

HERE = Host(None)
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HEALTHD_XLA_PYTHON") or ROOT / ".venv-xla" / "bin" / "python")
PROBES = ("matmul", "memory", "digest", "transfer", "train_step")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
TARGETS = {"xla:0", "xla:1"}


@pytest.fixture(autouse=True)
def _no_settings_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)


# --- without torch_xla ------------------------------------------------------------------------------------------------


def test_xla_is_used_only_where_it_is_configured() -> None:
    assert find_accelerator("xla", HERE).find(HERE, {})["accelerator"] == "xla"
    assert not xla.present(HERE)
    assert detect(HERE) is not sys.modules["checks.accelerators.xla"]


def test_cpu_client_has_two_devices_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(json.dumps(xla.find(HERE, {})))
    assert (found["device_count"], found["expected_device_count"], found["ranks"]) == (2, 2, "together")
    assert [device["target"] for device in found["devices"]] == ["xla:0", "xla:1"]
    assert found["devices"][0]["kind"].startswith("PJRT CPU, ")
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert xla.find(HERE, {})["device_count"] == 3
    assert xla.find(HERE, {"xla_devices": 1})["device_count"] == 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "1.5", "257", True])
def test_number_of_devices_that_makes_no_sense_is_one_clear_line(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="xla_devices must be a whole number from 1 to 256, not"):
        xla.find(HERE, {"xla_devices": value})
    monkeypatch.setenv("CPU_NUM_DEVICES", str(value))
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES must be"):
        xla.find(HERE, {})


def test_devices_of_another_client_are_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(ValueError, match="xla_devices must be set for PJRT NEURON"):
        xla.find(HERE, {})
    found = xla.find(HERE, {"xla_devices": 2})
    assert (found["device_count"], found["memory_bytes"], found["ranks"]) == (2, None, "fresh")
    assert xla.holders(HERE, found, {}) is None  # nobody said what the device files are: taken
    assert xla.holders(HERE, found, {"xla_device_files": "/dev/no_such_device{index}"}) == []
    with pytest.raises(ValueError, match="xla_visible_variable must be set for PJRT NEURON"):
        xla.bind("xla:1", found, {})


def test_device_files_that_processes_out_of_sight_may_hold_count_as_taken(tmp_path: Path) -> None:
    options = {"xla_device": "NEURON", "xla_devices": 1, "xla_device_files": "/dev/null"}
    for folder in ("proc/self/ns", "proc/1"):
        (tmp_path / folder).mkdir(parents=True)
    namespace = tmp_path / "proc/self/ns/pid"
    namespace.symlink_to("pid:[4026531836]")
    assert xla.holders(Host(tmp_path), xla.find(HERE, options), options) == []
    namespace.unlink()
    namespace.symlink_to("pid:[4026532512]")
    assert xla.holders(Host(tmp_path), xla.find(HERE, options), options) is None
    assert xla.holders(Host(tmp_path), xla.find(HERE, options), {**options, "in_job": True}) == []


def test_devices_of_the_cpu_client_are_held_like_those_of_a_cpu(tmp_path: Path) -> None:
    options = {"run_dir": str(tmp_path)}
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from checks.accelerators import xla\n"
        "with xla.hold('xla:0,xla:1', {'run_dir': sys.argv[2]}): print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        assert xla.holders(HERE, xla.find(HERE, options), options) == []  # a child of ours is ours
        files = {target: Path(tmp_path, "devices", target.replace(":", "")) for target in sorted(TARGETS)}
        found = find_holders(Path("/proc"), files, ())
        assert found is not None
        assert [line.split(":")[:2] for line in found] == [["xla", "0"], ["xla", "1"]]
        assert process.stdin
        process.stdin.close()
    assert xla.holders(HERE, xla.find(HERE, options), options) == []


def test_device_that_is_not_in_the_inventory_is_missing() -> None:
    with pytest.raises(DeviceMissingError, match="no such device: xla:9; this node has xla:0, xla:1"):
        xla.bind("xla:0,xla:9", xla.find(HERE, {}), {})


def test_interpreter_without_torch_xla_is_unknown_with_the_remedy_never_a_pass() -> None:
    result = run_checks("matmul", tier=Tier.QUICK, accelerator="xla", directories=(), retries=0)["matmul"]
    assert result.status is Status.UNKNOWN
    assert {finding.reason for finding in result.findings} == {"StartFailed"}
    assert "set python of [probe] to an interpreter that has torch_xla" in result.findings[0].message


# --- on real XLA ------------------------------------------------------------------------------------------------------


def on_xla(*names: str, **others: Any) -> Mapping[str, CheckResult]:
    """The foreign-interpreter path: our runner, workers in the environment of torch_xla, two virtual devices."""
    return run_checks(
        *names, tier=Tier.QUICK, accelerator="xla", probe_python=PYTHON, directories=(), retries=0, **others
    )


def statuses(result: CheckResult) -> dict[str, tuple[str, str | None]]:
    """By target, the worst of each."""
    order = list(Status)
    ranked = sorted(result.findings, key=lambda finding: order.index(finding.status))
    return {finding.target: (finding.status.value, finding.reason) for finding in ranked}


def number(result: CheckResult, name: str, target: str, **labels: str) -> float:
    (value,) = [
        measured.value
        for finding in result.findings
        for measured in finding.measurements
        if finding.target == target and measured.name == name and labels.items() <= measured.labels.items()
    ]
    assert value is not None
    return value


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, CheckResult], Path, Any]:
    """One run of everything: its results, the folder of the programs that XLA compiled, and the survey after it."""
    folder = tmp_path_factory.mktemp("xla")
    runner = make_runner(
        accelerator="xla",
        probe_python=PYTHON,
        directories=(),
        run_dir=folder / "run",
        lock_wait_seconds=10.0,
        env={"XLA_FLAGS": f"--xla_dump_to={folder}/programs --xla_dump_hlo_as_text"},
    )
    (folder / "run").mkdir()
    results = run_checks(*PROBES, *COLLECTIVES, "device_count", tier=Tier.QUICK, runner=runner)
    return results, folder / "programs", runner.latest


@pytest.mark.xla
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no interpreter with torch_xla at {PYTHON}: run make test-xla")
class TestOnRealXla:
    def test_every_probe_and_collective_passes(self, healthy: Any) -> None:
        results, _, survey = healthy
        assert {name: result.status for name, result in results.items()} == dict.fromkeys(results, Status.PASS), results
        for name in PROBES:
            assert {finding.target for finding in results[name].findings} == TARGETS
        assert "as 1 other of its kind" in results["digest"].findings[0].message
        assert survey.holders == ()
        assert survey.versions["torch"].startswith("2.9.1")

    def test_collectives_are_exact_in_every_element_at_every_size(self, healthy: Any) -> None:
        results, _, _ = healthy
        for name in COLLECTIVES:
            messages = [finding.message for finding in results[name].findings]
            assert len(messages) == 3
            assert all("over 2 ranks" in text and text.endswith("every element exact") for text in messages)

    def test_compiled_programs_hold_the_collectives_themselves(self, healthy: Any) -> None:
        """A reduce-scatter that is an all-reduce with a slice would measure something else than it says."""
        _, programs, _ = healthy
        found = [
            operation
            for path in programs.glob("*after_optimizations.txt")
            for operation in re.findall(r"\b(all-gather|all-reduce|reduce-scatter)\(", path.read_text())
        ]
        assert {name: found.count(name) for name in found} == {"all-gather": 3, "all-reduce": 3, "reduce-scatter": 3}

    def test_faults_are_found_where_they_are_and_nothing_else_is_accused(self, healthy: Any) -> None:
        before, _, _ = healthy
        results = on_xla(
            *PROBES,
            *COLLECTIVES,
            faults=[
                "matmul@xla:1=slow:40",
                "digest@xla:0=corrupt",
                "memory@xla:0=corrupt",
                "transfer@xla:1=hang",
                "train_step.block1.gelu_grad@xla:1=corrupt:1e-9",
                "all_gather@rank:1=hang",
                "all_reduce@rank:1=corrupt",
                "reduce_scatter=slow:20",
            ],
            timeouts_seconds={"transfer": 15.0, "all_gather": 4.0, "reduce_scatter": 300.0},
        )
        assert all(result.injected for result in results.values())
        speed = {t: number(results["matmul"], "matmul_flops_per_second", t, dtype="fp32") for t in TARGETS}
        assert speed["xla:1"] < speed["xla:0"] / 4
        assert statuses(results["digest"])["xla:0"] == ("fail", "SilentCorruption")
        assert statuses(results["digest"])["xla:1"][0] == "pass"
        assert statuses(results["memory"]) == {"xla:0": ("fail", "MemoryCorruption"), "xla:1": ("pass", None)}
        assert statuses(results["transfer"]) == {"xla:0": ("pass", None), "xla:1": ("unknown", "Timeout")}
        assert statuses(results["train_step"])["xla:0"] == ("pass", None)
        found = [f for f in results["train_step"].findings if f.status is Status.FAIL]
        assert [(f.target, f.reason) for f in found] == [("xla:1", "SilentCorruption")] * 2
        assert all("layer block1, gradient of gelu differs in repeat 2" in f.message for f in found)
        assert statuses(results["all_reduce"]) == {"rank:1": ("fail", "CollectiveMismatch"), "node": ("pass", None)}
        # One process is all ranks: when it hangs nobody can tell which, and nobody is accused.
        assert statuses(results["all_gather"]) == {"node": ("unknown", "Timeout")}
        took = [
            number(run["reduce_scatter"], "reduce_scatter_duration_seconds", "node", size_bytes=str(8 * 2**20))
            for run in (before, results)
        ]
        assert took[1] > 4 * took[0]

    def test_ranks_of_one_process_train_together_and_the_one_with_a_fault_is_named(self) -> None:
        name = "data_parallel_step"
        sound = on_xla(name)[name]
        assert statuses(sound) == {"node": ("pass", None)}
        assert "gradients and parameters match on all ranks in 4 steps" in sound.findings[0].message
        faulty = on_xla(name, faults=[f"{name}.block1.gelu_grad@rank:1=corrupt:0.001"])[name]
        assert statuses(faulty) == {"rank:1": ("fail", "SilentCorruption"), "node": ("pass", None)}
        found = next(finding for finding in faulty.findings if finding.status is Status.FAIL)
        assert "rank:1 (xla:1) is at fault" in found.message
        assert "first at layer block1, gradient of gelu" in found.message

    def test_missing_device_and_death_of_the_ranks_are_told_apart(self) -> None:
        results = on_xla("all_gather", "all_reduce", faults=["all_gather@rank:1=missing", "all_reduce@rank:0=crash"])
        assert statuses(results["all_gather"]) == {"rank:1": ("fail", "MissingDevice")}
        assert statuses(results["all_reduce"]) == {"node": ("unknown", "Crashed")}

    def test_each_measured_run_is_one_execution_and_compiles_nothing(self) -> None:
        code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from checks.accelerators import xla
from checks.host.machine import Host
device = xla.bind("xla:1", xla.find(Host(None), {}), {})
import torch_xla.debug.metrics as metrics
count = lambda name: (metrics.metric_data(name) or [0])[0]
torch, on = device.torch, {"device": device.torch_device}
a = torch.rand(256, 256).to(**on)
out = torch.empty(256, 256, **on)
device.measure(lambda: torch.matmul(a, a, out=out), repeats=0, warmup=2)
before = count("ExecuteTime"), count("CompileTime")
seconds = device.measure(lambda: torch.matmul(a, a, out=out), repeats=5, warmup=0)
after = count("ExecuteTime"), count("CompileTime")
there = torch.zeros(2**18, **on)
device.synchronize()
moved = count("TransferToDeviceTime"), count("TransferFromDeviceTime")
there.copy_(torch.ones(2**18)); back = device.read(there)
moved = count("TransferToDeviceTime") - moved[0], count("TransferFromDeviceTime") - moved[1]
try:
    backend = device.collective_backend
except RuntimeError as error:
    backend = str(error)
print(json.dumps({"runs": after[0] - before[0], "compiled": after[1] - before[1], "seconds": seconds,
    "moved": moved, "sum": float(back.sum()), "key": device.key, "free": device.available_bytes(), "backend": backend}))
"""
        done = subprocess.run([PYTHON, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["runs"], said["compiled"]) == (5, 0)
        assert all(second > 0 for second in said["seconds"])
        assert said["moved"] == [1, 1]  # what is read comes from the device, not from a copy that the host kept
        assert said["sum"] == 2**18
        assert re.fullmatch(
            r"xla CPU \| cpu \| PJRT CPU, .+ \| \w+ \| torch 2\S+ \| \d+ cores \| torch_xla 2\S+", said["key"]
        )
        assert said["free"] > 2**20
        assert "collectives between processes on PJRT CPU are not supported" in said["backend"]

    def test_a_rank_of_data_parallel_training_compiles_four_graphs_and_is_right(self) -> None:
        """Gradients, their sums, the optimizer with its digests, and here what stands in for the other ranks."""
        code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from checks.accelerators import xla
from checks.collective.training.shard import Shard
from checks.contract import Group
from checks.host.machine import Host
from checks.training.work import SMALL
import torch_xla.debug.metrics as metrics
device = xla.bind("xla:1", xla.find(Host(None), {}), {})
class Twice:
    all_reduce = staticmethod(lambda tensor: tensor.mul_(2))
count = lambda: (metrics.metric_data("CompileTime") or [0])[0]
group = Group(rank=1, size=2, rendezvous="", interface=None, seed=1, timeout_seconds=1.0, targets=())
shard, compiled = Shard(device, group, SMALL), []
for number in range(3):
    shard.compute(number)
    device.synchronize()
    shard.reduce(Twice)
    device.synchronize()
    shard.update()
    compiled.append(count())
print(json.dumps({"compiled": compiled, "fallbacks": device.fallbacks(), **shard.told()}))
"""
        done = subprocess.run([PYTHON, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["compiled"] == [4, 4, 4]
        assert (said["fallbacks"], said["faults"]) == ([], [])
        # The other rank contributed the same, so the mean is what this one computed.
        assert all(abs(own - reduced) < 1e-6 * size for own, size, reduced in said["sums"]["head"])

    def test_quick_tier_compiles_seven_graphs_and_a_second_round_none(self) -> None:
        """Each is a minute on a Neuron compiler: two products, two of memory, a digest, two steps, none for copies."""
        code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from checks.accelerators import xla
from checks.contract import Context, Tier, load_params
from checks.device.digest import digest
from checks.device.matmul import matmul
from checks.device.memory import memory
from checks.device.transfer import transfer
from checks.host.machine import Host
from checks.training.train_step import train_step
import torch_xla.debug.metrics as metrics
inventory = xla.find(Host(None), {})
device = xla.bind("xla:1", inventory, {})
said, seconds = [], []
for tier in (Tier.QUICK, Tier.QUICK, Tier.DEEP):
    for check in (matmul, memory, digest, transfer, train_step):
        less = {memory: {"max_bytes": 2**25}, train_step: {"large": False, "repeats": 2, "parity_steps": 3}}
        params = load_params(check.params_type, next((v for c, v in less.items() if c is check), {}))
        before = (metrics.metric_data("CompileTime") or [0])[0]
        list(check(Context(host=Host(None), params=params, tier=tier, device=device, group=None, previous=None,
            inventory=inventory, limits={})))
        said.append((metrics.metric_data("CompileTime") or [0])[0] - before)
    seconds.append(device.compile_seconds())
print(json.dumps({"graphs": said, "seconds": seconds, "fallbacks": device.fallbacks()}))
"""
        done = subprocess.run([PYTHON, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["graphs"] == [2, 2, 1, 0, 2, *[0] * 10]
        assert 0 < said["seconds"][0] == said["seconds"][1]
        assert said["fallbacks"] == []

    def test_work_that_the_host_does_for_the_device_is_told(self) -> None:
        code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from checks.accelerators import xla
from checks.worker.commands import with_fallbacks
from checks.host.machine import Host
device = xla.bind("xla:1", xla.find(Host(None), {}), {})
torch = device.torch
def check(names):
    for name in names:
        getattr(torch, name)(torch.ones(4, 4).to(device.torch_device))
        device.synchronize()
        yield name
found = [[x if isinstance(x, str) else [x.status.value, x.reason, x.message] for x in with_fallbacks(device, check(n))]
    for n in (["abs"], ["geqrf"], ["abs"], ["geqrf"])]
print(json.dumps(found))
"""
        done = subprocess.run([PYTHON, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        first, second, third, fourth = json.loads(done.stdout)
        assert first == third == ["abs"]
        assert second == fourth
        assert second[1][:2] == ["unknown", "HostFallback"]
        assert "aten::geqrf" in second[1][2]

    def test_separate_processes_of_the_cpu_client_are_alone_which_is_why_ranks_share_one(self, tmp_path: Path) -> None:
        """Should this ever fail, ranks of XLA on CPU can become processes of their own."""
        code = """
import sys, torch, torch_xla, torch.distributed as distributed
import torch_xla.distributed.xla_backend
rank = int(sys.argv[1])
distributed.init_process_group("xla", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
tensor = torch.full((2,), rank + 1.0, device=torch_xla.device())
distributed.all_reduce(tensor)
torch_xla.sync(wait=True)
print(tensor.cpu().tolist())
"""
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [PYTHON, "-c", code, str(rank), str(tmp_path / "meet")],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert said == ["[1.0, 1.0]", "[2.0, 2.0]"]
