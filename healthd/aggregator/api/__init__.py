"""HTTP for programs. It reaches everything through the controller."""

from healthd.aggregator.api.gates import ValidationBody, request_of
from healthd.aggregator.api.handling import (
    READ,
    SYNC,
    ApiRoute,
    Parts,
    TargetGroup,
    Wait,
    check_origin,
    check_request,
    parts_of,
    problems,
)
from healthd.aggregator.api.nodes import MAX_REASON_LENGTH, MOST_ID
from healthd.aggregator.api.problems import MEDIA_TYPE, HttpError, problem_of
from healthd.aggregator.api.scopes import PROGRAM_ROUTERS, scope_of
from healthd.aggregator.api.sync import (
    KEY_HEADER,
    MIN_KEY_LENGTH,
    ASGIApp,
    ASGIScope,
    Receive,
    Send,
    SyncEndpoint,
    read_body,
    respond,
)

__all__ = [
    "KEY_HEADER",
    "MAX_REASON_LENGTH",
    "MEDIA_TYPE",
    "MIN_KEY_LENGTH",
    "MOST_ID",
    "PROGRAM_ROUTERS",
    "READ",
    "SYNC",
    "ASGIApp",
    "ASGIScope",
    "ApiRoute",
    "HttpError",
    "Parts",
    "Receive",
    "Send",
    "SyncEndpoint",
    "TargetGroup",
    "ValidationBody",
    "Wait",
    "check_origin",
    "check_request",
    "gates",
    "parts_of",
    "problem_of",
    "problems",
    "read_body",
    "request_of",
    "respond",
    "scope_of",
]
