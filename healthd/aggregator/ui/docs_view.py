"""What the page of the API says of its description: which paths belong together, and what a schema means. Pure."""

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


def operations(described: Mapping[str, Any]) -> Mapping[str, Sequence[tuple[str, str, Mapping[str, Any]]]]:
    """Path, method and what is said of it, by tag."""
    found: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {tag["name"]: [] for tag in described["tags"]}
    for path, methods in described["paths"].items():
        for method, told in methods.items():
            found[told["tags"][0]].append((path, method.upper(), told))
    return found


def scope(told: Mapping[str, Any]) -> str | None:
    """The scope of the token that a path needs; None: it needs no token."""
    return next((name for one in told.get("security", ()) for names in one.values() for name in names), None)


def command(path: str, method: str, told: Mapping[str, Any]) -> str:
    """A line for the shell; names are to be filled in."""
    words = ["curl", *(() if method == "GET" else ("-X", method))]
    words += ["-H", '"Authorization: Bearer $TOKEN"'] if scope(told) else []
    words += ["-H", "'Content-Type: application/json'", "-d", "@body.json"] if "requestBody" in told else []
    named = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), path)
    return " ".join([*words, f"$AGGREGATOR{quote(named)}"])


def statuses(told: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """The answers that a path describes itself; the others are in the one table of `errors`."""
    return [(status, one) for status, one in told["responses"].items() if "$ref" not in one]


def errors(described: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """The answers that paths share, by status."""
    return [(name.removeprefix("Problem"), one) for name, one in described["components"]["responses"].items()]


def phrase(status: str) -> str:
    """What HTTP calls a status."""
    return http.HTTPStatus(int(status)).phrase


def kind(schema: Mapping[str, Any]) -> Iterator[Part]:
    """What a value may be, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield Part(text=name, record=name)
        return
    for key in ("anyOf", "oneOf"):
        if key in schema:
            for index, one in enumerate(schema[key]):
                if index:
                    yield Part(text=" or ")
                yield from kind(one)
            return
    if "enum" in schema:
        yield Part(text="one of " + ", ".join(map(str, schema["enum"])))
        return
    type_ = schema.get("type")
    inner = {"array": "items", "object": "additionalProperties"}.get(str(type_), "")
    if schema.get("prefixItems"):
        for index, one in enumerate(schema["prefixItems"]):
            yield Part(text=", " if index else "list of ")
            yield from kind(one)
    elif isinstance(schema.get(inner), dict):
        yield Part(text=f"{'list' if type_ == 'array' else type_} of ")
        yield from kind(schema[inner])
    else:
        yield Part(text=str(type_ or "any value"))
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


def optional(schema: Mapping[str, Any]) -> str:
    return f"default {json.dumps(schema['default'])}" if schema.get("default") is not None else "optional"


def paragraphs(text: str) -> Sequence[Sequence[Part]]:
    """Paragraphs of words and `code`."""
    return [marked(one) for one in text.split("\n\n") if one.strip()]


def marked(text: str) -> Sequence[Part]:
    """Words and `code`."""
    pieces = " ".join(text.split()).split("`")
    return [Part(text=piece, code=index % 2 == 1) for index, piece in enumerate(pieces) if piece]
