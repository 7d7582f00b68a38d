"""What a check yields, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checks.contract.words import Action, Blame, Status


@dataclass(frozen=True, kw_only=True)
class Limit:
    """
    What a measurement must keep within. `origin` says who set it.

    config (the operator), baseline (learned), catalogue (the instance type), program (a plug-in), derived (from what
    the machine is), default (the check's own) or none.
    """

    lower: float | None
    upper: float | None
    origin: str


NO_LIMIT = Limit(lower=None, upper=None, origin="none")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """
    One number with its limits.

    `name` ends in the unit and is unique over all checks (`matmul_flops_per_second`); None as value means
    that it was looked for and not found. `labels` tells apart what shares a name, by bounded words
    (dtype, size_bytes).
    """

    name: str
    value: float | None
    lower: float | None
    upper: float | None
    origin: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """
    One observation of a check about one target.

    `reason` is a code of `checks.reasons` (None with pass alone); `blame` and `action` None mean the reason's
    own. Made by `checks.limits` wherever a number is judged.
    """

    status: Status
    reason: str | None
    message: str
    target: str
    measurements: tuple[Measurement, ...] = ()
    blame: Blame | None = None
    action: Action | None = None
    profile: str | None = None
    """The id of the profile that shows where the time went; None where none was taken, or nobody keeps it."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one more repetition of a probe did, operation by operation; a check yields it before its findings."""

    id: str
    """Lower-case letters, digits, `_`, `.` and `-`: it is the name of a file."""
    target: str
    """The device."""
    said: str
    """The operations that took most of the time, in words."""
    format: str
    """Of the content: `PROFILE_FORMAT`."""
    content: bytes
    """At most `MAX_PROFILE_BYTES`."""


PROFILE_FORMAT = "trace-event-json-gzip"
"""The Trace Event Format of Chrome and Perfetto, as JSON, compressed by gzip."""

MAX_PROFILE_BYTES = 1 << 20
"""Of the content of one profile."""


def make_finding(
    status: Status, reason: str | None, message: str, target: str = "node", action: Action | None = None
) -> Finding:
    """A finding without numbers, and so none that passes: a pass has a measurement."""
    return Finding(status=status, reason=reason, message=message, target=target, action=action)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """
    What a worker measured on its own device, for a check that compares devices.

    Only evidence of one `key` (device kind, instruction set, library versions) may be compared.
    `data` holds JSON values. Where it has `digests` (by place, in the order of computation), `dtype` and `stable`, the
    digests are also compared over nodes.
    """

    target: str
    key: str
    data: Mapping[str, Any]


DEVICE_RESETS = "device_resets"
"""
The key of evidence that says when devices were last reset: `resets` by target, in seconds of the kernel log's clock,
and `now` by the same clock. Results from before a reset do not stand for the device.
"""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """
    A sign of life of a rank, so that a hang has an address.

    `event` is joined (the rank is here), entered or left (of the operation `step`);
    `monotonic_seconds` is CLOCK_MONOTONIC of the machine.
    """

    step: str
    event: str
    monotonic_seconds: float


@dataclass(frozen=True, kw_only=True)
class Missing:
    """
    A target that was to give evidence and gave none, as `judge` sees it.

    `reason` is Timeout, Crashed, CheckError, Garbage, MissingDevice or Busy; `message` the last words;
    `progress` what had been heard, oldest first; `order` counts up in the order in which the targets ended, so
    that the first to die can be told from its victims (None: it never ended by itself). `action` None is the reason's.
    """

    target: str
    reason: str
    message: str
    progress: tuple[Progress, ...] = ()
    order: int | None = None
    action: Action | None = None
