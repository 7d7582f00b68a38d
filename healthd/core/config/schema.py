"""What keys a dataclass of settings has, and of what type each is."""

from __future__ import annotations

import collections.abc
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

MAPPINGS = (dict, collections.abc.Mapping)


class Seconds(float):
    """Marks a duration while its type is read."""


def key_of(field_name: str) -> str:
    """The key of a field: its name without the unit that durations carry."""
    return field_name.removesuffix("_seconds")


def fields(schema: Any) -> dict[str, tuple[str, Any]]:
    """Key -> (field name, type) of a dataclass; a field that ends in `_seconds` is a duration."""
    hints = typing.get_type_hints(schema)
    found: dict[str, tuple[str, Any]] = {}
    for field in dataclasses.fields(schema):
        if field.metadata.get("internal"):
            continue
        annotation = hints[field.name]
        if field.name.endswith("_seconds") and annotation in (float, float | None):
            annotation = Seconds | None if is_union(annotation) else Seconds
        elif field.name.endswith("_seconds") and typing.get_origin(annotation) in MAPPINGS:
            annotation = dict[typing.get_args(annotation)[0], Seconds]  # type: ignore[misc]
        found[key_of(field.name)] = (field.name, annotation)
    return found


def is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def records_by_name(annotation: Any) -> Any:
    """X of a table of named records `dict[str, X]`, else None."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in MAPPINGS and len(arguments) == 2 and is_record(arguments[1]):
        return arguments[1]
    return None


def is_union(annotation: Any) -> bool:
    import types

    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def nearest(key: str, known: Mapping[str, Any]) -> str:
    """The end of an error: `; did you mean 'x'?`, or what is known."""
    import difflib

    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known)[:12])}"


def leaves(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key that a variable or an option can set, with its type; tables of named records are the file's alone."""
    for key, (_, annotation) in fields(schema).items():
        if is_record(annotation):
            yield from leaves(annotation, (*path, key))
        elif records_by_name(annotation) is None:
            yield (*path, key), annotation
