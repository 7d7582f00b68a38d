"""The compile cache of the probes: its key, its manifest, and what goes wrong with locks and failures."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks import compile_cache
from checks.accelerators import descriptors, find_descriptor
from checks.compile_cache import (
    MANIFEST,
    CacheKey,
    ColdCacheError,
    CompileCache,
    entry_of,
    find_troubles,
    make_key,
    sources_of,
    to_key,
)
from checks.host import python_packages
from checks.worker.commands import Compiling
from tests.profile import examples

KEY = CacheKey(
    accelerator="neuron",
    device="Trainium1",
    lnc=1,
    flags=("--optlevel=1",),
    versions={"neuronx-cc": "2.28.7631.0", "torch": "2.9.1"},
    probes="abc",
)
INVENTORY = {
    "accelerator": "neuron",
    "devices": [
        {"target": "neuron:0", "kind": "Trainium1", "core_ids": [0, 1]},
        {"target": "neuron:1", "kind": None, "core_ids": None},
    ],
    "workers": ["neuroncore:0", "neuroncore:1"],
    "lnc": 1,
}


def warm_cache(root: Path, key: CacheKey = KEY) -> CompileCache:
    cache = CompileCache(root, key)
    cache.record("matmul/quick/1", 60.25)
    (cache.folder / "neuron").mkdir()
    (cache.folder / "neuron" / "model.neff").write_bytes(b"program")
    return cache


# --- key and manifest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"accelerator": "xla"},
        {"device": "Trainium2"},
        {"lnc": 2},
        {"flags": ("--optlevel=2",)},
        {"versions": {"neuronx-cc": "2.29"}},
        {"probes": "abd"},
    ],
)
def test_every_part_of_the_key_has_a_folder_of_its_own(tmp_path: Path, change: dict[str, Any]) -> None:
    warm_cache(tmp_path)
    other = dataclasses.replace(KEY, **change)
    assert other.digest != KEY.digest
    assert CompileCache(tmp_path, other).compiled() == {}
    assert CompileCache(tmp_path, to_key(dataclasses.asdict(KEY))).compiled() == {"matmul/quick/1": 60.25}


def test_key_is_made_of_the_device_that_the_core_is_on() -> None:
    assert make_key(INVENTORY, "neuroncore:1", (), 1, {}).device == "Trainium1"
    assert make_key({**INVENTORY, "devices": []}, "neuroncore:1", (), 1, {}).device is None
    xla = {"accelerator": "xla", "devices": [{"target": "xla:0", "kind": "a"}, {"target": "xla:1", "kind": "b"}]}
    assert [make_key(xla, target, (), None, {}).device for target in ("xla:1", "xla:0,xla:1", None)] == ["b", "a", "a"]


def test_tier_parameters_and_size_of_the_group_are_graphs_of_their_own() -> None:
    entries = {
        entry_of("matmul", "quick", {}),
        entry_of("matmul", "deep", {}),
        entry_of("matmul", "quick", {"sizes": [64]}),
        entry_of("matmul", "quick", {}, 2),
        entry_of("matmul", "quick", {}, 32),
    }
    assert len(entries) == 5


def test_entries_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from tests.checks.test_neuron_cache import KEY, CompileCache\n"
        "[CompileCache(Path(sys.argv[2]), KEY).record(f'{sys.argv[3]}{i}', 1.0) for i in range(20)]"
    )
    root = str(Path(__file__).parents[2])
    started = [subprocess.Popen([sys.executable, "-c", code, root, str(tmp_path), name]) for name in "ab"]
    assert [process.wait(60) for process in started] == [0, 0]
    assert len(CompileCache(tmp_path, KEY).compiled()) == 40


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
good = {"format": 1, "key": dataclasses.asdict(KEY), "made_at": 1.0, "entries": {"matmul/quick/1": {"seconds": 2.0}}}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(member=st.sampled_from([*good, "format", "entries"]), value=plain, cut=st.integers(0, 400))
def test_manifest_that_is_damaged_is_cold_never_warm(tmp_path: Path, member: str, value: object, cut: int) -> None:
    cache = CompileCache(tmp_path, KEY)
    cache.folder.mkdir(exist_ok=True)
    text = json.dumps({**good, member: value})
    for said in (text, text[:cut]):
        (cache.folder / MANIFEST).write_text(said)
        compiled = cache.compiled()
        assert compiled == {} or compiled == {"matmul/quick/1": 2.0} or member in ("entries", "made_at")
        assert all(isinstance(seconds, float) for seconds in compiled.values())


def test_cold_probe_says_so_before_torch_is_imported(tmp_path: Path) -> None:
    setup = {"inventory": INVENTORY, "target": "neuroncore:0", "options": {}}
    graphs = [{"check": "matmul", "tier": "quick", "params": {}, "ranks": None}]
    said = {"root": str(tmp_path), "graphs": graphs, "cold": "unknown", "retry": False}
    with pytest.raises(ColdCacheError, match="nothing is compiled here for matmul; run 'healthd warm'"):
        Compiling(said, setup).cold()
    warm = Compiling({**said, "cold": "compile"}, setup)
    assert len(warm.cold()) == 1
    warm.ended("matmul", 61.0)
    assert Compiling(said, setup).cold() == []
    assert Compiling(None, setup).cold() == []
    assert Compiling(None, setup).options() == {}


def test_one_cold_check_leaves_the_compiled_ones_to_run(tmp_path: Path) -> None:
    setup = {"inventory": INVENTORY, "target": "neuroncore:0", "options": {}}
    graphs = [{"check": name, "tier": "quick", "params": {}, "ranks": None} for name in ("matmul", "memory")]
    said = {"root": str(tmp_path), "graphs": graphs, "cold": "unknown", "retry": False}
    Compiling({**said, "cold": "compile"}, setup).ended("matmul", 61.0)
    here = Compiling(said, setup)
    assert here.cold() == []  # nothing that this worker will compile
    here.require("matmul")
    with pytest.raises(ColdCacheError, match="nothing is compiled here for memory; run 'healthd warm'"):
        here.require("memory")
    assert not any(here.is_due(one) for one in here.graphs)
    compiler = Compiling({**said, "cold": "compile"}, setup)
    assert [one.check for one in compiler.graphs if compiler.is_due(one)] == ["memory"]


def test_one_cold_collective_keeps_the_ranks_from_starting(tmp_path: Path) -> None:
    setup = {"inventory": INVENTORY, "target": "neuroncore:0", "options": {}}
    graphs = [{"check": name, "tier": "quick", "params": {}, "ranks": 2} for name in ("all_reduce", "all_gather")]
    said = {"root": str(tmp_path), "graphs": graphs, "cold": "unknown", "retry": False}
    Compiling({**said, "cold": "compile"}, setup).ended("all_reduce", 61.0)
    with pytest.raises(ColdCacheError, match="all_gather"):
        Compiling(said, setup).cold()


def test_probe_that_may_not_compile_never_claims_to_have(tmp_path: Path) -> None:
    setup = {"inventory": INVENTORY, "target": "neuroncore:0", "options": {}}
    graphs = [{"check": "matmul", "tier": "quick", "params": {}, "ranks": None}]
    said = {"root": str(tmp_path), "graphs": graphs, "cold": "unknown", "retry": False}
    Compiling(said, setup).ended("matmul", 1.0)
    with pytest.raises(ColdCacheError):
        Compiling(said, setup).cold()


def test_one_process_compiles_and_the_other_waits_until_it_is_done_or_dead(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from tests.checks.test_neuron_cache import KEY, CompileCache\n"
        "with CompileCache(Path(sys.argv[2]), KEY).compiling(): print('in', flush=True); time.sleep(30)"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", code, root, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"in\n"
        with open(CompileCache(tmp_path, KEY).folder / "compiling.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        with CompileCache(tmp_path, KEY).compiling():
            pass


# --- failures and stale locks -----------------------------------------------------------------------------------------


def module(cache: CompileCache, name: str, *files: str, age_seconds: float = 600.0) -> Path:
    folder = cache.folder / "neuron" / "neuronxcc-2.28" / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("")
        os.utime(folder / file, (time.time() - age_seconds,) * 2)
    return folder


def test_failed_compilations_and_stale_locks_are_found_and_cleared(tmp_path: Path) -> None:
    cache = warm_cache(tmp_path)
    module(cache, "MODULE_1+a", "model.done", "model.log")
    module(cache, "MODULE_2+a", "model.hlo_module.pb.lock")
    good = module(cache, "MODULE_3+a", "model.done", "model.neff", "model.hlo_module.pb.lock")
    fresh = module(cache, "MODULE_4+a", "model.hlo_module.pb.lock", age_seconds=0.0)
    said = find_troubles(tmp_path)
    assert [text.split()[0] for text in said] == ["stale", "failed"]
    assert "MODULE_2" in said[0]
    assert "MODULE_1" in said[1]
    assert len(cache.clear_stale()) == 2
    assert find_troubles(tmp_path) == []
    assert (good / "model.neff").exists()
    assert (fresh / "model.hlo_module.pb.lock").exists()
    assert cache.compiled()


def test_lock_that_somebody_holds_is_never_stale(tmp_path: Path) -> None:
    cache = warm_cache(tmp_path)
    folder = module(cache, "MODULE_2+a", "model.hlo_module.pb.lock")
    with open(folder / "model.hlo_module.pb.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find_troubles(tmp_path) == []
        assert cache.clear_stale() == []


# --- packages ---------------------------------------------------------------------------------------------------------


def distribution(folder: Path, name: str, version: str, files: list[str]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]))


def asked(folder: Path) -> dict[str, Any]:
    program = python_packages.__file__
    described = find_descriptor("neuron")
    assert described is not None
    names = described.python_packages
    code = f"import sys, runpy; sys.path.insert(0, {str(folder)!r}); runpy.run_path({program!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, *names], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_placeholders_are_told_from_the_real_packages(tmp_path: Path) -> None:
    distribution(tmp_path, "torch-neuronx", "0.0.1", ["torch_neuronx/__init__.py"])
    distribution(tmp_path, "neuronx-cc", "1.0", [])
    distribution(tmp_path, "libneuronxla", "2.2.1", ["libneuronxla/__init__.py"])
    distribution(tmp_path, "nrtpy", "1.0", [f"nrtpy/part{index}.py" for index in range(40)])
    said = asked(tmp_path)
    assert said["placeholders"] == ["torch-neuronx 0.0.1", "neuronx-cc 1.0"]
    assert set(said["installed"]) == {"torch-neuronx", "neuronx-cc", "libneuronxla", "nrtpy"}
    assert said["versions"] == {"torch-neuronx": "0.0.1", "neuronx-cc": "1.0", "libneuronxla": "2.2.1"}


def test_interpreter_without_any_of_them_says_so(tmp_path: Path) -> None:
    assert asked(tmp_path) == {"versions": {}, "installed": {}, "placeholders": []}


@pytest.mark.parametrize("accelerator", [one.name for one in descriptors() if one.compiles])
def test_the_sources_that_make_graphs_are_all_there(accelerator: str) -> None:
    root = Path(compile_cache.__file__).parent
    assert len(sources_of(accelerator)) > len(compile_cache.SOURCES)
    for pattern in sources_of(accelerator):
        assert list(root.glob(pattern)), f"no file of checks/ matches {pattern}"
