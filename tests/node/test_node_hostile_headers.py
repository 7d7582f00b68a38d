"""No header and no query makes the node's two HTTP servers answer 5xx, on any path."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.node.http.tcp_socket import NodeApi
from tests.hostile import HOSTILE, NO_HOST, QUERIES, call
from tests.node.node_api_kit import healthy

PATHS = (
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
    "/v1/node",
    "/v1/checks",
    "/v1/results/matmul",
    "/none",
    "/health/",
)


@pytest.mark.parametrize("path", PATHS)
async def test_no_header_makes_the_port_fail(tmp_path: Path, path: str) -> None:
    api = NodeApi(healthy(tmp_path))
    for header in HOSTILE:
        status, text = await call(api, "GET", path, [header])
        # A node with nothing but a host says itself whether it is ready: that is no failure.
        assert status < 500 or status == 503, (path, header, text)
        assert "healthd's own" not in text
    for query in QUERIES:
        status, text = await call(api, "GET", path, query=query)
        assert status < 500 or status == 503, (path, query, text)


async def test_host_header_without_a_host_is_400_and_named(tmp_path: Path) -> None:
    api = NodeApi(healthy(tmp_path))
    for header in NO_HOST:
        status, text = await call(api, "GET", "/health", [header])
        assert (status, "Host header" in text) == (400, True), text
