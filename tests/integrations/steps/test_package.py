"""The distribution for the job's interpreter: the standard library alone, Python 3.8, and nothing of healthd."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import healthd
from tests.pythons import find_python

FOLDER = Path(__file__).parents[3] / "packages/healthd-steps"
MODULES = sorted((FOLDER / "healthd_steps").glob("*.py"))

JOB = """
import sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
from healthd_steps import StepReporter, callbacks
reporter = StepReporter(job="train", rank=1, size=2, path=sys.argv[2])
light = callbacks.LightningCallback(reporter)
light.on_fit_start(None, None)
reporter.begin()
with reporter.waiting:
    pass
reporter.end(7)
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
assert tops.isdisjoint({"healthd", "checks", "torch", "asyncio"}), tops
"""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_is_python_3_8_and_imports_the_standard_library_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    for node in tree.body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.partition(".")[0] in {"healthd_steps", *sys.stdlib_module_names}, name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    copy = folder / "source"
    subprocess.run(["cp", "-r", str(FOLDER), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(copy)]
    subprocess.run(command, check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_modules_and_needs_nothing(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = [name for name in archive.namelist() if ".dist-info/" not in name]
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert sorted(packed) == sorted(f"healthd_steps/{name}" for name in [*(one.name for one in MODULES), "py.typed"])
    assert "Requires-Python: >=3.8\n" in metadata
    assert "Requires-Dist" not in metadata
    assert re.search(rf"(?m)^Version: {re.escape(healthd.__version__)}$", metadata)


@pytest.mark.parametrize("version", ["3.8", "3.11"])
def test_a_job_reports_with_what_is_installed(wheel: Path, tmp_path: Path, version: str) -> None:
    python = sys.executable if version == "3.11" else find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here; install one as python{version} on PATH")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as daemon:
        daemon.bind(str(tmp_path / "steps.sock"))
        command = [python, "-I", "-S", "-W", "error", "-B", "-c", JOB, str(wheel), str(tmp_path / "steps.sock")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert daemon.recv(512).startswith(b"step1 train 1 2 7 ")
        assert daemon.recv(512) == b"end1 train 1"
