"""Holds answers of a real aggregator against the description of its API: the status, the content type, the record."""

from __future__ import annotations

import functools
import re
from typing import Any
from urllib.parse import unquote

import httpx
import jsonschema

from healthd.aggregator.application import Application

METHODS = ("GET", "POST", "PUT", "DELETE")


@functools.cache
def description() -> dict[str, Any]:
    return Application(preflight=True).openapi()


@functools.cache
def _paths() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """The most particular first: a name may hold a slash."""
    found = sorted(description()["paths"].items(), key=lambda item: -len(re.sub(r"\{\w+\}", "", item[0])))
    return [(re.compile(re.sub(r"\{\w+\}", ".+", path)), told) for path, told in found]


def operation_of(method: str, path: str) -> dict[str, Any] | None:
    """None: no path for programs, or not with this method."""
    found = (told for pattern, told in _paths() if pattern.fullmatch(unquote(path)) and method.lower() in told)
    return next((told[method.lower()] for told in found), None)


def check(response: httpx.Response) -> None:
    """The answer is one that the description promises."""
    request = response.request
    operation = operation_of(request.method, request.url.path)
    # A preflight's aggregator has paths that no other one has.
    if operation is None or (response.status_code == 404 and "no such path" in response.text):
        return
    where = f"{request.method} {request.url.path} {response.status_code}"
    told = operation["responses"].get(str(response.status_code))
    assert told is not None, f"{where} is not described: {response.text[:500]}"
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in told["content"], f"{where} is not described as {kind}"
    schema = told["content"][kind]["schema"]
    if "json" in kind:
        jsonschema.Draft202012Validator({**schema, "components": description()["components"]}).validate(response.json())


async def check_later(response: httpx.Response) -> None:
    """The same, as a hook of a client."""
    await response.aread()
    check(response)


def check_now(response: httpx.Response) -> None:
    response.read()
    check(response)
