"""
The protocol between a worker and the runner: JSON, one object a line, bounded on both sides.

To the worker (standard input): `load`, `setup`, `survey`, `warm`, `run`, `judge`, `catalogue`, `host_catalogue`; the
end of the input means exit. From the worker (a descriptor of its own): `ready`, `surveyed`, `warmed`, `started`,
`progress`, `finding`, `evidence`, `profile`, `done`, `raised`, `catalogue`, `second_writer`. Each line from the worker
has the `id` of the command that it answers.

Results are those of the process that the runner started. A copy of it, which a check has made by `fork`, sends
`second_writer` instead of a result and ends: then nobody can tell whose the other results are.

Reading is strict: what is not exactly a record of the contract raises ProtocolError, and is garbage to the runner.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from checks.contract import Action, Blame, Evidence, Finding, Measurement, Previous, Progress, Status
from checks.json_text import parse_json
from checks.printable import printable

R = TypeVar("R")

HOST = "host"
"""What a fork server is asked for, and says that it is ready for, in place of an accelerator: workers of the node."""
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
    """The object in a line. NaN and infinities are not JSON; half a character, which no file takes, becomes "?"."""
    try:
        message = parse_json(line, parse_constant=_no_constant, parse_float=_finite_float)
        if b"\\ud" in line.lower():
            message = parse_json(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))
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
    raise ProtocolError(f"{name} is not a number")


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)  # 1e999


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
            message, value = f"{message} ({measured.name} is {value}, not a valid number)", None
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


def to_record(record: type[R], plain: Any) -> R:
    """A record of the contract out of plain values, each of the type of its field."""
    what = record.__name__.lower()
    values = _object(plain, what)
    read: dict[str, Any] = {}
    for one in dataclasses.fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        try:
            read[one.name] = _READERS[str(one.type)](values.get(one.name))
        except ValueError as error:
            raise ProtocolError(f"{what}: {one.name}: {error}") from None
    return record(**read)


def to_previous(plain: Mapping[str, Any] | None) -> Previous | None:
    """The last evidence of a check, whose time goes on from `as_of` (CLOCK_BOOTTIME) until the check begins: now."""
    if plain is None:
        return None
    previous = to_record(Previous, plain)
    waited = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - _number(plain["as_of"]))
    return dataclasses.replace(previous, elapsed_seconds=previous.elapsed_seconds + waited)


def to_finding(plain: Any) -> Finding:
    """A finding out of plain values, bounded."""
    finding = to_record(Finding, plain)
    if len(finding.measurements) > MAX_MEASUREMENTS:
        raise ProtocolError("finding: measurements is not a short list")
    if finding.status in (Status.PASS, Status.WARN) and any(one.value is None for one in finding.measurements):
        raise ProtocolError(f"finding: {finding.status.value} on a measurement without a value")
    return dataclasses.replace(finding, message=shorten(finding.message))


def _object(value: Any, what: str = "the value") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not an object: {str(value)[:60]!r}")
    return value


def _texts(value: Any) -> dict[str, str]:
    return {key: _text(item) for key, item in _object(value).items()}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ProtocolError(f"not text: {str(value)[:60]!r}")


def _number(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return value
    raise ProtocolError(f"not a number: {str(value)[:60]!r}")


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ProtocolError(f"not a whole number: {str(value)[:60]!r}")


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _all(record: type) -> Callable[[Any], tuple[Any, ...]]:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ProtocolError(f"not a list: {str(value)[:60]!r}")
        return tuple(to_record(record, item) for item in value)

    return read


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _text,
    "str | None": _or_none(_text),
    "float": _number,
    "float | None": _or_none(_number),
    "int | None": _or_none(_whole),
    "Status": Status,
    "Blame | None": _or_none(Blame),
    "Action | None": _or_none(Action),
    "Mapping[str, str]": _texts,
    "Mapping[str, Any]": _object,
    "tuple[Measurement, ...]": _all(Measurement),
    "tuple[Evidence, ...]": _all(Evidence),
    "tuple[Progress, ...]": _all(Progress),
}
"""What reads a field, by its type as the records of the contract write it."""
