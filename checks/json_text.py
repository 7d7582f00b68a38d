"""
JSON from outside: limits its depth, because decoders and the code behind them recurse.

Without the limit, one line of opening brackets raises RecursionError wherever the stack happens to end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

# Nothing that healthd or a tool writes is deeper than about ten; the interpreter's own limit is 1000 frames.
MAX_DEPTH = 64

_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")


class TooDeepError(ValueError):
    """JSON that is nested deeper than MAX_DEPTH."""

    def __init__(self) -> None:
        super().__init__(f"nested more than {MAX_DEPTH} deep")


def require_shallow(body: bytes) -> None:
    """
    Raise TooDeepError for JSON that is nested deeper than MAX_DEPTH; whether it is JSON at all, the decoder says.

    Linear in the length of the body, and nothing but bytes operations: answers may have tens of megabytes.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    # Escapes first, so that every quote that is left begins or ends a string.
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(body.split(b'"')[::2])
    brackets = outside.translate(_AS_SQUARE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        inner = brackets.replace(b"[]", b"")  # the innermost level of all that is closed
        if len(inner) == len(brackets):
            break
        brackets = inner
    if b"[]" in brackets or brackets.count(b"[") > MAX_DEPTH:
        raise TooDeepError


def parse_json(
    text: str | bytes,
    *,
    strict: bool = True,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], float] | None = None,
) -> Any:
    """As `json.loads`, for text from outside. ValueError for whatever cannot be used, whatever it is."""
    require_shallow(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return json.loads(text, strict=strict, parse_constant=parse_constant, parse_float=parse_float)
