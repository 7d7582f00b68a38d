"""No header and no query makes the aggregator answer 5xx, on any path, with and without tokens."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from healthd.aggregator.api.sync import SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.identity.tokens import Guard, Scope, new_token
from healthd.aggregator.store.store import Store
from tests.aggregator.application import parts_of_test
from tests.aggregator.parts import Clock, Node, fleet, state
from tests.aggregator.world import POLICY
from tests.hostile import HOSTILE, NO_HOST, NO_ORIGIN, QUERIES, call


@contextlib.asynccontextmanager
async def application(folder: Path, *, tokens: bool) -> AsyncIterator[tuple[SyncEndpoint, FastAPI]]:
    """The whole aggregator but its sockets, with one node; in front the endpoint of syncs, behind it all else."""
    file = None
    if tokens:
        file = folder / "tokens.toml"
        file.write_text(new_token("me", [Scope.ADMIN])[1])
        file.chmod(0o600)
    store, clock = Store.open("sqlite://"), Clock()
    registry = fleet(clock)
    engine = Engine(store=store, registry=registry, policy=POLICY)
    parts = parts_of_test(folder, store=store, fleet=registry, engine=engine, guard=Guard(file))
    await Node(registry, clock).join(state())
    running = [asyncio.create_task(engine.run()), asyncio.create_task(parts.stragglers.run())]
    app = make_app(parts)
    try:
        yield SyncEndpoint(app, fleet=registry, guard=parts.guard, settings=parts.settings), app
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        store.close()


def paths(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path that there is, one that is not, and the path of syncs."""
    found = [
        (method, re.sub(r"\{[^}]*\}", "n1", route.path))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    assert len(found) > 40, "these are not all"
    return [*found, ("GET", "/no/such/path"), ("GET", "/gates/"), ("PATCH", "/livez"), ("POST", "/v1/nodes/n1/sync")]


@pytest.mark.parametrize("tokens", [False, True])
async def test_no_header_makes_any_path_fail(tmp_path: Path, tokens: bool) -> None:
    async with application(tmp_path, tokens=tokens) as (whole, app):
        for method, path in paths(app):
            for header in HOSTILE:
                status, text = await call(whole, method, path, [header])
                assert status < 500, (method, path, header, text)
            for query in QUERIES:
                status, text = await call(whole, method, path, query=query)
                assert status < 500, (method, path, query, text)


@pytest.mark.parametrize("tokens", [False, True])
async def test_host_header_without_a_host_is_400_and_named(tmp_path: Path, tokens: bool) -> None:
    async with application(tmp_path, tokens=tokens) as (whole, _app):
        for header in NO_HOST:
            for method, path in (("POST", "/v1/gates"), ("GET", "/v1/nodes"), ("POST", "/log-in"), ("GET", "/")):
                status, text = await call(whole, method, path, [header])
                assert status == 400, (method, path, header, text)
                assert "Host header" in text, text


@pytest.mark.parametrize("tokens", [False, True])
async def test_origin_that_is_no_url_is_400_and_named(tmp_path: Path, tokens: bool) -> None:
    async with application(tmp_path, tokens=tokens) as (whole, _app):
        for header in NO_ORIGIN:
            status, text = await call(whole, "POST", "/log-in", [header])
            assert (status, "Origin header" in text) == (400, True), text
            if not tokens:
                status, text = await call(whole, "POST", "/v1/gates", [header])
                assert (status, "Origin header" in text) == (400, True), text


async def test_log_in_that_is_to_lead_to_no_path_leads_to_the_start(tmp_path: Path) -> None:
    form = (b"content-type", b"application/x-www-form-urlencoded")
    async with application(tmp_path, tokens=False) as (whole, _app):
        status, _ = await call(whole, "POST", "/log-in", [form], body=b"next=//[&token=x")
        assert status == 303
