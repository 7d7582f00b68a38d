"""
The protocol between a worker and the runner: JSON, one object a line, bounded on both sides.

To the worker (standard input): `load`, `setup`, `survey`, `warm`, `run`, `judge`, `catalogue`, `host_catalogue`; the
end of the input means exit. From the worker (a descriptor of its own): `ready`, `surveyed`, `warmed`, `started`,
`progress`, `finding`, `evidence`, `profile`, `done`, `raised`, `catalogue`. Each line from the worker has the `id` of
the command that it answers.

Reading is strict: what is not exactly a record of the contract raises ProtocolError, and is garbage to the runner.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from checks.contract import Action, Blame, Evidence, Finding, Limit, Measurement, Missing, Previous, Progress, Status
from checks.json_text import parse_json
from checks.printable import printable

MAX_LINE_BYTES = 64 * 1024
MAX_FINDINGS = 256  # of one check in one worker; those above it are counted and reported
MAX_PROGRESS = 256  # kept of one check in one worker
MAX_MESSAGE_CHARACTERS = 1000
MAX_TRACEBACK_CHARACTERS = 4000
MAX_MEASUREMENTS = 64


class ProtocolError(ValueError):
    """A line that is no message; the text says what is wrong with it."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One line. Raises ProtocolError when it would be too long, or holds what JSON cannot express (NaN, objects)."""
    try:
        line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a line of {len(line)} bytes; at most {MAX_LINE_BYTES} are allowed")
    return line


