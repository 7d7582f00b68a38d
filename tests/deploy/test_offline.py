"""The bundle for machines without a network, and the first run on an accelerator."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy.offline import bundle

ROOT = Path(__file__).parent.parent.parent
THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
KEPT = {name: value for name, value in os.environ.items() if not name.startswith(("HEALTHD_", "PYTHON"))}


def run(*command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    line = [str(word) for word in command]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**KEPT, **more}, cwd="/")


@pytest.mark.nightly
@pytest.mark.system("unshare", root=True)
def test_bundle_installs_and_checks_where_there_is_no_network(tmp_path: Path) -> None:
    total = bundle.build(tmp_path / "bundle", THIS_PYTHON, platform.machine(), ["nvidia"])
    assert total < bundle.MOST_BYTES
    assert not list((tmp_path / "bundle/wheels").glob("torch-*"))
    offline = ("unshare", "--net")
    installed = run(*offline, tmp_path / "bundle/install.sh", tmp_path / "env", sys.executable, TESTS="1")
    assert installed.returncode == 0, installed.stderr
    here = ("--state-dir", tmp_path / "state", "--run-dir", tmp_path / "run")
    checked = run(*offline, tmp_path / "env/bin/healthd", "check", "memory_free", "--json", *here)
    assert (checked.returncode, json.loads(checked.stdout)["health"]) == (0, "healthy")
    assert run(tmp_path / "env/bin/python", "-m", "pytest", "--version").returncode == 0


@pytest.mark.parametrize(
    ("wheel", "sums", "message"),
    [
        ("msgspec-0.1-cp39-cp39-any.whl", "", "this bundle is for Python 3.9, and"),
        (
            f"msgspec-0.1-cp{THIS_PYTHON.replace('.', '')}-cp-any.whl",
            f"{'0' * 64}  install.sh\n",
            "SHA256SUMS: copy it",
        ),
    ],
)
def test_bundle_of_another_python_or_a_damaged_one_is_refused(
    tmp_path: Path, wheel: str, sums: str, message: str
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel).touch()
    (tmp_path / "SHA256SUMS").write_text(sums)
    (tmp_path / "install.sh").write_bytes(bundle.INSTALLER.read_bytes())
    refused = run("sh", tmp_path / "install.sh", tmp_path / "env", sys.executable)
    assert refused.returncode == 1
    assert message in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "env").exists()


def test_bundle_for_a_python_that_is_too_old_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bundle.main(["/nowhere", "--python", "3.9"])
    assert ended.value.code == 2
    assert "--python 3.9" in capsys.readouterr().err


def test_first_run_goes_on_after_failures_and_packs_what_it_has(tmp_path: Path) -> None:
    """With no time left for any part, and no bundle: the archive says so part by part."""
    line = (ROOT / "tests/gpu/first_run.sh", tmp_path, tmp_path / "no-bundle", sys.executable)
    done = run(*line, HEALTHD_ACCELERATOR="cpu", FIRST_RUN_SECONDS="0")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "first_run.tar.gz") as archive:
        packed = archive.extractfile("first_run/summary.txt")
        assert packed is not None
        first, *parts = packed.read().decode().splitlines()
    assert first.startswith("accelerator: cpu;")
    assert len(parts) > 10
    assert all(part.endswith("no time left") for part in parts)
