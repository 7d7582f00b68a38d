"""
Images of deploy/container, built with buildah in a chroot: no engine, no registry.

The base image is a Debian that debootstrap makes, under the name that the recipes ask for; packages come from wheels
that are downloaded once. `torch` in the images is an empty package, unless it is asked for: it is 200 MB. It then comes
from where pip finds it, or from the index that the variable TORCH_INDEX names.

What does not depend on the working tree is kept in a cache of the user and used by later runs: the base image, the
wheels, and the interpreter with torch. An entry is named by a digest of what it is made from.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT
from tests.patience import PATIENCE

CONTAINER = ROOT / "deploy/container"
PYTHON = "docker.io/library/python:3.12-slim-bookworm"
WITH_TORCH = "3.12-slim-bookworm-torch"
"""Tag of the base image that has the interpreter with torch of Containerfile-torch as well."""
SUITE, PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"
PROGRAMS = ("buildah", "debootstrap")
SECONDS = 240.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "healthd-tests", "images")
# Not in memory: whole images are copied.
PLACE = Path(os.environ.get("TMPDIR", "/var/tmp"))
MOST_KEPT = 4
"""Entries of the cache; each has up to 1.5 GB."""
KEPT_SECONDS = 30 * 86400.0
"""Debian's packages are as old as the entry."""


@dataclass(frozen=True)
class Workshop:
    """Where images are built. `kept`: the store of images that others use too; None while that is made."""

    folder: Path
    kept: Path | None = field(default=None, kw_only=True)

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
        driver = storage_driver()
        store = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        store += ["--storage-driver", driver]
        if self.kept is not None:
            store += ["--storage-opt", f"{driver}.imagestore={self.kept / 'root'}"]
        return ["buildah", *store, *map(str, words)]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def build(self, name: str, tag: str, **arguments: str) -> None:
        """An image of one of our recipes."""
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        of = self.folder if self.kept is None else self.kept
        wheels = ["--volume", f"{of}/wheels:/wheels:ro", "--volume", f"{of}/pip.conf:/etc/pip.conf:ro"]
        ignored = ["--ignorefile", str(CONTAINER / "Containerfile.dockerignore")]
        recipe = ["-f", str(CONTAINER / name), "-t", tag, *given, str(ROOT)]
        self.buildah("bud", "--isolation", "chroot", "--pull-never", "--quiet", *wheels, *ignored, *recipe)

    def build_torch(self) -> None:
        """
        The image `healthd-torch`: the service and the interpreter with torch, in the other order than the recipes say.

        So the large layer is that of the cache.
        """
        self.build("Containerfile", "healthd-torch", PYTHON=WITH_TORCH)


@contextmanager
def workshop_with_service(name: str, *, torch: bool = False) -> Iterator[Workshop]:
    """A workshop with the image `healthd` built; gone at the end. `torch`: `build_torch` can be called."""
    folder = PLACE / f"healthd-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        with cached(torch=torch) as kept:
            made = Workshop(folder, kept=kept)
            made.build("Containerfile", "healthd")
            yield made
    finally:
        unmount(folder)
        shutil.rmtree(folder)


# --- what is kept -----------------------------------------------------------------------------------------------------


@contextmanager
def cached(*, torch: bool) -> Iterator[Path]:
    """The folder of base images and wheels, made where it is not there; nobody removes it meanwhile."""
    CACHE.mkdir(parents=True, exist_ok=True)
    entry = CACHE / digest(torch=torch)
    with locked(entry, fcntl.LOCK_EX):
        # What a run that was killed has left. Nobody else makes this entry: that needs the lock.
        unfinished = entry.with_suffix(".part")
        unmount(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        if not entry.exists():
            unfinished.mkdir()
            try:
                make(Workshop(unfinished), torch=torch)
                unfinished.rename(entry)
            finally:
                unmount(unfinished)
                shutil.rmtree(unfinished, ignore_errors=True)
        os.utime(entry)
    prune(entry)
    with locked(entry, fcntl.LOCK_SH):
        assert entry.exists(), f"{entry} was removed by another run: only where more than {MOST_KEPT} are in use"
        yield entry


def digest(*, torch: bool) -> str:
    """Of all that the entry is made from."""
    # How they are made is in this file.
    files = (Path(__file__), ROOT / "requirements.txt", ROOT / "pyproject.toml", CONTAINER / "Containerfile-torch")
    made = hashlib.sha256(repr((torch, os.environ.get("TORCH_INDEX"), storage_driver(), sys.version)).encode())
    for file in files:
        made.update(hashlib.sha256(file.read_bytes()).digest())
    return made.hexdigest()[:32]


@contextmanager
def locked(entry: Path, how: int) -> Iterator[None]:
    """Whoever uses an entry shares its lock; whoever makes or removes it has the lock alone. BlockingIOError."""
    path = entry.with_suffix(".lock")
    while True:
        with path.open("a") as lock:
            fcntl.flock(lock, how)
            # It may have been removed, with its entry, while we waited.
            if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                yield
                return


def prune(used: Path) -> None:
    """Remove what is old, the oldest of too many, and what is unfinished; what is in use stays."""
    folders = [path for path in CACHE.iterdir() if path.suffix in ("", ".part") and path.stem != used.name]
    now = time.time()
    aged = sorted(((now - path.stat().st_mtime, path) for path in folders), key=lambda one: one[0])
    for number, (age_seconds, path) in enumerate(aged, start=1):
        if not path.suffix and number < MOST_KEPT and age_seconds < KEPT_SECONDS:
            continue
        with suppress(BlockingIOError), locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            unmount(path)
            shutil.rmtree(path)
            path.with_suffix(".lock").unlink()


def make(shop: Workshop, *, torch: bool) -> None:
    """Base images and wheels, in the folder of a workshop."""
    base_image(shop)
    wheels(shop, torch=torch)
    if torch:
        shop.build("Containerfile-torch", "torch", BASE=PYTHON)
        container = shop.buildah("from", "--pull-never", "localhost/torch")
        shop.buildah("config", "--user", "0", container)  # recipes begin as root, as that of the service does
        shop.buildah("commit", "--quiet", container, f"docker.io/library/python:{WITH_TORCH}")
        shop.buildah("rm", container)
        for wheel in (shop.folder / "wheels").glob("torch-*"):
            wheel.unlink()
    shutil.rmtree(shop.folder / "run", ignore_errors=True)


@functools.cache
def storage_driver() -> str:
    """
    Of buildah: overlay where the file systems of cache and workshops take it, else vfs, which copies every layer.

    An overlay, as that of most containers, is not taken below another.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    return "overlay" if all(takes_overlay(folder) for folder in (CACHE, PLACE)) else "vfs"


def takes_overlay(folder: Path) -> bool:
    """Whether an overlay can be mounted with its layers in a folder."""
    with tempfile.TemporaryDirectory(dir=folder, suffix=".try") as name:
        for part in ("lower", "upper", "work", "top"):
            Path(name, part).mkdir()
        options = f"lowerdir={name}/lower,upperdir={name}/upper,workdir={name}/work"
        line = ["mount", "-t", "overlay", "overlay", "-o", options, f"{name}/top"]
        if subprocess.run(line, capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", f"{name}/top"], check=True)
    return True


def unmount(folder: Path) -> None:
    """What an interrupted debootstrap left mounted below a folder, /proc: what is removed must not reach into it."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", mount], check=True)


def base_image(shop: Workshop) -> None:
    """A Debian with Python, under the name that the recipes ask for."""
    tree = shop.folder / "tree"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(tree)],
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
