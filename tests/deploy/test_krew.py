"""`kubectl healthd` by a real kubectl, and what a release has for krew, by the rules that krew itself checks."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.release import krew
from healthd.core import wire
from tests.core.client_kit import answer, server
from tests.deploy.manifests import ROOT

URL = "https://git.example.com/team/healthd"
NODE = {"node": "n1", "health": "healthy", "heard_seconds": 0.0, "allocated": [], "quarantine": None, "reasons": []}


@pytest.fixture(name="release")
def _release(tmp_path: Path) -> Path:
    krew.write("1.2.3", tmp_path, URL)
    return tmp_path


def manifest(release: Path) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((release / "healthd.yaml").read_text(encoding="utf-8"))
    return made


def test_manifest_is_what_krew_takes(release: Path) -> None:
    """As kubernetes-sigs/krew checks it: internal/index/validation/validate.go, pkg/index/types.go."""
    made = manifest(release)
    assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
    assert made["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert made["kind"] == "Plugin"
    assert made["metadata"]["name"] == "healthd", "that of the file"
    spec = made["spec"]
    assert set(spec) <= {"version", "shortDescription", "description", "caveats", "homepage", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert spec["shortDescription"]
    assert "\n" not in spec["shortDescription"]
    assert spec["platforms"]
    for platform in spec["platforms"]:
        assert set(platform) <= {"uri", "sha256", "selector", "files", "license", "bin"}
        assert re.fullmatch(r"[a-f0-9]{64}", platform["sha256"])
        assert platform["uri"].endswith((".tar.gz", ".zip"))
        assert set(platform["selector"]["matchLabels"]) <= {"os", "arch"}
        assert all(set(one) == {"from", "to"} and one["from"] and one["to"] for one in platform["files"])
        assert platform["bin"] in {one["from"] for one in platform["files"]}


def test_archive_is_the_one_that_the_manifest_names(release: Path, tmp_path: Path) -> None:
    (platform,) = manifest(release)["spec"]["platforms"]
    archive = release / platform["uri"].rpartition("/")[2]
    assert platform["uri"] == f"{URL}/releases/download/v1.2.3/{archive.name}"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == platform["sha256"]
    with tarfile.open(archive) as packed:
        assert {one["from"] for one in platform["files"]} == set(packed.getnames())
        assert packed.getmember(platform["bin"]).mode & 0o111 == 0o111
    (tmp_path / "again").mkdir()
    krew.write("1.2.3", tmp_path / "again", "")
    assert (tmp_path / "again" / archive.name).read_bytes() == archive.read_bytes(), "the same bytes each time"
    assert not (tmp_path / "again/healthd.yaml").exists(), "nobody said where the archive will be"


def kubectl() -> str:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    found = shutil.which("kubectl", path=f"{folder}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("kubectl is not installed")
    return found


def healthd_in(folder: Path, name: str) -> None:
    """The program as pip installs it, by a name."""
    folder.mkdir(exist_ok=True)
    lines = ("import sys", f"sys.path.insert(0, {str(ROOT)!r})", "from healthd.__main__ import main", "main()", "")
    (folder / name).write_text("\n".join((f"#!{sys.executable}", *lines)))
    (folder / name).chmod(0o755)


@pytest.mark.system("kubectl")
@pytest.mark.parametrize("way", ["pip", "krew"])
def test_real_kubectl_finds_the_plug_in(release: Path, tmp_path: Path, way: str) -> None:
    bin_folder = tmp_path / "bin"
    healthd_in(bin_folder, "kubectl-healthd" if way == "pip" else "healthd")
    if way == "krew":
        with tarfile.open(release / "kubectl-healthd-1.2.3.tar.gz") as packed:
            packed.extractall(tmp_path / "store", filter="data")
        (bin_folder / "kubectl-healthd").symlink_to(tmp_path / "store/kubectl-healthd")
    own = {key: value for key, value in os.environ.items() if not key.startswith("HEALTHD_")}
    summary = {"nodes": 1, "health": {"healthy": 1}, "gates_holding": 0, "recovering": None, "overrides": []}
    with server(answer(wire.encode(summary)), answer(wire.encode({"nodes": [NODE], "next": None}))) as url:
        done = subprocess.run(
            [kubectl(), "healthd", "status"],
            env={**own, "PATH": f"{bin_folder}:{own['PATH']}", "HEALTHD_AGGREGATOR": url},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "n1" in done.stdout


def test_plug_in_of_krew_names_the_remedy_where_healthd_is_not_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "deploy/release/kubectl-healthd", "status"],
        env={"PATH": "/usr/bin:/bin", "KUBECTL_HEALTHD_PROGRAM": str(tmp_path / "healthd")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    remedy = "install healthd, or name it in KUBECTL_HEALTHD_PROGRAM"
    assert done.stderr == f"kubectl-healthd: no such program: {tmp_path}/healthd; {remedy}\n"
