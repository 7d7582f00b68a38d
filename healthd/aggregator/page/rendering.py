"""
Templates to answers: everything escaped, nothing loaded from elsewhere, headers that hold the browser to it.

Also here:

- how things are said on the page: signs, times, actions.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.responses import HTMLResponse, Response

from checks.contract import Action, Status
from checks.limits import quantity
from checks.printable import printable
from healthd import __version__
from healthd.core import text
from healthd.core.model import Health, Verdict

if TYPE_CHECKING:
    from jinja2 import Environment

# Colours are never alone: each health and status has a sign of its own.
HEALTH_SIGNS: Mapping[Health, str] = {
    Health.HEALTHY: "✓",
    Health.DEGRADED: "!",
    Health.UNKNOWN: "?",
    Health.UNHEALTHY: "✕",
}
STATUS_SIGNS: Mapping[Status, str] = {
    Status.PASS: "✓",
    Status.SKIP: "-",
    Status.WARN: "!",
    Status.UNKNOWN: "?",
    Status.FAIL: "✕",
}
VERDICT_SIGNS: Mapping[Verdict, str] = {Verdict.ADMIT: "✓", Verdict.HOLD: "…", Verdict.REJECT: "✕"}

# The word that gives a status its colour; a status and a health of the same weight look the same.
STATUS_TONES: Mapping[Status, str] = {
    Status.PASS: "healthy",
    Status.SKIP: "none",
    Status.WARN: "degraded",
    Status.UNKNOWN: "unknown",
    Status.FAIL: "unhealthy",
}
VERDICT_TONES: Mapping[Verdict, str] = {
    Verdict.ADMIT: "healthy",
    Verdict.HOLD: "degraded",
    Verdict.REJECT: "unhealthy",
}

WORST_FIRST = (Health.UNHEALTHY, Health.UNKNOWN, Health.DEGRADED, Health.HEALTHY)

ACTIONS: Mapping[Action, tuple[str, str]] = {
    Action.NONE: ("Nothing to do", "It resolves itself, or states what an operator or another job wanted."),
    Action.RETRY: ("Try again", "Ask again, or wait for the next run. If it persists for an hour, inspect the node."),
    Action.RESET_DEVICE: (
        "Reset the device",
        "Drain the node, reset the device with the vendor's tool or reboot, then run the deep tier before it returns "
        "to service.",
    ),
    Action.REBOOT: (
        "Reboot the node",
        "Drain the node, reboot it, and let the boot-time checks run. If the fault returns, replace the node.",
    ),
    Action.REPLACE: (
        "Replace the node",
        "Give the node no work. Quarantine it, replace the hardware or the instance, and run the deep tier on the "
        "replacement.",
    ),
    Action.INSPECT: (
        "Inspect it",
        "Read the message and the evidence of the check, then the node's kernel log.",
    ),
}

_DIGITS = re.compile(r"(\d+)")

HERE = Path(__file__).parent
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """For sorting as people count: n2 before n10."""
    parts = _DIGITS.split(text)
    # At most so many digits become a number: Python refuses to read thousands of them.
    return tuple((0, int(part), "") if part.isdecimal() and len(part) < 18 else (1, 0, part) for part in parts if part)


def page(template: str, *, status: int = 200, headers: Mapping[str, str] | None = None, **values: object) -> Response:
    text = _environment().get_template(template).render(now=time.time(), **values)
    # The templates escape HTML, and know nothing of control characters.
    return HTMLResponse(printable(text), status_code=status, headers={**HEADERS, **(headers or {})})


def brief(text: str, most: int = 200) -> str:
    """One line, not longer than `most`."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 node`, `3 nodes`."""
    return f"{grouped(number)} {one if number == 1 else many or one + 's'}"


def grouped(number: int) -> str:
    """Thousands apart, by a narrow space that does not break."""
    return f"{number:,}".replace(",", "\u202f")


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names in a sentence; how many more there are when there are many."""
    found = list(names)
    rest = len(found) - most
    return ", ".join(found[:most]) + (f" and {rest} more" if rest > 0 else "")


def static_path(name: str) -> str:
    """The path by which a static file is asked for."""
    stem, _, suffix = name.rpartition(".")
    return next(f"/static/{known}" for known in statics() if known.startswith(f"{stem}.") and known.endswith(suffix))


def static(name: str) -> Response | None:
    """A static file; None when there is none of this name."""
    found = statics().get(name)
    if found is None:
        return None
    body, kind = found
    headers = {**HEADERS, "cache-control": "public, max-age=31536000, immutable"}
    return Response(body, media_type=kind, headers=headers)


@functools.cache
def statics() -> Mapping[str, tuple[bytes, str]]:
    """Static files by the name they are asked by (with a part of their hash, so that they may be kept for ever)."""
    found = {}
    for path in sorted((HERE / "static").iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            found[f"{path.stem}.{hashlib.sha256(body).hexdigest()[:12]}{path.suffix}"] = (body, TYPES[path.suffix])
    return found


@functools.cache
def _environment() -> Environment:
    # Here, so that an aggregator that nobody looks at (a preflight's) does not load it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        ago=text.ago,
        span=text.span,
        moment=text.moment,
        brief=brief,
        quantity=lambda m: quantity(m.name, m.value),
        path=lambda text: quote(str(text), safe=""),
    )
    made.globals.update(
        static=static_path,
        counted=counted,
        grouped=grouped,
        listed=listed,
        health_signs=HEALTH_SIGNS,
        status_signs=STATUS_SIGNS,
        status_tones=STATUS_TONES,
        verdict_signs=VERDICT_SIGNS,
        verdict_tones=VERDICT_TONES,
        actions=ACTIONS,
        version=__version__,
    )
    return made
