"""
Images of deploy/container, built with buildah in a chroot: no engine, no registry.

The base image is a Debian that debootstrap makes, under the name that the recipes ask for; packages come from wheels
that are downloaded once. `torch` in the images is an empty package, unless it is asked for: it is 200 MB. It then comes
from where pip finds it, or from the index that the variable TORCH_INDEX names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT
from tests.patience import PATIENCE

CONTAINER = ROOT / "deploy/container"
PYTHON = "docker.io/library/python:3.12-slim-bookworm"
PROGRAMS = ("buildah", "debootstrap")
SECONDS = 240.0


@dataclass(frozen=True)
class Workshop:
    """Where images are built."""

    folder: Path

    def buildah(self, *words: str | Path) -> str:
        """What it prints; AssertionError with its last words where it fails."""
        done = subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=SECONDS * PATIENCE,
            check=False,
            env=self.env,
            cwd=ROOT,
        )
        assert done.returncode == 0, f"buildah {' '.join(map(str, words))}: {(done.stdout + done.stderr)[-3000:]}"
        return done.stdout.strip()

    def command(self, *words: str | Path) -> list[str]:
        store = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        return ["buildah", *store, *map(str, words)]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def build(self, name: str, tag: str, **arguments: str) -> None:
        """An image of one of our recipes."""
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        wheels = [
            "--volume",
            f"{self.folder}/wheels:/wheels:ro",
            "--volume",
            f"{self.folder}/pip.conf:/etc/pip.conf:ro",
        ]
        ignored = ["--ignorefile", str(CONTAINER / "Containerfile.dockerignore")]
        recipe = ["-f", str(CONTAINER / name), "-t", tag, *given, str(ROOT)]
        self.buildah("bud", "--isolation", "chroot", "--pull-never", "--quiet", *wheels, *ignored, *recipe)


@contextmanager
def workshop_with_service(name: str, *, torch: bool = False) -> Iterator[Workshop]:
    """A workshop with the image `healthd` built; gone at the end. With `torch` it has the real one for the others."""
    # Not in memory: whole images are copied.
    folder = Path(os.environ.get("TMPDIR", "/var/tmp")) / f"healthd-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        made = Workshop(folder)
        base_image(made)
        wheels(made, torch=torch)
        made.build("Containerfile", "healthd")
        yield made
    finally:
        unmount(folder)
        shutil.rmtree(folder)


def unmount(folder: Path) -> None:
    """What an interrupted debootstrap left mounted below a folder, /proc: what is removed must not reach into it."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", mount], check=True)


def base_image(shop: Workshop) -> None:
    """A Debian with Python, under the name that the recipes ask for."""
    tree = shop.folder / "tree"
    packages = "--include=python3,python3-venv,ca-certificates"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", packages, "bookworm", str(tree)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"debootstrap: {(done.stdout + done.stderr)[-1000:]}")
    for name in ("python", "python3"):
        (tree / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
    container = shop.buildah("from", "scratch")
    shop.buildah("add", container, str(tree), "/")
    shop.buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    shop.buildah("commit", "--quiet", container, PYTHON)
    shop.buildah("rm", container)
    shutil.rmtree(tree)


def wheels(shop: Workshop, *, torch: bool = False) -> None:
    """What the recipes install, once, for Debian's Python; and torch, or an empty package of its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    wanted += [line for name in ("kubernetes", "postgresql", "aws", "nvidia") for line in extras[name]]
    folder = shop.folder / "wheels"
    (shop.folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    _download(folder, *wanted)
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    version = next(line.partition("==")[2] for line in pins if line.startswith("torch=="))
    if torch:
        index = os.environ.get("TORCH_INDEX")
        if index:
            _download(folder, f"torch=={version}", "--no-deps", "--index-url", index)
        _download(folder, f"torch=={version}", "--find-links", str(folder))
        return
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        own = f"torch-{version}.dist-info"
        wheel.writestr("torch/__init__.py", f'__version__ = "{version}"\n')
        wheel.writestr(f"{own}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{own}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{own}/RECORD", "")


def _download(folder: Path, *words: str) -> None:
    """What pip finds for Debian's Python, with what it needs."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--python-version", "3.11", "--only-binary", ":all:", "--dest", str(folder)),
            *("--constraint", str(ROOT / "requirements.txt"), *words),
        ],
        check=True,
        timeout=SECONDS * PATIENCE,
    )
