"""
A profile of one compiled program on one NeuronCore, by AWS's `neuron-profile`, while nobody else has the core.

    neuron-profile capture -n file.neff -s profile.ntff
    neuron-profile view --output-format json --output-file profile.json -n file.neff -s profile.ntff

Source: AWS Neuron, "Neuron Profiler User Guide" (SDK 2.28): capture executes the program and writes the trace; `view`
writes `summary` and `instruction`, each of those with timestamp and duration in nanoseconds, label, opcode and
hlo_name. Both have run on a stand-in alone.

Also here:

- which compiled programs (NEFF) belong to a check, in a folder of the compile cache: those that it made when it
  compiled.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checks.atomic_file import write_atomically
from checks.contract import PROFILE_FORMAT, Profile
from checks.host.guard import PROFILE_PREFIX
from checks.host.machine import Host
from checks.json_text import parse_json
from checks.profiling.operations import packed, profile_id, shares

TOOL = "neuron-profile"
CAPTURE_SECONDS = 60.0
VIEW_SECONDS = 60.0
_MAX_JSON_BYTES = 32 << 20  # parsed whole: ten times as much memory
_MAX_FILE_BYTES = 512 << 20
_OPERATION = re.compile(r"=\s*(?:[a-z0-9]+\[[^\]]*\]\S*\s+)?([a-zA-Z][\w.-]*)\(")

PROGRAMS = "programs.json"
_MAX_BYTES = 1 << 20
_MAX_PROGRAMS = 64  # of a check
_MAX_FILES = 10_000


def capture(host: Host, program: str, target: str, name: str) -> Profile:
    """
    Run a program once more on the core `target` (`neuroncore:5`) and say what took its time.

    Raises ProfileError and HostError.
    """
    core = target.rpartition(":")[2]
    if not core.isdecimal():
        raise ProfileError(f"{target} is not a core")
    program = os.path.abspath(program)
    # The tools run in the folder: their guard removes it where this process is killed.
    with tempfile.TemporaryDirectory(prefix=PROFILE_PREFIX, ignore_cleanup_errors=True) as folder:
        trace, told = os.path.join(folder, "profile.ntff"), os.path.join(folder, "profile.json")

        def pinned(environment: Mapping[str, str]) -> Mapping[str, str]:
            kept = {key: value for key, value in environment.items() if key != "NEURON_RT_NUM_CORES"}
            return {**kept, "NEURON_RT_VISIBLE_CORES": core}

        with _small_files():
            _run(host, [TOOL, "capture", "-n", program, "-s", trace], folder, CAPTURE_SECONDS, pinned)
            view = [TOOL, "view", "--output-format", "json", "--output-file", told, "-n", program, "-s", trace]
            _run(host, view, folder, VIEW_SECONDS, None)
        content = _read(Path(told))
    instructions = list(_instructions(content))
    times: Counter[str] = Counter()
    for event in instructions:
        times[event["name"]] += event["dur"]
    said = shares(times)
    if not said:
        raise ProfileError("the trace has no instruction that took time")
    now = time.time()
    about = {"probe": name, "target": target, "program": program, "said": said, "taken_at": round(now, 3)}
    return Profile(
        id=profile_id(name, target, now),
        target=target,
        said=said,
        format=PROFILE_FORMAT,
        content=packed(about, instructions),
    )


class ProfileError(RuntimeError):
    """There is no profile; the message says why."""


def programs_in(folder: Path) -> frozenset[str]:
    """All programs below the folder, by their paths in it."""
    found: list[str] = []
    for place, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(place, name), folder) for name in names if name.endswith(".neff")]
        if len(found) > _MAX_FILES:
            break
    return frozenset(found)


def remember(folder: Path, entry: str, programs: Collection[str]) -> None:
    """Note the programs of an entry of the manifest; where that cannot be written, its check has no profile."""
    known = {**_known(folder), entry: sorted(programs)[:_MAX_PROGRAMS]}
    with suppress(OSError):
        write_atomically(folder / PROGRAMS, json.dumps(known).encode(), several_writers=True)


def programs_of(folder: Path, entry: str) -> list[Path]:
    """The programs of an entry that are still there, the largest first."""
    sizes: dict[Path, int] = {}
    for name in _known(folder).get(entry, ()):
        path = folder / name
        with suppress(OSError):
            if folder.resolve() in path.resolve().parents:
                sizes[path] = path.stat().st_size
    return sorted(sizes, key=lambda path: (-sizes[path], path))


@contextmanager
def _small_files() -> Iterator[None]:
    """Programs that are started meanwhile, and this process, cannot write a larger file: it would fill the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bounds = [limit for limit in (soft, hard, _MAX_FILE_BYTES) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _run(host: Host, argv: list[str], folder: str, seconds: float, environment: Any) -> None:
    done = host.run(argv, timeout_seconds=seconds, folder=folder, environment=environment)
    if done.returncode != 0:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise ProfileError(f"{argv[0]} {argv[1]} ended with code {done.returncode}: {lines[-1] if lines else 'silent'}")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{TOOL} view has written nothing: {error.strerror}") from None
    if len(content) > _MAX_JSON_BYTES:
        raise ProfileError(f"{TOOL} view has written more than {_MAX_JSON_BYTES} bytes")
    return content


def _instructions(content: bytes) -> Iterator[dict[str, Any]]:
    """All instructions as events of the Trace Event Format, by engine; none without a time."""
    try:
        rows = parse_json(content)["instruction"]
        for row in rows:
            begun, took = float(row["timestamp"]) / 1e3, float(row["duration"]) / 1e3
            if not (math.isfinite(begun) and math.isfinite(took) and took >= 0):
                continue
            yield {
                "name": _operation(row),
                "cat": "instruction",
                "ph": "X",
                "ts": begun,
                "dur": took,
                "pid": "device",
                "tid": str(row.get("label") or "?")[:64],
                "args": {"opcode": str(row.get("opcode"))[:64]},
            }
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise ProfileError(f"{TOOL} view: its output is not understood: {type(error).__name__}") from None


def _operation(row: Mapping[str, Any]) -> str:
    """`add` of `%add.1 = add(%dot, %custom-call.44)`; the opcode where no operation is named."""
    found = _OPERATION.search(str(row.get("hlo_name") or ""))
    return (found[1] if found else str(row.get("opcode") or "?"))[:200]


def _known(folder: Path) -> dict[str, list[str]]:
    try:
        with open(folder / PROGRAMS, encoding="utf-8") as file:
            said = parse_json(file.read(_MAX_BYTES))
        return {str(entry): [str(name) for name in names] for entry, names in said.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
