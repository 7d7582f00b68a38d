"""A database of each kind, for the tests that write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.postgres import connected, serving


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server of our own."""
    with serving() as server:
        yield server.url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.system)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/aggregator.db"
    server: str = request.getfixturevalue("postgres")
    name = f"test_{os.getpid()}_{abs(hash(tmp_path)) % 10**9}"
    with connected(server) as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return server.rpartition("/")[0] + f"/{name}"
