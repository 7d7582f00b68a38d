"""
The private compile cache of the probes: where it is, what it was made for, and what is in it.

Compilers for these devices take a minute for the smallest program, so what a quick check needs is compiled ahead
(`healthd warm`) and kept in a folder of ours, never in a job's. The folder's name is the digest of all that decides
about the programs; `manifest.json` in it lists what has been compiled. A probe that is not in the list is cold, which
can be told without importing torch.

For any accelerator that compiles. Nothing here judges, compiles or imports torch.

Unverified on hardware: how the Neuron compiler's own cache marks failures and locks (`_failures`, `_stale_locks`) is
known from its messages and documentation alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checks.accelerators import find_descriptor
from checks.atomic_file import write_atomically
from checks.json_text import parse_json

MANIFEST = "manifest.json"
COMPILING_LOCK = "compiling.lock"
MANIFEST_LOCK = "manifest.lock"
FORMAT = 1
STALE_LOCK_SECONDS = 60.0  # a lock that nobody holds may just have been made
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_FILES = 200_000
_DIGEST_CHARACTERS = 20

# The files below `checks` whose text makes the graphs, beside `graph_sources` of the accelerator's descriptor.
SOURCES = ("device/*.py", "collective/*.py")


class ColdCacheError(RuntimeError):
    """What a probe needs is not compiled, and nobody said that it may be compiled now."""

    reason = "ColdCache"


@dataclass(frozen=True)
class CacheKey:
    """
    All that decides about compiled programs. None means that it is not known, or has no meaning here.

    `device` is the kind of device ("Trainium1"), `lnc` the physical cores of a logical one, `flags` those of the
    compiler, `versions` those of compiler and frameworks by distribution, `probes` a digest of the probes' own source.
    """

    accelerator: str
    device: str | None
    lnc: int | None
    flags: tuple[str, ...]
    versions: Mapping[str, str]
    probes: str

    @property
    def digest(self) -> str:
        """The name of its folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def to_key(plain: object) -> CacheKey:
    """A key out of plain values. Raises ValueError (one line)."""
    if not isinstance(plain, dict):
        raise ValueError("the key is not an object")
    accelerator, device, lnc, flags, versions, probes = (
        plain.get(name) for name in ("accelerator", "device", "lnc", "flags", "versions", "probes")
    )
    texts = all(isinstance(item, str) for item in (accelerator, probes))
    if not texts or not isinstance(device, (str, type(None))) or isinstance(lnc, bool):
        raise ValueError("the key lacks accelerator, device or probes")
    if not isinstance(lnc, (int, type(None))) or not isinstance(flags, (list, tuple)) or not isinstance(versions, dict):
        raise ValueError("the key lacks lnc, flags or versions")
    return CacheKey(
        accelerator=str(accelerator),
        device=device,
        lnc=lnc,
        flags=tuple(str(flag) for flag in flags),
        versions={str(name): str(version) for name, version in versions.items()},
        probes=str(probes),
    )


def make_key(
    inventory: Mapping[str, Any], target: str | None, flags: Sequence[str], lnc: int | None, versions: Mapping[str, str]
) -> CacheKey:
    """The key of a worker's device; of the first device where `target` is None, and of an unknown one without any."""
    devices = inventory.get("devices") or []
    kinds = [device.get("kind") for device in devices if target is not None and serves(device, target)]
    if not kinds:
        kinds = [device.get("kind") for device in devices[:1]]
    return CacheKey(
        accelerator=str(inventory.get("accelerator")),
        device=kinds[0] if kinds else None,
        lnc=lnc,
        flags=tuple(flags),
        versions=dict(versions),
        probes=probes_digest(inventory.get("accelerator")),
    )


def serves(device: Mapping[str, Any], target: str) -> bool:
    """Whether a worker's target (a device, several, or a core) is on a device of the inventory."""
    first = target.split(",")[0]
    kind, _, number = first.partition(":")
    if kind == "neuroncore":
        return number.isdecimal() and int(number) in (device.get("core_ids") or ())
    return bool(device.get("target") == first)


def probes_digest(accelerator: str | None) -> str:
    """A digest of the source of all that makes graphs there: another version of a probe may make others."""
    root = Path(__file__).parent
    hashed = hashlib.sha256()
    for pattern in sources_of(accelerator):
        for path in sorted(root.glob(pattern)):
            hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:_DIGEST_CHARACTERS]


