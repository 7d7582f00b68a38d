"""Results of checks, and what they mean for a node: health, reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import CheckDeclaration, Evidence, Finding, Status, Tier

MOST_DIGESTS = 16
"""Of one result: three dtypes, and devices that differ."""
MOST_PLACES_CHARACTERS = 16_384
"""Of `WorkDigest.places`: 400 places of a user's model; the built-in step has 91 and takes 1.5 KB."""
MOST_KEY_CHARACTERS = 1024
MOST_TARGETS = 256
_SHORT = 4
"""
Hexadecimal digits of a place. That nodes differ is decided by the root; that the first place is named and not a later
one fails once in 65,536 times.
"""
_NOT_IN_NAMES = re.compile(r"[\s=:]")


@dataclass(frozen=True, kw_only=True)
class WorkDigest:
    """
    What fixed work came to, to the bit, on devices of a node that agree: for the comparison with other nodes.

    Only digests of one `key` may be compared. `label` says which work it was. `root` is the digest of all places,
    `places` a short one of each (see `healthd.core.model.results`).
    """

    key: str
    label: str
    root: str
    places: str
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """
    What a run of one check came to. Made by the runner out of *anything* that a child did.

    `tier` is the tier of the run, not of the check. `error` holds the child's last words (None when it ended well).
    `injected` is true when a fault was injected into it. `executor` says who ran it: `daemon`, `check` or a hook.
    `compile_seconds` is what compiling its graphs took, of the device where it took longest; 0 where nothing was.
    `digests` are compared over nodes by the aggregator; empty for most checks.
    `devices` are the targets of the accelerators that it measured; empty where it measured none. `began_at` is when the
    first measurement began (seconds of the node's CLOCK_BOOTTIME; None where none did): the result stands for these
    devices as they were then, see `DeviceRecord.since`.
    """

    check: str
    tier: Tier
    status: Status
    findings: tuple[Finding, ...]
    age_seconds: float
    started_at: float
    duration_seconds: float
    attempts: int
    error: str | None
    injected: bool
    executor: str
    compile_seconds: float = 0.0
    digests: tuple[WorkDigest, ...] = ()
    devices: tuple[str, ...] = ()
    began_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckSpec(CheckDeclaration):
    """A check that is enabled on a node, as the node tells others; `doc` is the first lines of its docstring."""

    expires_seconds: float | None
    """
    A result older than this is stale; None where nobody could renew it (boot-time checks), so it stands for as long as
    the machine is up.
    """


def digests_of(evidence: Sequence[Evidence], machine: Callable[[], str | None]) -> tuple[WorkDigest, ...]:
    """
    What devices gave evidence of that repeated their own digests; those that agree are one record.

    `machine` gives the hardware and the versions under which they ran. They are a part of the key, because a node may
    have others by the time that somebody compares; None: they are not known, and nothing may be compared. So are the
    names of the places: steps that were digested at other places are not compared; and what the check says in
    `over_nodes`, which devices of one node have in common.
    """
    found: dict[tuple[str, str], WorkDigest] = {}
    same: str | None = None
    for item in sorted(evidence, key=lambda item: item.target):
        digests = item.data.get("digests")
        if not isinstance(digests, Mapping) or not digests or item.data.get("stable") is not True:
            continue
        same = same or machine()
        if same is None:
            return ()
        places = {str(name): str(value) for name, value in digests.items()}
        root = _hash(f"{name}={value}" for name, value in places.items())
        known, shared = found.get((item.key, root)), item.data.get("over_nodes")
        found[(item.key, root)] = WorkDigest(
            key=" | ".join((same, item.key, *([str(shared)] if shared else []), f"places {_hash(places)[:8]}")),
            label=str(item.data.get("dtype", "")),
            root=root,
            places=pack(places),
            targets=(*(known.targets if known is not None else ()), item.target),
        )
    return tuple(found.values())[:MOST_DIGESTS]


def pack(places: Mapping[str, str]) -> str:
    """Names and short digests in order, the name of a layer before its first place; empty where it gets too long."""
    words: list[str] = []
    before = ""
    for name, value in places.items():
        layer, _, operation = _NOT_IN_NAMES.sub("_", name).rpartition(".")
        if layer != before:
            words.append(f"{layer}:")
            before = layer
        words.append(f"{operation}={value[:_SHORT]}")
    text = " ".join(words)
    return text if len(text) <= MOST_PLACES_CHARACTERS else ""


def unpack(text: str) -> dict[str, str]:
    """What `pack` was given, with short digests; words that it would not write are left out."""
    found: dict[str, str] = {}
    layer = ""
    for word in text.split(" "):
        if word.endswith(":"):
            layer = word[:-1]
        elif "=" in word:
            operation, _, value = word.rpartition("=")
            found[f"{layer}.{operation}" if layer else operation] = value
    return found


def is_bounded(digest: WorkDigest) -> bool:
    """Whether a digest that came from elsewhere keeps the bounds of those that are made here."""
    return (
        0 < len(digest.key) <= MOST_KEY_CHARACTERS
        and len(digest.label) <= 64
        and 0 < len(digest.root) <= 64
        and len(digest.places) <= MOST_PLACES_CHARACTERS
        and 0 < len(digest.targets) <= MOST_TARGETS
        and all(len(target) <= 128 for target in digest.targets)
    )


def _hash(words: Iterable[str]) -> str:
    import hashlib  # a passive round of `healthd check` has no digests

    return hashlib.sha256("\n".join(words).encode(errors="replace")).hexdigest()[:16]
