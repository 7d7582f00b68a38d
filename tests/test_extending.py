"""A new kind of device is one file; a new launcher is one file and a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hosts.machine import Machine

ROOT = Path(__file__).parents[1]

LAUNCHER = '''
"""A launcher that tells its processes two numbers."""
from healthd.hooks.launchers import Launcher, Place, number


def renumber(environ, *, rank, size, main):
    return {"KITE_NODE": str(rank), "KITE_NODES": str(size)}


def find(environ):
    if "KITE_NODES" not in environ:
        return None
    rank, size = number(environ, "KITE_NODE"), number(environ, "KITE_NODES")
    return Place(job="flight", attempt=0, rank=rank, size=size, main="127.0.0.1", local_rank=0, local_size=1,
                 source="Kite", evidence="KITE_NODE and KITE_NODES", renumber=renumber)


LAUNCHER = Launcher(order=5, variables=("KITE_NODE",), find=find, size_told_by=("KITE_NODE", "KITE_NODES"))
'''
LINE = 'Integration(name="kite", launcher="healthd.integrations.kite.launcher:LAUNCHER"),'

ACCELERATOR = """
'A kind of device of which a machine has as many as CPU devices, and that is there where its first device file is.'
from checks.accelerators import Descriptor, Diagnosis, OwnIndex, Tool, cpu

DESCRIPTOR = Descriptor(
    name="kite",
    detect_order=-1,
    speed_versions=("torch",),
    device_files="/dev/kite",
    numbers_last=True,
    tools={"kite-ls": "install kite-tools"},
    python_packages=("torch-kite",),
    own_index=OwnIndex(title="Kite packages", needed="torch-kite", source="the real ones are at Kite"),
    kernel_modules=("kite",),
    kernel_words="kite",
    version_files={"kite_driver": "/sys/module/kite/version"},
    diagnose=lambda text: (Diagnosis("DeviceLost", None, "splice it"), "torn") if "KITE_TORN" in text else None,
    tells_of_trouble=lambda text: "KITE_TORN" in text,
    support_tools=(Tool(("kite-ls", "--all")), Tool(("kite-top",), streams=True)),
)

bind, hold, holders = cpu.bind, cpu.hold, cpu.holders


def present(host):
    return host.exists("/dev/kite0")


def find(host, options):
    return {**cpu.find(host, options), "accelerator": "kite"}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product with what each thing takes that is added."""
    copy = tmp_path_factory.mktemp("product")
    for name in ("healthd", "checks"):
        shutil.copytree(ROOT / name, copy / name)
    leaf = copy / "healthd" / "integrations" / "kite"
    leaf.mkdir()
    (leaf / "__init__.py").touch()
    (leaf / "launcher.py").write_text(LAUNCHER)
    listed = leaf.parent / "__init__.py"
    listed.write_text(listed.read_text().replace("INTEGRATIONS = (\n", f"INTEGRATIONS = (\n    {LINE}\n"))
    (copy / "checks" / "accelerators" / "kite.py").write_text(ACCELERATOR)
    return copy


def run(tree: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`healthd` of the copy, in a process outside of any job."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "healthd", *arguments],
        cwd=tree,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def doctor(tree: Path, state: Path, *arguments: str, **variables: str) -> Mapping[str, str]:
    """Item -> text of `healthd doctor`."""
    place = ("--state-dir", str(state / "state"), "--run-dir", str(state / "run"))
    ended = run(tree, "doctor", "--json", *place, *arguments, **variables)
    assert ended.stdout, ended.stderr
    return {item["name"]: f"{item['state']}: {item['text']}" for item in json.loads(ended.stdout)}


def test_a_launcher_is_one_file_and_a_line(tree: Path, tmp_path: Path) -> None:
    around = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    around |= {"SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
    items = doctor(tree, tmp_path, KITE_NODE="0", KITE_NODES="1", **around)
    assert items["launcher"] == "ok: rank 0 of 1 by Kite (KITE_NODE and KITE_NODES)"  # inside of Slurm, by its order
    assert items["launcher around it"].startswith("ok: rank 0 of 1 by Slurm")


def test_a_launcher_says_what_preflight_asks_of_it(tree: Path) -> None:
    trace = run(tree, "preflight", "--", "true", KITE_NODE="0")
    assert "no launcher's variables found, but KITE_NODE is set" in trace.stderr
    size = run(tree, "preflight", "--nnodes", "3", "--main", "h", "--", "true", KITE_NODE="3")
    assert "Kite: rank 3 of 3 nodes" in size.stderr  # its own number of nodes is the user's


RENUMBERED = """
import os
from healthd.hooks.launchers import find_place
from healthd.hooks.preflight.hook import Outcome, environment_of
told = environment_of(find_place(os.environ), Outcome(kind="run", code=0, rank=1, size=2), os.environ)
print(told["KITE_NODE"], told["KITE_NODES"], told["HEALTHD_RANK"])
"""


def test_a_launcher_renumbers_its_own_variables_where_a_job_starts_with_fewer(tree: Path, tmp_path: Path) -> None:
    variables = {"KITE_NODE": "2", "KITE_NODES": "4", "TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}
    argv = [sys.executable, "-c", RENUMBERED]
    assert subprocess.check_output(argv, cwd=tree, env=variables, text=True, timeout=100) == "1 2 1\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with one kite, and the tools of its vendor."""
    made = Machine(tmp_path / "host")
    made.write("/dev/kite0", "")
    made.write("/dev/kmsg", "6,1,1000000,-;kite 0: string is wet\n6,2,2000000,-;something else\n")
    made.write("/sys/module/kite/version", "3.1\n")
    for name, text in (("kite-ls", "one kite"), ("kite-top", "wind 4")):
        made.write(f"/bin/{name}", f"#!/bin/sh\necho {text}\n")
        (made.root / "bin" / name).chmod(0o755)
    return made


