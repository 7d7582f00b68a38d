"""
Binding a worker to a NeuronCore: what the environment must be, which binding is chosen, what the runtime's words mean.

There is no Neuron here: torch is real, and a module of the tests stands in for native torch-neuronx.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators import DeviceMissingError
from checks.accelerators.neuron import torch_binding
from checks.accelerators.neuron.environment import environment_of, xla_environment
from checks.accelerators.neuron.errors import diagnose, telling_line
from checks.contract import Action
from healthd.runner.workers.outcome import explain
from tests.every import every

ROOT = Path(__file__).parents[2]
INVENTORY: Mapping[str, Any] = {
    "accelerator": "neuron",
    "devices": [
        {"target": "neuron:0", "kind": "Trainium2", "cores": 4, "memory_bytes": 96 * 2**30, "core_ids": [0, 1, 2, 3]}
    ],
    "workers": [f"neuroncore:{core}" for core in range(4)],
    "lnc": 2,
}


# --- environment ------------------------------------------------------------------------------------------------------


def test_worker_is_pinned_to_its_one_core_whatever_the_job_said() -> None:
    job = {
        "NEURON_RT_NUM_CORES": "32",
        "NEURON_RT_VISIBLE_CORES": "0-31",
        "NEURON_LOGICAL_NC_CONFIG": "1",
        "PATH": "/a",
    }
    said = environment_of("neuroncore:3", INVENTORY, {}, job)
    assert said["NEURON_RT_VISIBLE_CORES"] == "3"
    assert said["NEURON_RT_NUM_CORES"] is None
    assert said["NEURON_LOGICAL_NC_CONFIG"] == said["NEURON_RT_VIRTUAL_CORE_SIZE"] == "2"
    assert said["PJRT_DEVICE"] == "NEURON"
    assert said["PATH"] == f"{os.path.dirname(sys.executable)}:/a:/opt/aws/neuron/bin"
    assert environment_of("neuroncore:0", INVENTORY, {"neuron_lnc": 1}, {})["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert "NEURON_LOGICAL_NC_CONFIG" not in environment_of("neuroncore:0", {**INVENTORY, "lnc": None}, {}, {})


@every(
    "name",
    [
        "NEURON_FAIL_ON_NAN",
        "NEURON_EXTRACT_GRAPHS_ONLY",
        "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN",
        "NEURON_RT_ROOT_COMM_ID",
        "NEURON_PJRT_PROCESS_INDEX",
        "XLA_USE_BF16",
        "TORCH_NEURONX_NEFF_DISABLE_CACHE",
        "TORCH_NEURONX_HLO_CACHE_DIR",
        "NKI_SIMULATOR",
    ],
)
def test_what_changes_results_of_a_probe_is_dropped(name: str) -> None:
    said = environment_of("neuroncore:0", INVENTORY, {}, {name: "1", "HOME": "/root"})
    assert said[name] is None
    assert "HOME" not in said


def test_cache_is_private_and_flags_are_the_operators() -> None:
    job = {"NEURON_CC_FLAGS": "--cache_dir=/job --auto-cast=all", "NEURON_COMPILE_CACHE_URL": "s3://job"}
    said = environment_of("neuroncore:0", INVENTORY, {"compile_folder": "/ours"}, job)
    assert said["NEURON_CC_FLAGS"] == "--optlevel=1 --auto-cast=none"
    assert said["NEURON_COMPILE_CACHE_URL"] is None
    assert said["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/ours/neff"
    options = {"compile_flags": ["--optlevel=2"], "compile_folder": "/ours", "retry_failed": True}
    assert environment_of("neuroncore:0", INVENTORY, options, job)["NEURON_CC_FLAGS"] == "--optlevel=2"
    assert xla_environment(options) == {
        "NEURON_COMPILE_CACHE_URL": "/ours/neuron",
        "NEURON_CC_FLAGS": "--optlevel=2 --cache_dir=/ours/neuron --retry_failed_compilation",
    }


def test_rank_knows_its_group_before_torch_is_imported() -> None:
    group = {"size": 4, "targets": list(INVENTORY["workers"]), "root_comm": "127.0.0.1:40001"}
    said = environment_of("neuroncore:2", INVENTORY, {"group": group}, {"NEURON_PJRT_WORLD_SIZE": "64"})
    assert said["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:40001"
    assert said["NEURON_PJRT_PROCESS_INDEX"] == said["RANK"] == "2"
    assert said["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "1,1,1,1"
    assert said["NEURON_PJRT_WORLD_SIZE"] is None
    assert (said["MASTER_ADDR"], said["MASTER_PORT"], said["WORLD_SIZE"]) == ("127.0.0.1", "40001", "4")


@pytest.mark.parametrize("target", ["neuroncore:4", "neuron:0", "neuroncore:", "neuroncore:0,neuroncore:1", "cpu:0"])
def test_core_that_is_not_in_the_inventory_is_missing(target: str) -> None:
    with pytest.raises(DeviceMissingError, match=f"no such core: {target}; this node has neuroncore:0, "):
        environment_of(target, INVENTORY, {}, {})


# --- which binding ----------------------------------------------------------------------------------------------------

NATIVE = """
import torch
torch.utils.rename_privateuse1_backend("neuron")
__version__ = "2.14.3.0"
SEEN = []
def device_count(): return COUNT
def synchronize(): SEEN.append("synchronize")
def memory_reserved(): return 2**30
def get_fallback_ops(): return ["aten::mm", "aten::mm"]
def clear_op_tracking(): SEEN.append("clear")
"""
BIND = """
import json, os, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from checks.accelerators.neuron import torch_binding as neuron_torch
try:
    device = neuron_torch.bind("neuroncore:3", json.loads(sys.argv[3]), {"compile_folder": "/ours"})
