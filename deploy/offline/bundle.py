"""
Collect healthd and everything it needs for machines without a network: `make offline-bundle FOR_PYTHON=3.12`.

    python -m deploy.offline.bundle FOLDER --python 3.12 [--extra nvidia ...]

FOLDER gets `wheels/` (healthd, healthd-steps for the interpreter of jobs, what healthd requires, pip, and pytest for the tests on accelerators), `install.sh`, and
`SHA256SUMS`. The versions are those of requirements.txt. torch is left out: probes use the interpreter of the jobs.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = ROOT / "packages/healthd-steps"
INSTALLER = Path(__file__).with_name("install.sh")
EXTRAS = ("nvidia", "kubernetes", "postgresql")
"""Left out by default: aws and object-store, which are useless without a network and have 20 MB."""
FOR_TESTS = ("pytest", "pytest-timeout", "anyio", "hypothesis")
# Wheels name the oldest glibc they run with; pip matches each name literally.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12")
MOST_BYTES = 60 * 2**20


def main(arguments: list[str]) -> int:
    """See the module; 1 with one line where a wheel cannot be had, or the bundle is too large."""
    parser = argparse.ArgumentParser(prog="python -m deploy.offline.bundle")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the Python of the machines, such as 3.12")
    parser.add_argument("--machine", default="x86_64", help="their processors: x86_64 or aarch64")
    parser.add_argument("--extra", action="append", choices=sorted(extras()), help=f"default: {', '.join(EXTRAS)}")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"3\.(1[1-9]|[2-9]\d)", given.python):
        parser.error(f"--python {given.python}: healthd needs Python 3.11 or newer, such as 3.12")
    try:
        total = build(given.folder, given.python, given.machine, given.extra or EXTRAS)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        print(f"offline bundle: {' '.join(map(str, error.cmd[3:5]))} failed: {lines[-1] if lines else 'no output'}")
        return 1
    print(f"{given.folder}: {total / 2**20:.1f} MiB for Python {given.python} on {given.machine}")
    if total > MOST_BYTES:
        print(f"offline bundle: larger than {MOST_BYTES >> 20} MiB: leave out an extra")
        return 1
    return 0


def build(folder: Path, python: str, machine: str, chosen: tuple[str, ...] | list[str]) -> int:
    """Write the bundle; its size in bytes. A bundle that was there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    run([*pip, "wheel", *quiet, "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT, STEPS])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for name in chosen for line in extras()[name])]
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    with tempfile.TemporaryDirectory() as place:
        pins = Path(place) / "pins.txt"
        pins.write_text(pinned(), encoding="utf-8")
        target = ["--python-version", python, "--implementation", "cp", *platforms, "--only-binary", ":all:"]
        run([*pip, "download", *quiet, *target, "--dest", wheels, "--constraint", pins, *wanted, *FOR_TESTS, "pip"])
    shutil.copy(INSTALLER, folder)
    (folder / "install.sh").chmod(0o755)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    return sum(path.stat().st_size for path in files)


def extras() -> dict[str, list[str]]:
    """The optional dependencies of pyproject.toml by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["optional-dependencies"])


def pinned() -> str:
    """requirements.txt without torch and without what only its builds for CUDA require."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"(torch|nvidia-cu|triton)", line))


def run(command: list[str | Path]) -> None:
    """Run a program without showing what it prints; CalledProcessError, with that, where it fails."""
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
