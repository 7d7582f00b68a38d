"""
The description of the API (OpenAPI 3.1), made of what serves it: the routes, what they depend on, and their records.

Nothing is said twice: bodies and answers are the types that `healthd.core.wire` decodes and encodes, parameters are
those that FastAPI reads, scopes those that a route needs. What a route alone may answer stands in its `responses`.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi

from healthd import __version__
from healthd.aggregator.api import problems
from healthd.aggregator.api.handling import Answer, ApiRoute, BodyOf, Needs
from healthd.aggregator.api.nodes import Word
from healthd.aggregator.api.sync import KEY_HEADER, MIN_KEY_LENGTH, WAIT_PATTERN
from healthd.aggregator.auth import Scope
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model import quarantines as rules
from healthd.aggregator.store.reading import HistoryEvent
from healthd.aggregator.store.rows import PutOutcome
from healthd.aggregator.stragglers import Suspect
from healthd.baselines import Series
from healthd.core.model import Problem
from healthd.localize.model import Outcome, Verdict

JSON = "application/json"
REF = "#/components/schemas/"

ABOUT = """The aggregator answers whether a job may start on nodes now, and shows what it knows of them.

Every error is one record, `Problem` (`application/problem+json`, RFC 9457); `detail` says what was wrong and what to
do. A parameter or a member of a body that is not listed is an error. Times are in seconds since the epoch. Where an
answer may be held back (`wait`), it comes as soon as there is something to say. `None` in a text is null."""

TAGS = {
    "gates": "May this job start on these nodes, now?",
    "validations": "Collectives over nodes by hand, without a lease.",
    "nodes": "What is known of each node, and who is kept out.",
    "fleet": "The fleet as a whole.",
    "overrides": "Jobs that a person admits by hand.",
    "peers": "Nodes compared with their peers, and the samples that limits are learned from.",
    "preflight": "The roll call of a preflight; only its own aggregator has it.",
    "service": "For load balancers, Prometheus and the daemons of nodes.",
}

SAID = {
    400: "The request cannot be used: a parameter, a header or a member of the body makes no sense.",
    401: "No token, or none that is known here.",
    403: "The token lacks the scope or may not ask a gate for so little, or a page of another site made the request.",
    404: "Nothing of this name is known.",
    405: "The path is another one: a name with a slash in it.",
    408: "The body did not come in time.",
    409: "It contradicts what was asked before, or what is in force.",
    413: "The body is too large.",
    431: "The headers are too large.",
    500: "An internal error; the aggregator's log has more.",
    503: "The database cannot be written, or there are too many connections or nodes; try again later.",
}
"""What a status means; the text of the problem says it of the case."""

BY_CONNECTION = (400, 431, 500, 503)
"""Every path may answer these; where a request does not reach the application, as plain text."""

NAMES: Mapping[type, str] = {
    Word: "PersonDecision",
    HistoryEvent: "Event",
    PutOutcome: "JobOutcome",
    Outcome: "GroupOutcome",
    Verdict: "ValidationVerdict",
    rules.Mode: "RuleMode",
    Suspect: "Straggler",
    Series: "SampleSeries",
}
"""What a record is called here whose name says too little, or is another one's too."""


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """A route as this module reads it. `answer` None: not JSON, and described by the route itself."""

    route: ApiRoute
    body: Any
    answer: Any
    scope: Scope | None

    @property
    def statuses(self) -> Iterator[int]:
        """All that may come beside 200."""
        named = bool(self.route.param_convertors)
        yield from BY_CONNECTION
        yield from (401, 403) if self.scope is not None else ()
        yield from (404, 405) if named else ()
        yield from (408, 413) if self.body is not None else ()


def describe(routes: Iterable[object]) -> dict[str, Any]:
    """The description of these routes and of syncs, as plain data."""
    operations = [_read(route) for route in routes if isinstance(route, ApiRoute) and route.include_in_schema]
    found = get_openapi(
        title="healthd aggregator",
        version=__version__,
        description=ABOUT,
        routes=[operation.route for operation in operations],
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    wanted = [Problem, *_sync_types()]
    wanted += [kind for one in operations for kind in (one.body, one.answer) if kind is not None]
    schemas, components = _schemas(wanted)
    for operation in operations:
        path = found["paths"][operation.route.path_format]
        for method in operation.route.methods or ():
            _complete(path[method.lower()], operation, schemas)
    found["paths"]["/v1/nodes/{node}/sync"] = {"post": _sync(schemas)}
    _tighten(found["paths"], components, schemas, [one.body for one in operations if one.body is not None])
    errors = {f"Problem{status}": _problem(status, schemas) for status in SAID}
    found["components"] = {"schemas": components, "responses": errors, "securitySchemes": {"token": _TOKEN}}
    return found


_TOKEN = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of the aggregator's file. It has scopes: read, sync, gate (also read), admin (all). "
    "An aggregator on loopback without a token file asks for none.",
}


def _read(route: ApiRoute) -> _Operation:
    calls = [one.call for one in _tree(route.dependant)]
    answer = typing.get_type_hints(route.endpoint)["return"]
    return _Operation(
        route=route,
        body=next((call.wanted for call in calls if isinstance(call, BodyOf)), None),
        answer=typing.get_args(answer)[0] if typing.get_origin(answer) is Answer else None,
        scope=next((call.scope for call in calls if isinstance(call, Needs)), None),
    )


