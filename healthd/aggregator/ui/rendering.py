"""Templates to answers: everything escaped, nothing loaded from elsewhere, headers that hold the browser to it."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.responses import HTMLResponse, Response

from checks.limits import quantity
from checks.printable import printable
from healthd import __version__
from healthd.aggregator.ui import formatting
from healthd.core import text

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

POLICY = "; ".join(
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
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@functools.cache
def statics() -> Mapping[str, tuple[bytes, str]]:
    """Static files by the name they are asked by (with a part of their hash, so that they may be kept for ever)."""
    found = {}
    for path in sorted((HERE / "static").iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            found[f"{path.stem}.{hashlib.sha256(body).hexdigest()[:12]}{path.suffix}"] = (body, TYPES[path.suffix])
    return found


def static_path(name: str) -> str:
    """The path by which a static file is asked for."""
    stem, _, suffix = name.rpartition(".")
    return next(f"/static/{known}" for known in statics() if known.startswith(f"{stem}.") and known.endswith(suffix))


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
        brief=formatting.brief,
        quantity=lambda m: quantity(m.name, m.value),
        path=lambda text: quote(str(text), safe=""),
    )
    made.globals.update(
        static=static_path,
        counted=formatting.counted,
        grouped=formatting.grouped,
        listed=formatting.listed,
        health_signs=formatting.HEALTH_SIGNS,
        status_signs=formatting.STATUS_SIGNS,
        status_tones=formatting.STATUS_TONES,
        verdict_signs=formatting.VERDICT_SIGNS,
        verdict_tones=formatting.VERDICT_TONES,
        actions=formatting.ACTIONS,
        version=__version__,
    )
    return made


def page(template: str, *, status: int = 200, headers: Mapping[str, str] | None = None, **values: object) -> Response:
    """A page out of a template."""
    text = _environment().get_template(template).render(now=time.time(), **values)
    # The templates escape HTML, and know nothing of control characters.
    return HTMLResponse(printable(text), status_code=status, headers={**HEADERS, **(headers or {})})


def static(name: str) -> Response | None:
    """A static file; None when there is none of this name."""
    found = statics().get(name)
    if found is None:
        return None
    body, kind = found
    headers = {**HEADERS, "cache-control": "public, max-age=31536000, immutable"}
    return Response(body, media_type=kind, headers=headers)
