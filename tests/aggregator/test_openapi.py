"""The description of the API says what the routes do: names, scopes, bodies; and only who may read gets it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from healthd import __version__
from healthd.aggregator.api.handling import STATUSES
from healthd.aggregator.identity.tokens import Scope
from tests.aggregator.api_kit import running
from tests.aggregator.described import METHODS, description
from tests.every import every
from tests.patience import PATIENCE
from tests.ui.stage import tokens

OPERATIONS = [
    pytest.param(method.upper(), path, told, id=f"{method.upper()} {path}")
    for path, methods in description()["paths"].items()
    for method, told in methods.items()
]
HIGHER = {
    "read": (Scope.READ, Scope.GATE, Scope.ADMIN),
    "gate": (Scope.GATE, Scope.ADMIN),
    "admin": (Scope.ADMIN,),
    "sync": (Scope.SYNC, Scope.ADMIN),
}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_description_is_whole() -> None:
    told = description()
    assert (told["openapi"][:4], told["info"]["version"]) == ("3.1.", __version__)
    names = [one["operationId"] for methods in told["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))
    assert {one.removeprefix("#/components/schemas/") for one in references(told)} <= {*told["components"]["schemas"]}
    for name, schema in told["components"]["schemas"].items():
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", name)
        jsonschema.Draft202012Validator.check_schema(schema)
    known = {tag["name"] for tag in told["tags"]}
    assert {tag for methods in told["paths"].values() for one in methods.values() for tag in one["tags"]} == known


@every(("method", "path", "told"), OPERATIONS)
def test_every_path_says_its_statuses_with_the_one_error_record(method: str, path: str, told: dict[str, Any]) -> None:
    assert method in METHODS
    assert told["summary"]
    assert "`" not in told["summary"], "a summary is plain text"
    for one in told.get("security", ()):
        assert told["description"].endswith(f"Scope: `{one['token'][0]}`."), "viewers show no scopes by themselves"
    assert {"200", "400", "500", "503"} <= told["responses"].keys()
    assert "422" not in told["responses"]
    assert ("security" in told) == ("401" in told["responses"]) == (path not in ("/livez", "/readyz"))
    assert ("requestBody" in told) == ("413" in told["responses"])
    for status, one in told["responses"].items():
        if status != "200" and (path, status) != ("/readyz", "503"):
            assert one["description"] == STATUSES[int(status)]
            assert one["content"]["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}


def test_two_records_of_one_name_are_told_apart() -> None:
    schemas = description()["components"]["schemas"]
    assert set(schemas["Verdict"]["enum"]) == {"admit", "hold", "reject"}
    assert "culprits" in schemas["ValidationVerdict"]["properties"]


def test_a_body_takes_no_other_members_and_an_answer_has_all_of_its_own() -> None:
    schemas = description()["components"]["schemas"]
    for name in (
        "GateRequest",
        "Join",
        "HandshakeBody",
        "OutcomeBody",
        "PersonDecision",
        "RollCallBody",
        "ValidationBody",
    ):
        assert schemas[name]["additionalProperties"] is False, name
    assert schemas["GateRequest"]["required"] == ["job"]
    assert "would" in schemas["Decision"]["required"]
    assert "how long" in schemas["GateRequest"]["properties"]["runtime_seconds"]["description"].lower()
    # A node of another version may leave it out.
    assert "hostname" not in schemas["NodeState"]["required"]


async def test_each_path_takes_the_scope_that_it_names_and_no_lesser_one(tmp_path: Path) -> None:
    file, made = tokens(tmp_path, **{scope.value: scope for scope in Scope})

    async def status(client: httpx.AsyncClient, method: str, path: str, token: str | None) -> int:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        named = re.sub(r"\{\w+\}", "nobody", path)
        return (await client.request(method, named, headers=headers)).status_code

    async with running(tmp_path, token_table=file, preflight=True) as client:
        for method, path, told in (one.values for one in OPERATIONS):
            if "security" not in told:
                assert await status(client, method, path, None) == 200
                continue
            needed = told["security"][0]["token"][0]
            assert await status(client, method, path, None) == 401, (method, path)
            assert await status(client, method, path, "not-a-token-of-this-file") == 401, (method, path)
            for scope in Scope:
                # Without a body, a key or a thing of this name the next answer is another one than 403.
                answered = await status(client, method, path, made[scope.value])
                assert (answered == 403) == (scope not in HIGHER[needed]), (method, path, scope, answered)


async def test_who_may_read_gets_the_description_of_this_aggregator(tmp_path: Path) -> None:
    file, made = tokens(tmp_path, looker=Scope.READ, daemon=Scope.SYNC)

    async with running(tmp_path, token_table=file) as client:
        assert (await client.get("/openapi.json")).status_code == 401
        for name, wanted in (("daemon", 403), ("looker", 200)):
            answer = await client.get("/openapi.json", headers={"authorization": f"Bearer {made[name]}"})
            assert answer.status_code == wanted, name
        expected = {path for path in description()["paths"] if not path.startswith("/v1/preflight")}
        assert answer.json()["paths"].keys() == expected


def test_who_is_not_known_is_told_so_before_a_body_is_read(tmp_path: Path) -> None:
    file, _ = tokens(tmp_path, hook=Scope.GATE)

    async def main() -> None:
        async with running(tmp_path, token_table=file) as client:
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(b"POST /v1/gates HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 20 * PATIENCE))
