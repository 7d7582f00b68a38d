"""
Which scope a request to the API needs, by the paths themselves: an aggregator that passes a request on refuses it
itself where the caller's token does not have it.
"""

from __future__ import annotations

from healthd.aggregator.api import gates, nodes, peers
from healthd.aggregator.api.handling import ApiRoute
from healthd.aggregator.identity.tokens import Scope

PROGRAM_ROUTERS = (
    gates.router,
    gates.claims_router,
    gates.validation_router,
    nodes.router,
    gates.override_router,
    peers.router,
    gates.postmortem_router,
    gates.report_router,
)
"""All that have paths of programs."""
_ROUTES = tuple(route for router in PROGRAM_ROUTERS for route in router.routes if isinstance(route, ApiRoute))


def scope_of(method: str, path: str) -> Scope | None:
    """The scope; READ for any other path below `/v1`, None for what is no path of programs."""
    for route in _ROUTES:
        if method in (route.methods or ()) and route.path_regex.match(path):
            return next(iter(route.scopes), Scope.READ)
    return Scope.READ if path.startswith("/v1/") else None