except RuntimeError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
import torch_neuronx
seconds = device.measure(lambda: None, repeats=2, warmup=1)
print(json.dumps({
    "kind": type(device).__name__, "device": str(device.torch_device), "key": device.key,
    "backend": device.collective_backend, "bytes": device.available_bytes(), "fallbacks": device.fallbacks(),
    "seconds": seconds, "seen": torch_neuronx.SEEN, "core": os.environ["NEURON_RT_VISIBLE_CORES"],
    "read": device.read(__import__("torch").ones(2)).tolist(), "compile": device.compile_seconds()}))
"""


Bound = Callable[[str | None], dict[str, Any]]


@pytest.fixture
def bound(tmp_path: Path, run_with_torch: Callable[..., subprocess.CompletedProcess[str]]) -> Bound:
    """What a process says that binds a core, where this is the package torch_neuronx; None: there is none."""

    def run(package: str | None) -> dict[str, Any]:
        if package is not None:
            (tmp_path / "torch_neuronx.py").write_text(package)
        done = run_with_torch(BIND, str(ROOT), str(tmp_path), json.dumps(INVENTORY))
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    return run


def test_native_binding_is_taken_where_torch_knows_the_device(bound: Bound) -> None:
    said = bound(NATIVE.replace("COUNT", "1"))
    assert (said["kind"], said["device"], said["core"]) == ("NativeDevice", "neuron:0", "3")
    assert said["backend"] == "neuron"
    assert said["key"].startswith("neuron | Trainium2 | LNC 2 | native 2.14.3.0 | torch 2")
    assert said["bytes"] == int(96 * 2**30 / 4 * 0.8) - 2**30
    assert said["fallbacks"] == ["aten::mm"]
    assert said["seen"].count("synchronize") == 5  # after warm-up, before the clock, in each of two runs, before a read
    assert len(said["seconds"]) == 2
    assert said["read"] == [1.0, 1.0]
    assert said["compile"] is None


def test_process_that_sees_more_than_its_core_is_refused(bound: Bound) -> None:
    error = bound(NATIVE.replace("COUNT", "32"))["error"]
    assert "torch-neuronx shows 32 cores for NEURON_RT_VISIBLE_CORES=3 instead of 1" in error


@pytest.mark.parametrize("package", [None, "__version__ = '2.9.0.2.15'", "raise ImportError('libnrt.so')"])
def test_package_of_the_name_that_adds_no_device_means_xla(bound: Bound, package: str | None) -> None:
    """The older package of the same name is an addition to torch_xla, which this interpreter does not have."""
    error = bound(package)["error"]
    assert "torch_xla cannot be imported" in error
    assert "set python of [probe] to an interpreter that has torch_xla" in error


def test_memory_of_a_core_is_unknown_where_the_inventory_does_not_say() -> None:
    for device in ({}, {"memory_bytes": 2**30, "cores": None}, {"memory_bytes": None, "cores": 2}):
        assert torch_binding._share_bytes(device) is None


# --- words of the runtime ---------------------------------------------------------------------------------------------

FATAL = "(FATAL-RT-UNDEFINED-STATE)"


@every(
    ("text", "reason", "action"),
    [
        ("NRT:nrt_allocate_neuron_cores  NeuronCore(s) not available - Requested:nc1-nc1 Available:0", "Busy", None),
        ("Logical Neuron Core(s) not available - Requested:lnc0-lnc0 (cores busy, ret=-16)", "Busy", None),
        ("RuntimeError: The PyTorch Neuron Runtime could not be initialized.", "Busy", None),
        ("nrt_execute failed: NRT_EXEC_NC_BUSY", "Busy", None),
        (f"{FATAL} [ND 0][NC 0] Uncorrectable memory error is detected, metadata: 0x16.", "DeviceLost", Action.REPLACE),
        (
            f"{FATAL} Uncorrectable HBM memory error is detected. Please terminate this instance",
            "DeviceLost",
            Action.REPLACE,
        ),
        (
            f"{FATAL} Uncorrectable HBM memory error is detected. Please reload the neuron driver or reboot your EC2",
            "DeviceLost",
            Action.REBOOT,
        ),
        ("[MLA 0][NC 0] DMA TX engine 0 is in an abort state", "DeviceLost", Action.RESET_DEVICE),
        (f"{FATAL} execution timeout (30000 ms) on Neuron Device 0 NC 0, model x.neff", "DeviceLost", Action.REPLACE),
        (f"{FATAL} missing collectives status on Neuron Device 0 NC 0", "Timeout", Action.INSPECT),
        ("NRT Error NRT_EXEC_UNIT_UNRECOVERABLE(101)", "DeviceLost", Action.RESET_DEVICE),
        ("Bad StatusOr access: INTERNAL: nrt_execute status=1205", "DeviceLost", Action.REBOOT),
        ("nrt_execute failed with status_code: 1202", "DeviceLost", Action.REPLACE),
        ("This Neuron Runtime (compatibility id: X) is not compatible with the installed", "VersionMismatch", None),
        ("NEFF version mismatch supported: 1.1 received: 2.0", "VersionMismatch", None),
        ("NRT:nrt_init Unable to determine Neuron Driver version.", "MissingTool", None),
        ("Could not open the nd1", "StartFailed", None),
        ("INFO ||NCC_WRAPPER||: Got a cached failed neff at /var/x/model.neff.", "CompileFailed", None),
        (
            "Another process must be compiling /x/model.hlo_module.pb, been waiting for: 5 minutes",
            "CompileFailed",
            None,
        ),
    ],
)
def test_words_of_the_runtime_mean_what_is_documented(text: str, reason: str, action: Action | None) -> None:
    words = f"2026-Nov-21 10:00:00 something before\n{text}\nTraceback: something after"
    found = diagnose(words)
    assert found is not None
    assert (found.reason, found.action) == (reason, action)
    assert telling_line(words) == " ".join(text.split())


def test_hardware_comes_before_what_followed_from_it() -> None:
    words = f"{FATAL} Uncorrectable HBM memory error is detected.\nNeuronCore(s) not available - Requested:nc1-nc1"
    found = diagnose(words)
    assert found is not None
    assert found.reason == "DeviceLost"


@every(
    "text",
    [
        "",
        "ValueError: shape mismatch",
        "OFI plugin initNet() failed is EFA enabled?",
        "Timeout waiting for RX (waited 120 sec) - retrying",
        "nc_latency status ok 1201 bytes",
        "read 1202 bytes of /dev/neuron0",
        "exit status 1",
        "HTTP status 404",
        "Using a cached neff at /var/tmp/x/model.neff. Exiting with a successfully compiled graph.",
        "NRT_EXEC_COMPLETED_WITH_NUM_ERR",
    ],
)
def test_words_that_say_nothing_of_the_device_accuse_nobody(text: str) -> None:
    assert diagnose(text) is None
    assert telling_line(text) == ""


@given(st.text(max_size=400))
def test_any_words_are_read_without_harm(text: str) -> None:
    found = diagnose(text)
    assert found is None or found.reason
    assert len(telling_line(text)) <= 300


def test_reason_that_says_enough_already_stays() -> None:
    busy = "NeuronCore(s) not available - Requested:nc1-nc1 Available:0"
    assert explain("Crashed", "exited with code 1 in the middle", busy)[0] == "Busy"
    assert explain("MissingDevice", "no such core", busy) == ("MissingDevice", "no such core", None)
    assert explain("Crashed", "killed by SIGSEGV", "nothing") == ("Crashed", "killed by SIGSEGV", None)
