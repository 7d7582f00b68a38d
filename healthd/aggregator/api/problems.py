"""Every error of the aggregator as application/problem+json: one status for each kind, one sentence for each case."""

from __future__ import annotations

import http
from collections.abc import Mapping, Sequence

from healthd.aggregator.fleet import DuplicateError, FullError, NotExecutorError, NotVouchedError
from healthd.aggregator.identity.tokens import AuthError
from healthd.core.errors import BadInputError, ConflictError, HealthdError, LimitError, NotFoundError, StoreError
from healthd.core.model import Problem

MEDIA_TYPE = "application/problem+json"

_Told = tuple[int, str | None, Mapping[str, str]]
"""Status, title where the status does not say it, and headers."""
_KINDS: Sequence[tuple[type[HealthdError], _Told]] = (
    (DuplicateError, (409, "DuplicateNode", {})),
    (NotVouchedError, (403, None, {})),
    (NotExecutorError, (409, "NotExecutor", {})),
    (ConflictError, (409, None, {})),
    (LimitError, (429, None, {"retry-after": "5"})),
    (NotFoundError, (404, None, {})),
    (BadInputError, (400, None, {})),
    (StoreError, (503, "StoreFailed", {"retry-after": "5"})),
    (FullError, (503, None, {"retry-after": "60"})),
)
_OTHER: _Told = (500, None, {})
_OF_AUTH: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": 'Bearer realm="healthd"'},
    503: {"retry-after": "5"},
}


class HttpError(HealthdError):
    """An error that is about HTTP itself; `headers` go with the answer."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def problem_of(error: HealthdError) -> tuple[Problem, dict[str, str]]:
    """The problem that tells of an error, and headers that go with it."""
    status, title, headers = next((of_kind for kind, of_kind in _KINDS if isinstance(error, kind)), _OTHER)
    if isinstance(error, HttpError):
        status, headers = error.status, error.headers
    elif isinstance(error, AuthError):
        status, headers = error.status, _OF_AUTH.get(error.status, {})
    return Problem(title=title or http.HTTPStatus(status).phrase, status=status, detail=str(error)), dict(headers)
