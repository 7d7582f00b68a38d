"""The description of the API as its page shows it: what a schema means in a line, and what links where. Pure."""

from __future__ import annotations

import http
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a line: words, code, or a link to a record."""

    text: str
    code: bool = False
    record: str | None = None


@dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter of a request, or a member of a record; `note` says where it goes, or that it may be left out."""

    name: str
    kind: tuple[Part, ...]
    note: str
    about: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Status:
    """What may be answered; `kinds` are the types of its content with what they hold."""

    status: str
    phrase: str
    about: tuple[Part, ...]
    kinds: tuple[tuple[str, tuple[Part, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One path with one method. `scope` None: it needs no token. `errors` are those of the one table of errors."""

    anchor: str
    method: str
    path: str
    summary: tuple[Part, ...]
    about: tuple[tuple[Part, ...], ...]
    scope: str | None
    parameters: tuple[Member, ...]
    body: tuple[Part, ...]
    statuses: tuple[Status, ...]
    errors: tuple[str, ...]
    command: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Paths of one matter."""

    name: str
    about: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record, or a closed list of words (`words`, without members)."""

    name: str
    about: tuple[tuple[Part, ...], ...]
    members: tuple[Member, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The page."""

    version: str
    about: tuple[tuple[Part, ...], ...]
    groups: tuple[Group, ...]
    errors: tuple[Status, ...]
    records: tuple[Record, ...]


def contents_of(described: Mapping[str, Any]) -> Contents:
    """What the page shows of a description."""
    components = described["components"]
    found: dict[str, list[Operation]] = {tag["name"]: [] for tag in described["tags"]}
    for path, methods in described["paths"].items():
        for method, told in methods.items():
            found[told["tags"][0]].append(_operation(path, method, told))
    return Contents(
        version=described["info"]["version"],
        about=_paragraphs(described["info"]["description"]),
        groups=tuple(
            Group(name=tag["name"], about=tag["description"], operations=tuple(found[tag["name"]]))
            for tag in described["tags"]
            if found[tag["name"]]
        ),
        errors=tuple(_status(name.removeprefix("Problem"), one) for name, one in components["responses"].items()),
        records=tuple(_record(name, schema) for name, schema in sorted(components["schemas"].items())),
    )


def _operation(path: str, method: str, told: Mapping[str, Any]) -> Operation:
    scopes = [scope for one in told.get("security", ()) for names in one.values() for scope in names]
    body = told.get("requestBody")
    return Operation(
        anchor=told["operationId"],
        method=method.upper(),
        path=path,
        summary=_marked(told["summary"]),
        about=_paragraphs(told["description"]),
        scope=scopes[0] if scopes else None,
        parameters=tuple(_parameter(one) for one in told.get("parameters", ())),
        body=() if body is None else _kind(_only(body["content"])["schema"]),
        statuses=tuple(_status(status, one) for status, one in told["responses"].items() if "$ref" not in one),
        errors=tuple(status for status, one in told["responses"].items() if "$ref" in one),
        command=_command(path, method, token=bool(scopes), body=body is not None),
    )


def _parameter(one: Mapping[str, Any]) -> Member:
    where = one["in"] if one.get("required") else f"{one['in']}, {_optional(one['schema'])}"
    return Member(name=one["name"], kind=_kind(one["schema"]), note=where, about=_marked(one.get("description", "")))


def _status(status: str, told: Mapping[str, Any]) -> Status:
    kinds = [(kind, _kind(one.get("schema", {}))) for kind, one in told.get("content", {}).items()]
    phrase = http.HTTPStatus(int(status)).phrase
    return Status(status=status, phrase=phrase, about=_marked(told["description"]), kinds=tuple(kinds))


def _record(name: str, schema: Mapping[str, Any]) -> Record:
    needed = schema.get("required", ())
    return Record(
        name=name,
        about=_paragraphs(schema.get("description", "")),
        members=tuple(
            Member(name=member, kind=_kind(one), note="" if member in needed else _optional(one))
            for member, one in schema.get("properties", {}).items()
        ),
        words=tuple(map(str, schema.get("enum", ()))),
    )


def _command(path: str, method: str, *, token: bool, body: bool) -> str:
    """A line for the shell; names are to be filled in."""
    words = ["curl", *(() if method == "get" else ("-X", method.upper()))]
    words += ["-H", '"Authorization: Bearer $TOKEN"'] if token else []
    words += ["-H", "'Content-Type: application/json'", "-d", "@body.json"] if body else []
    named = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), path)
    return " ".join([*words, f"$AGGREGATOR{quote(named)}"])


# --- schemas in words -------------------------------------------------------------------------------------------------


def _kind(schema: Mapping[str, Any]) -> tuple[Part, ...]:
    """What a value may be, in a few words."""
    return tuple(_words(schema))


def _words(schema: Mapping[str, Any]) -> Iterator[Part]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield Part(text=name, record=name)
        return
    for key in ("anyOf", "oneOf"):
        if key in schema:
            for index, one in enumerate(schema[key]):
                if index:
                    yield Part(text=" or ")
                yield from _words(one)
            return
    if "enum" in schema:
        yield Part(text="one of " + ", ".join(map(str, schema["enum"])))
        return
    kind = schema.get("type")
    inner = {"array": "items", "object": "additionalProperties"}.get(str(kind), "")
    if schema.get("prefixItems"):
        for index, one in enumerate(schema["prefixItems"]):
            yield Part(text=", " if index else "list of ")
            yield from _words(one)
    elif isinstance(schema.get(inner), dict):
        yield Part(text=f"{'list' if kind == 'array' else kind} of ")
        yield from _words(schema[inner])
    else:
        yield Part(text=str(kind or "any value"))
    if bounds := _bounds(schema):
        yield Part(text=f", {bounds}")


_BOUNDS = {
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "minimum": "from {}",
    "maximum": "to {}",
    "exclusiveMinimum": "above {}",
    "exclusiveMaximum": "below {}",
}


def _bounds(schema: Mapping[str, Any]) -> str:
    return ", ".join(text.format(schema[key]) for key, text in _BOUNDS.items() if key in schema)


def _optional(schema: Mapping[str, Any]) -> str:
    return f"default {json.dumps(schema['default'])}" if schema.get("default") is not None else "optional"


def _only(content: Mapping[str, Any]) -> Mapping[str, Any]:
    (found,) = content.values()
    return dict(found)


def _paragraphs(text: str) -> tuple[tuple[Part, ...], ...]:
    return tuple(_marked(one) for one in text.split("\n\n") if one.strip())


def _marked(text: str) -> tuple[Part, ...]:
    """Words and `code`."""
    pieces: Sequence[str] = " ".join(text.split()).split("`")
    return tuple(Part(text=piece, code=index % 2 == 1) for index, piece in enumerate(pieces) if piece)
