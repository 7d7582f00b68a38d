"""
Who looks at the page, and what a form may do: the API's tokens in a cookie that no script can read.

The cookie counts for the page alone: the API looks at `Authorization` and nothing else. A form counts only when it
comes from a page of ours: the browser says so (Sec-Fetch-Site, Origin), and the form carries a word that another site
cannot know. Where no tokens are asked for, the word is a secret of this process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.responses import Response

from healthd.aggregator.api import HttpError, Parts, check_origin, parts_of, read_body
from healthd.aggregator.identity.tokens import AuthError, Caller, Guard, Scope
from healthd.core.errors import BadInputError

# `__Host-` binds the cookie to this host and to TLS; browsers refuse it over plain HTTP.
COOKIE, SAFE_COOKIE = "healthd-page", "__Host-healthd-page"
# Of a form: a reason of 500 characters, percent-encoded, and some fields around it.
MAX_FORM_BYTES = 16 * 1024
MAX_FIELDS = 16
# A shift; who looks longer logs in again.
COOKIE_SECONDS = 12 * 3600
MAX_TOKEN_LENGTH = 3500
"""Of a service account it has some 1,200 characters; a browser keeps cookies of 4,096."""

_PROCESS_SECRET = secrets.token_bytes(32)


def visitor_of(request: Request, scope: Scope = Scope.READ) -> Visitor:
    """The visitor, by header or cookie; AuthError when they may not do what `scope` allows."""
    guard = parts_of(request).guard
    authorization = authorization_of(request)
    caller = guard.require(authorization, scope)
    return Visitor(caller=caller, word=_word(guard, authorization))


async def review(request: Request) -> None:
    """
    Have the visitor's token reviewed by its platform where that is due; what it may do is judged by `visitor_of`.

    AuthError (503) where that cannot be told.
    """
    try:
        await parts_of(request).guard.review(authorization_of(request))
    except AuthError as error:
        if error.status == 503:
            raise


def authorization_of(request: Request) -> str | None:
    """What the visitor says to be: by the header, else by the cookie."""
    header = request.headers.get("authorization")
    if header is not None:
        return header
    token = request.cookies.get(SAFE_COOKIE if _tls(request) else COOKIE, "")
    return f"Bearer {token}" if token else None


async def form_of(request: Request, known: Mapping[str, int]) -> dict[str, str]:
    """
    The fields of a form that came from a page of ours, stripped; `known` gives each its longest length.

    HttpError 403 for one from elsewhere, BadInputError for what is no such form.
    """
    found: dict[str, str] = {}
    for name, value in await pairs_of(request):
        if name not in known or name in found:
            raise BadInputError(f"the form has an unknown field {name[:40]!r}; load the page again")
        if len(value) > known[name]:
            raise BadInputError(f"{name!r} may have at most {known[name]} characters, not {len(value)}")
        found[name] = value.strip()
    return found


async def pairs_of(
    request: Request, *, max_bytes: int = MAX_FORM_BYTES, max_fields: int = MAX_FIELDS
) -> list[tuple[str, str]]:
    """The fields of a form as they came, a name as often as it was sent; see `form_of`."""
    check_origin(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HttpError(
            415, "forms of this page are sent as application/x-www-form-urlencoded", {"connection": "close"}
        )
    body = await read_body(
        request.receive,
        dict(request.scope["headers"]),
        max_bytes=max_bytes,
        timeout_seconds=parts_of(request).settings.read_timeout_seconds,
    )
    try:
        return parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=max_fields, errors="strict")
    except ValueError:
        raise BadInputError("the form cannot be read; load the page again and send it again") from None


def check_word(visitor: Visitor, word: str) -> None:
    """HttpError 403 unless the form is one that this visitor was given."""
    if not hmac.compare_digest(visitor.word.encode(), word.encode("utf-8", "surrogateescape")):
        raise HttpError(403, "this form is from another session; load the page again and send it again")


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Who looks. `word` is what their forms must carry."""

    caller: Caller
    word: str

    @property
    def admin(self) -> bool:
        """Whether the forms of the page are for them."""
        return Scope.ADMIN in self.caller.scopes


async def check_token(parts: Parts, token: str) -> Caller:
    """Who a token that was typed in belongs to; AuthError when it may not read."""
    if not token or len(token) > MAX_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise AuthError(401, "this token is unknown; ask the aggregator's operator for one")
    return await parts.guard.admit(f"Bearer {token}", Scope.READ)


def keep(request: Request, response: Response, token: str) -> None:
    """Log in: the browser sends the token from now on, to this host, from its own pages alone."""
    response.set_cookie(
        SAFE_COOKIE if _tls(request) else COOKIE,
        token,
        max_age=COOKIE_SECONDS,
        path="/",
        secure=_tls(request),
        httponly=True,
        samesite="strict",
    )


def forget(request: Request, response: Response) -> None:
    """Log out."""
    tls = _tls(request)
    response.delete_cookie(SAFE_COOKIE if tls else COOKIE, path="/", secure=tls, httponly=True, samesite="strict")


def local_path(text: str | None) -> str:
    """Where to go after the log-in: a path of ours, else the start; never another site."""
    if not text or len(text) > 500 or not text.isascii() or not text.isprintable() or "\\" in text:
        return "/"
    return text if text.startswith("/") and not text.startswith("//") else "/"


def _word(guard: Guard, authorization: str | None) -> str:
    key = _PROCESS_SECRET if guard.open else (authorization or "").encode("utf-8", "surrogateescape")
    return hmac.new(key, b"healthd page form", hashlib.sha256).hexdigest()


def _tls(request: Request) -> bool:
    return bool(request.scope["scheme"] == "https")
