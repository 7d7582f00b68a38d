"""
What each of the two ways from PyTorch to a NeuronCore sees of the environment, when it is imported and opens its core.

Modules of the tests stand in for torch and for both packages called torch_neuronx, in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INVENTORY = {
    "accelerator": "neuron",
    "devices": [{"target": "neuron:0", "kind": "Trainium2", "cores": 2, "memory_bytes": 2**36, "core_ids": [0, 1]}],
    "workers": ["neuroncore:0", "neuroncore:1"],
    "lnc": 2,
}
OPTIONS = {
    "compile_folder": "/ours",
    "retry_failed": True,
    "group": {"size": 2, "targets": ["neuroncore:0", "neuroncore:1"], "root_comm": "127.0.0.1:40001"},
}
JOB = {
    "NEURON_CC_FLAGS": "--cache_dir=/job --auto-cast=all",
    "NEURON_COMPILE_CACHE_URL": "s3://job",
    "TORCH_NEURONX_HLO_CACHE_DIR": "/job/hlo",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "/job/neff",
}
TORCH = """
__version__ = "2.14.0"
class device:
    def __init__(self, name, index=None):
        if name == "neuron" and not NATIVE:
            raise RuntimeError("unknown device")
"""
NATIVE_PACKAGE = """
import os
__version__ = "2.14.3.0"
SEEN = dict(os.environ)  # it reads where its caches are when it is imported
def device_count(): return 1
"""
# As configure_pjrt_environment of torch-neuronx for PyTorch/XLA once was.
XLA_PACKAGE = """
import os
__version__ = "2.1.2.2.2.0"
os.environ["NEURON_RT_ROOT_COMM_ID"] = os.environ.get("MASTER_ADDR", "localhost") + ":62182"
os.environ["NEURON_LIBRARY_PATH"] = "/libneuronpjrt.so"
"""
TORCH_XLA = """
import os
__version__ = "2.1.2"
SEEN = {}
def device():
    SEEN.update(os.environ)
"""
BIND = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from checks.accelerators.neuron import torch_binding as neuron_torch
neuron_torch.bind("neuroncore:1", json.loads(sys.argv[3]), json.loads(sys.argv[4]))
import importlib
print(json.dumps(importlib.import_module(sys.argv[5]).SEEN))
"""


def seen(folder: Path, *, native: bool) -> dict[str, str]:
    """The environment when native TorchNeuron is imported, or when torch_xla opens its device."""
    modules = {"torch.py": TORCH.replace("NATIVE", str(native))}
    if native:
        modules["torch_neuronx.py"] = NATIVE_PACKAGE
    else:
        modules |= {
            "torch_neuronx.py": XLA_PACKAGE,
            "torch_xla/__init__.py": TORCH_XLA,
            "torch_xla/core/xla_model.py": "",
            "torch_xla/debug/metrics.py": "",
        }
    for name, text in modules.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    words = [str(ROOT), str(folder), json.dumps(INVENTORY), json.dumps(OPTIONS)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", BIND, *words, "torch_neuronx" if native else "torch_xla"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **JOB},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_native_way_gets_flags_of_the_compiler_alone_and_caches_of_ours(tmp_path: Path) -> None:
    environment = seen(tmp_path, native=True)
    # It gives the flags to neuronx-cc as they are, which knows neither --cache_dir nor --retry_failed_compilation.
    assert environment["NEURON_CC_FLAGS"] == "--optlevel=1 --auto-cast=none"
    assert environment["TORCH_NEURONX_HLO_CACHE_DIR"] == "/ours/hlo"
    assert environment["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/ours/neff"
    assert "NEURON_COMPILE_CACHE_URL" not in environment


@pytest.fixture(scope="module")
def xla(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return seen(tmp_path_factory.mktemp("xla"), native=False)


def test_way_by_xla_gets_its_own_flags_and_its_cache(xla: dict[str, str]) -> None:
    assert xla["NEURON_CC_FLAGS"] == (
        "--optlevel=1 --auto-cast=none --cache_dir=/ours/neuron --retry_failed_compilation"
    )
    assert xla["NEURON_COMPILE_CACHE_URL"] == "/ours/neuron"


def test_group_meets_where_it_was_told_to_whatever_an_old_package_sets(xla: dict[str, str]) -> None:
    assert xla["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:40001"
    assert xla["NEURON_LIBRARY_PATH"] == "/libneuronpjrt.so"
