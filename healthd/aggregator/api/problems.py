"""Every error of the aggregator as application/problem+json: one status for each kind, one sentence for each case."""

from __future__ import annotations

import http

from healthd.aggregator.auth import AuthError
from healthd.aggregator.inventory.registry import DuplicateError, FullError, NotExecutorError
from healthd.core.errors import BadInputError, ConflictError, HealthdError, NotFoundError, StoreError
from healthd.core.model import Problem

MEDIA_TYPE = "application/problem+json"


class HttpError(HealthdError):
    """An error that is about HTTP itself; `headers` go with the answer."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def problem_of(error: HealthdError) -> tuple[Problem, dict[str, str]]:
    """The problem that tells of an error, and headers that go with it."""
    headers: dict[str, str] = {}
    status, title = 500, None
    if isinstance(error, HttpError):
        status, headers = error.status, error.headers
    elif isinstance(error, AuthError):
        status = error.status
        if status == 401:
            headers = {"www-authenticate": 'Bearer realm="healthd"'}
    elif isinstance(error, DuplicateError):
        status, title = 409, "DuplicateNode"
    elif isinstance(error, NotExecutorError):
        status, title = 409, "NotExecutor"
    elif isinstance(error, ConflictError):
        status = 409
    elif isinstance(error, NotFoundError):
        status = 404
    elif isinstance(error, BadInputError):
        status = 400
    elif isinstance(error, StoreError):
        status, title, headers = 503, "StoreFailed", {"retry-after": "5"}
    elif isinstance(error, FullError):
        status, headers = 503, {"retry-after": "60"}
    return Problem(title=title or http.HTTPStatus(status).phrase, status=status, detail=str(error)), headers