def _tree(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _tree(inner)


def _complete(told: dict[str, Any], operation: _Operation, schemas: Mapping[Any, Any]) -> None:
    """Add to what FastAPI says of a route: the texts, the token, the body and all answers."""
    told["operationId"] = f"{told['tags'][0]}_{operation.route.name}"
    told["summary"], told["description"] = _texts(operation.route.description)
    if operation.scope is not None:
        _secure(told, operation.scope)
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[operation.body]}}}
    responses: dict[str, Any] = told["responses"]
    responses.pop("422", None)  # FastAPI's own error, which is a 400 here
    good = responses.pop("200")
    if operation.answer is not None:
        good = {"description": "The answer.", "content": {JSON: {"schema": schemas[operation.answer]}}}
    statuses = sorted({*operation.statuses, *map(int, responses)})
    plain = {int(status) for status, one in responses.items() if one.get("content")}
    told["responses"] = {"200": good} | {
        str(status): responses[str(status)] if status in plain else _error(status) for status in statuses
    }


def _secure(told: dict[str, Any], scope: Scope) -> None:
    """The scope, for programs and, in words, for people: Swagger UI does not show what `security` names."""
    told["security"] = [{"token": [scope.value]}]
    told["description"] = f"{told['description']}\n\nScope: `{scope.value}`.".strip()


def _error(status: int) -> dict[str, str]:
    return {"$ref": f"#/components/responses/Problem{status}"}


def _problem(status: int, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {problems.MEDIA_TYPE: {"schema": schemas[Problem]}}
    if status in BY_CONNECTION:
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": SAID[status], "content": content}


def _sync(schemas: Mapping[Any, Any]) -> dict[str, Any]:
    """The one path that is served before the application (`healthd.aggregator.api.sync`)."""
    taken, answered = _sync_types()
    statuses = (401, 403, 404, 408, 409, 413, *BY_CONNECTION)
    parameters = [
        {"name": "node", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "wait",
            "in": "query",
            "required": False,
            "schema": {"type": "string", "pattern": WAIT_PATTERN, "default": "0"},
            "description": "Seconds to hold the answer back.",
        },
        {
            "name": "executor",
            "in": "query",
            "required": False,
            "schema": {"type": "string"},
            "description": "The member of a gate's group that runs the node's checks, in the place of its daemon.",
        },
        {
            "name": KEY_HEADER.decode(),
            "in": "header",
            "required": True,
            "schema": {"type": "string", "minLength": MIN_KEY_LENGTH},
            "description": "The node's own key: the first one that comes under a name owns it.",
        },
    ]
    told = {
        "tags": ["service"],
        "summary": "A node tells its state, and hears what the aggregator wants of it.",
        "description": "Spoken by `healthd node`. Orders repeat until they are called off, reports until acknowledged.",
        "operationId": "service_sync",
        "parameters": parameters,
        "requestBody": {"required": True, "content": {JSON: {"schema": schemas[taken]}}},
        "responses": {"200": {"description": "The answer.", "content": {JSON: {"schema": schemas[answered]}}}}
        | {str(status): _error(status) for status in sorted(statuses)},
    }
    _secure(told, Scope.SYNC)
    return told


def _sync_types() -> tuple[Any, Any]:
    """What a sync holds and what it is answered."""
    hints = typing.get_type_hints(Fleet.sync)
    return hints["request"], hints["return"]


# --- records ----------------------------------------------------------------------------------------------------------


def _schemas(wanted: Sequence[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The schema of each type, and all components by their names here."""
    found, components = msgspec.json.schema_components(wanted, ref_template=f"{REF}{{name}}")
    # msgspec qualifies a name by its module where two records have the same.
    names = {name: name.rpartition(".")[2] for name in components}
    for kind, name in NAMES.items():
        full = f"{kind.__module__}.{kind.__qualname__}"
        names[full if full in components else kind.__qualname__] = name
    renamed = {names[name]: {**_renamed(one, names), "title": names[name]} for name, one in components.items()}
    return dict(zip(wanted, _renamed(found, names), strict=True)), renamed


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return {"$ref": REF + names[value["$ref"].removeprefix(REF)]}
        return {key: _renamed(one, names) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(one, names) for one in value]
    return value


def _tighten(
    paths: Mapping[str, Any], components: dict[str, Any], schemas: Mapping[Any, Any], bodies: Iterable[Any]
) -> None:
    """Say what types cannot: a body has no other members, and what is only ever answered has all of its members."""
    for body in bodies:
        components[schemas[body]["$ref"].removeprefix(REF)]["additionalProperties"] = False
    operations = [one for path in paths.values() for one in path.values()]
    taken = _reached([one["requestBody"] for one in operations if "requestBody" in one], components)
    for name, one in components.items():
        if name not in taken and "properties" in one:
            one["required"] = list(one["properties"])


def _reached(value: Any, components: Mapping[str, Any]) -> set[str]:
    """The names of all components that are used in it."""
    found: set[str] = set()
    left = [value]
    while left:
        for match in re.findall(rf'"{re.escape(REF)}([^"]+)"', msgspec.json.encode(left.pop()).decode()):
            if match not in found:
                found.add(match)
                left.append(components[match])
    return found


def _texts(description: str) -> tuple[str, str]:
    """The first sentence of a docstring, as plain text, and the rest, in Markdown: what OpenAPI takes them for."""
    first, _, rest = description.strip().partition("\n\n")
    return " ".join(first.split()).replace("`", ""), rest.strip()