def sources_of(accelerator: str | None) -> tuple[str, ...]:
    """Patterns, below `checks`, of the files whose text makes the graphs of a kind of device."""
    described = find_descriptor(accelerator)
    return (*SOURCES, *(described.graph_sources if described is not None else ()))


def entry_of(check: str, tier: str, params: Mapping[str, Any], ranks: int | None = None) -> str:
    """The name under which the manifest has the graphs of a check: another tier or parameter makes other shapes."""
    shown = json.dumps(params, sort_keys=True, default=str)
    name = f"{check}/{tier}/{hashlib.sha256(shown.encode()).hexdigest()[:8]}"
    return name if ranks is None else f"{name}/{ranks} ranks"


class CompileCache:
    """One folder: that of a key. It is made when something is compiled."""

    def __init__(self, root: Path, key: CacheKey) -> None:
        self.key = key
        self.folder = root / key.digest

    def compiled(self) -> dict[str, float]:
        """Entry -> seconds that its compilation took; empty where there is no manifest that can be believed."""
        try:
            with open(self.folder / MANIFEST, encoding="utf-8") as file:
                said = parse_json(file.read(_MAX_MANIFEST_BYTES))
            if said["format"] != FORMAT or to_key(said["key"]) != self.key:
                return {}
            return {str(name): float(entry["seconds"]) for name, entry in said["entries"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def missing(self, entries: Sequence[str]) -> list[str]:
        """Those that have not been compiled."""
        known = self.compiled()
        return [entry for entry in entries if entry not in known]

    def record(self, entry: str, seconds: float) -> None:
        """Add an entry. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / MANIFEST_LOCK):
            entries = {name: {"seconds": took} for name, took in self.compiled().items()}
            entries[entry] = {"seconds": round(seconds, 3)}
            text = json.dumps({"format": FORMAT, "key": asdict(self.key), "made_at": time.time(), "entries": entries})
            write_atomically(self.folder / MANIFEST, text.encode(), several_writers=True)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """
        Be the one that compiles; others wait here. The kernel frees the place when its owner dies. Raises OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / COMPILING_LOCK):
            yield

    def clear_stale(self) -> list[str]:
        """
        Remove locks that nobody holds and what is left of failed compilations; what was removed, for people.

        Only by the one who is `compiling`: nobody else writes to this folder then.
        """
        said = []
        for path in _stale_locks(self.folder):
            with suppress(OSError):
                path.unlink()
                said.append(f"stale lock {path.relative_to(self.folder)}")
        for folder in _failures(self.folder):
            for path in folder.iterdir():
                with suppress(OSError):
                    path.unlink()
            with suppress(OSError):
                folder.rmdir()
            said.append(f"failed compilation {folder.relative_to(self.folder)}")
        return said


def find_troubles(root: Path) -> list[str]:
    """Stale locks and failed compilations in all caches below, for people; empty when there are none."""
    locks, failures = _stale_locks(root), _failures(root)
    return [f"stale lock {path.relative_to(root)}" for path in locks] + [
        f"failed compilation {path.relative_to(root)}" for path in failures
    ]


def _failures(folder: Path) -> list[Path]:
    """Modules of the Neuron compiler's cache that are marked as done, or have a log, but have no program."""
    found = []
    for path in _files(folder):
        marked = path.parent.name.startswith("MODULE_") and path.name in ("model.done", "model.log")
        if marked and not (path.parent / "model.neff").exists() and path.parent not in found:
            found.append(path.parent)
    return found


def _stale_locks(folder: Path) -> list[Path]:
    """Lock files beside unfinished modules that are old and that no process holds."""
    found = []
    for path in _files(folder):
        if path.suffix != ".lock" or not path.parent.name.startswith("MODULE_"):
            continue
        if (path.parent / "model.neff").exists() or not _is_old(path):
            continue
        if not _is_held(path):
            found.append(path)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, at most _MAX_FILES; links are not followed."""
    count = 0
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            count += 1
            if count > _MAX_FILES:
                return
            yield Path(place, name)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > STALE_LOCK_SECONDS
    except OSError:
        return False


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True  # what cannot be seen is held
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
