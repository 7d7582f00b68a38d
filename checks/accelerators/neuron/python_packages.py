"""
Which distributions an interpreter has that drive Neuron devices, and whether they are the real ones.

The public package index holds only placeholders under these names; the real ones are in AWS's own repository. Nothing
is imported: versions and lists of files are what the installer wrote down. Runs as a program too, in the interpreter
that is asked about: `PYTHON -I python_packages.py` prints JSON. So it imports nothing of ours, which is not there.
"""

from __future__ import annotations

import json
from importlib import metadata

NEURON = ("torch-neuronx", "neuronx-cc", "libneuronxla", "nrtpy")
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


def find_placeholders() -> list[str]:
    """Distributions of the Neuron names that are no more than a name: `torch-neuronx 1.0`."""
    return [f"{name} {version}" for name in NEURON if (version := _version(name)) and is_placeholder(name)]


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


def main() -> None:
    """Print what the interpreter has."""
    said = {
        "versions": read_versions(),
        "neuron": {name: version for name in NEURON if (version := _version(name))},
        "placeholders": find_placeholders(),
    }
    print(json.dumps(said))  # noqa: T201  its standard output is its answer


if __name__ == "__main__":
    main()
