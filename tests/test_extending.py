"""What CONTRIBUTING.md promises: a new launcher, and a new kind of device, is one file; nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAUNCHER = '''
"""A launcher that tells its processes two numbers."""
from healthd.hooks.launchers import Descriptor, Place, number

DESCRIPTOR = Descriptor(order=5, variables=("KITE_NODE",), size_told_by=("KITE_NODE", "KITE_NODES"))


def renumber(environ, *, rank, size, main):
    return {"KITE_NODE": str(rank), "KITE_NODES": str(size)}


def find(environ):
    if "KITE_NODES" not in environ:
        return None
    rank, size = number(environ, "KITE_NODE"), number(environ, "KITE_NODES")
    return Place(job="flight", attempt=0, rank=rank, size=size, main="127.0.0.1", local_rank=0, local_size=1,
                 source="Kite", evidence="KITE_NODE and KITE_NODES", renumber=renumber)
'''


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product with one file more for each thing that is added."""
    copy = tmp_path_factory.mktemp("product")
    for name in ("healthd", "checks"):
        shutil.copytree(ROOT / name, copy / name)
    (copy / "healthd" / "hooks" / "launchers" / "kite.py").write_text(LAUNCHER)
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


def test_a_launcher_is_one_file(tree: Path, tmp_path: Path) -> None:
    around = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    around |= {"SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
    items = doctor(tree, tmp_path, KITE_NODE="0", KITE_NODES="1", **around)
    assert items["launcher"] == "ok: rank 0 of 1 by Kite (KITE_NODE and KITE_NODES)"  # inside of Slurm, by its order
    assert items["launcher around it"].startswith("ok: rank 0 of 1 by Slurm")


def test_a_launcher_of_one_file_says_what_preflight_asks_of_it(tree: Path) -> None:
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


def test_a_launcher_of_one_file_renumbers_its_own_variables_where_a_job_starts_with_fewer(
    tree: Path, tmp_path: Path
) -> None:
    variables = {"KITE_NODE": "2", "KITE_NODES": "4", "TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}
    argv = [sys.executable, "-c", RENUMBERED]
    assert subprocess.check_output(argv, cwd=tree, env=variables, text=True, timeout=100) == "1 2 1\n"