@pytest.mark.thorough
def test_doctor_knows_a_kind_of_device_by_its_descriptor(tree: Path, tmp_path: Path, machine: Machine) -> None:
    items = doctor(tree, tmp_path, "--host-root", str(machine.root))
    assert items["devices"].startswith("ok: kite: 2 devices")
    assert items["kite-ls"].startswith("ok: ")
    assert items["Kite packages"].endswith("has no torch-kite")
    (machine.root / "bin" / "kite-ls").unlink()
    assert doctor(tree, tmp_path, "--host-root", str(machine.root))["kite-ls"].startswith("missing: ")


@pytest.mark.thorough
def test_bundle_has_what_the_descriptor_names(tree: Path, tmp_path: Path, machine: Machine) -> None:
    file = tmp_path / "bundle.tar.gz"
    run(tree, "bundle", "--output", str(file), "--host-root", str(machine.root), "--state-dir", str(tmp_path))
    with tarfile.open(file) as archive:
        texts = {
            member.name.partition("/")[2]: content.read().decode()
            for member in archive
            if (content := archive.extractfile(member))
        }
    assert texts["machine/bin/kite-ls.0.out"] == "one kite\n"
    assert texts["machine/bin/kite-top.0.out"].strip() == "wind 4"
    assert "string is wet" in texts["machine/dev/kmsg"]
    assert "something else" not in texts["machine/dev/kmsg"]
    assert json.loads(texts["versions.json"])["kernel_module_versions"]["kite"] == "3.1"
    assert json.loads(texts["versions.json"])["torch-kite"] is None


@pytest.mark.thorough
def test_warm_has_nothing_to_do_for_a_kind_that_does_not_compile(tree: Path, tmp_path: Path, machine: Machine) -> None:
    ended = run(tree, "warm", "--host-root", str(machine.root), "--run-dir", str(tmp_path / "run"))
    assert ended.stdout == "nothing to compile: accelerator kite does not compile\n", ended.stderr


def test_passive_checks_see_its_devices(tree: Path, tmp_path: Path, machine: Machine) -> None:
    place = ("--host-root", str(machine.root), "--run-dir", str(tmp_path / "run"))
    ended = run(tree, "check", "--tier", "passive", "--json", *place)
    state = json.loads(ended.stdout)
    assert state["inventory"]["accelerator"] == "kite"
    assert state["versions"]["kite_driver"] == "3.1"
    assert {result["check"]: result["status"] for result in state["results"]}["device_count"] == "pass"


TORN = """
from checks.device.probes import is_trouble
from healthd.runner.workers.outcome import explain
print(explain("CheckError", "it failed", "KITE_TORN")[:2], is_trouble(RuntimeError("KITE_TORN")))
"""


def test_words_of_its_runtime_explain_a_failure(tree: Path) -> None:
    argv = [sys.executable, "-c", TORN]
    said = subprocess.check_output(argv, cwd=tree, env={"PATH": os.environ["PATH"]}, text=True, timeout=100)
    assert said == "('DeviceLost', 'torn; splice it') True\n"
