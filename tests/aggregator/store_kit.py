"""What the tests of store, and those beside them, are made with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.aggregator.controller.admission import new_gate
from healthd.aggregator.gate.decisions import close
from healthd.aggregator.model.gates import Closing, Gate
from healthd.core.model import GateRequest, Quarantine
from tests.aggregator.postgres import connected, serving
from tests.aggregator.world import NOW, POLICY


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


def gate(number: int, job: str = "train") -> Gate:
    request = GateRequest(job=job, attempt=number, nodes=("n1",))
    return new_gate(f"g-{number:012x}-00", request, POLICY, NOW + number)


def ended(number: int) -> Gate:
    after, _ = close(NOW + number, gate(number), POLICY, Closing.RELEASED, "withdrawn")
    return after


QUARANTINE = Quarantine(reason="fan", owner="ana", owner_kind="person", since=NOW, until=None)
