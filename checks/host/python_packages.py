"""
Which distributions of vendors an interpreter has that drive devices, and whether they are the real ones.

The public package index holds only placeholders under some names; the real ones are in the vendor's own repository.
Nothing is imported: versions and lists of files are what the installer wrote down. Runs as a program too, in the
interpreter that is asked about: `PYTHON -I python_packages.py NAME ...` prints JSON. So it imports nothing of ours,
which is not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import metadata

COMPILING = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla")
_PLACEHOLDER_VERSIONS = frozenset({"0.0.1", "1.0", "1.0.0", "1.0.0.0"})
_PLACEHOLDER_FILES = 3  # a module that says that it is none, and what goes with it; the real ones have hundreds


def read_versions() -> dict[str, str]:
    """Name -> version of what decides about compiled programs; what is not installed is left out."""
    found = {}
    for name in COMPILING:
        version = _version(name)
        if version is not None:
            found[name] = version
    return found


def find_placeholders(names: Sequence[str]) -> list[str]:
    """Distributions of these names that are no more than a name: `torch-neuronx 1.0`."""
    return [f"{name} {version}" for name in names if (version := _version(name)) and is_placeholder(name)]


def is_placeholder(name: str) -> bool:
    """Whether an installed distribution has nothing in it. False where nobody wrote down its files."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    files = found.files
    if files is None or found.version not in _PLACEHOLDER_VERSIONS:
        return False
    modules = [
        file
        for file in files
        if file.suffix in (".py", ".so") and not file.parts[0].endswith((".dist-info", ".egg-info"))
    ]
    return len(modules) <= _PLACEHOLDER_FILES


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(names: Sequence[str]) -> None:
    """Print what the interpreter has of these names, and of what decides about compiled programs."""
    said = {
        "versions": read_versions(),
        "installed": {name: version for name in names if (version := _version(name))},
        "placeholders": find_placeholders(names),
    }
    print(json.dumps(said))  # noqa: T201  its standard output is its answer


if __name__ == "__main__":
    main(sys.argv[1:])