def decode(line: bytes) -> dict[str, Any]:
    """The object in a line; NaN and infinities are not JSON."""
    try:
        message = parse_json(line, parse_constant=_no_constant)
    except ValueError:
        raise ProtocolError(f"not a message: {line[:60]!r}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError(f"not a message: {line[:60]!r}")
    return message


class LineDecoder:
    """The messages in a stream of bytes. After a ProtocolError it must not be used any more."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that are complete with these bytes. Raises ProtocolError after those before the bad line."""
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            yield decode(line)
        if len(self._buffer) > MAX_LINE_BYTES:
            raise ProtocolError(f"sent a line of more than {MAX_LINE_BYTES} bytes")


def _no_constant(name: str) -> float:
    raise ProtocolError(f"{name} is no number")


# --- records to plain values ------------------------------------------------------------------------------------------


def shorten(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """One line of bounded length, without control characters."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 4] + " ..."


def from_finding(finding: Finding) -> dict[str, Any]:
    """
    Plain values of a finding, bounded.

    A number that is not finite cannot be written as JSON and is no evidence of health: it becomes None, the message
    says what it was, and a pass becomes unknown. So does a pass on a number that could not be read.
    """
    status, reason, message = finding.status, finding.reason, finding.message
    measurements = []
    for measured in finding.measurements[:MAX_MEASUREMENTS]:
        value = measured.value
        if value is not None and not math.isfinite(value):
            message, value = f"{message} ({measured.name} is {value}, not a number to trust)", None
        if value is None and status in (Status.PASS, Status.WARN):
            status, reason = Status.UNKNOWN, reason or "NoData"
            message = message if "not a number" in message else f"{message} ({measured.name}: no reading)"
        measurements.append(
            {
                "name": str(measured.name)[:200],
                "value": value,
                "lower": _finite(measured.lower),
                "upper": _finite(measured.upper),
                "origin": str(measured.origin)[:200],
                "labels": {str(k)[:64]: str(v)[:64] for k, v in list(measured.labels.items())[:8]},
            }
        )
    return {
        "status": Status(status).value,
        "reason": None if reason is None else str(reason)[:64],
        "message": shorten(message),
        "target": str(finding.target)[:200],
        "measurements": measurements,
        "blame": finding.blame.value if finding.blame else None,
        "action": finding.action.value if finding.action else None,
        "profile": finding.profile,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def from_evidence(evidence: Evidence) -> dict[str, Any]:
    """Plain values of evidence; whether `data` is JSON shows when the line is encoded."""
    return {"target": evidence.target, "key": evidence.key, "data": dict(evidence.data)}


def from_progress(progress: Progress) -> dict[str, Any]:
    """Plain values of a sign of progress."""
    return {
        "step": str(progress.step)[:200],
        "event": str(progress.event)[:32],
        "monotonic_seconds": progress.monotonic_seconds,
    }


def from_missing(missing: Missing) -> dict[str, Any]:
    """Plain values of a missing target."""
    return {
        "target": missing.target,
        "reason": missing.reason,
        "message": missing.message,
        "progress": [from_progress(item) for item in missing.progress],
        "order": missing.order,
    }


def from_limits(limits: Mapping[str, Limit]) -> dict[str, Any]:
    """Plain values of limits by name."""
    return {name: {"lower": x.lower, "upper": x.upper, "origin": x.origin} for name, x in limits.items()}


def from_previous(previous: Previous | None) -> dict[str, Any] | None:
    """Plain values of the last evidence of a check."""
    if previous is None:
        return None
    return {
        "evidence": [from_evidence(item) for item in previous.evidence],
        "elapsed_seconds": previous.elapsed_seconds,
        "boot_id": previous.boot_id,
    }


# --- plain values to records ------------------------------------------------------------------------------------------


def to_finding(plain: Any) -> Finding:
    """A finding out of plain values."""
    values = _object(plain, "finding")
    measurements = values.get("measurements")
    if not isinstance(measurements, list) or len(measurements) > MAX_MEASUREMENTS:
        raise ProtocolError("finding: measurements is not a short list")
    try:
        return Finding(
            status=Status(values.get("status")),
            reason=_text(values, "reason", optional=True),
            message=shorten(_text(values, "message") or ""),
            target=_text(values, "target") or "",
            measurements=tuple(_measurement(item) for item in measurements),
            blame=Blame(values["blame"]) if values.get("blame") is not None else None,
            action=Action(values["action"]) if values.get("action") is not None else None,
            profile=_text(values, "profile", optional=True),
        )
    except ProtocolError:
        raise
    except ValueError as error:
        raise ProtocolError(f"finding: {error}") from None


def _measurement(plain: Any) -> Measurement:
    values = _object(plain, "measurement")
    labels = _object(values.get("labels"), "labels")
    return Measurement(
        name=_text(values, "name") or "",
        value=_number(values, "value"),
        lower=_number(values, "lower"),
        upper=_number(values, "upper"),
        origin=_text(values, "origin") or "",
        labels={key: str(value) for key, value in labels.items()},
    )


def to_evidence(plain: Any) -> Evidence:
    """Evidence out of plain values."""
    values = _object(plain, "evidence")
    return Evidence(
        target=_text(values, "target") or "",
        key=_text(values, "key") or "",
        data=_object(values.get("data"), "data"),
    )


def to_progress(plain: Any) -> Progress:
    """A sign of progress out of plain values."""
    values = _object(plain, "progress")
    return Progress(
        step=_text(values, "step") or "",
        event=_text(values, "event") or "",
        monotonic_seconds=_number(values, "monotonic_seconds") or 0.0,
    )


def to_missing(plain: Any) -> Missing:
    """A missing target out of plain values."""
    values = _object(plain, "missing")
    order = values.get("order")
    return Missing(
        target=_text(values, "target") or "",
        reason=_text(values, "reason") or "",
        message=_text(values, "message") or "",
        progress=tuple(to_progress(item) for item in values.get("progress") or ()),
        order=order if isinstance(order, int) else None,
    )


def to_limits(plain: Any) -> dict[str, Limit]:
    """Limits by name out of plain values."""
    return {
        name: Limit(lower=_number(x, "lower"), upper=_number(x, "upper"), origin=_text(x, "origin") or "")
        for name, x in _object(plain, "limits").items()
    }


def to_previous(plain: Any) -> Previous | None:
    """The last evidence of a check out of plain values."""
    if plain is None:
        return None
    values = _object(plain, "previous")
    return Previous(
        evidence=tuple(to_evidence(item) for item in values.get("evidence") or ()),
        elapsed_seconds=_number(values, "elapsed_seconds") or 0.0,
        boot_id=_text(values, "boot_id", optional=True),
    )


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not an object: {str(value)[:60]!r}")
    return value


def _text(values: Mapping[str, Any], name: str, *, optional: bool = False) -> str | None:
    value = values.get(name)
    if isinstance(value, str) or (optional and value is None):
        return value
    raise ProtocolError(f"{name} is not text: {str(value)[:60]!r}")


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ProtocolError(f"{name} is not a number: {str(value)[:60]!r}")
