"""Health events for NVSentinel over real gRPC, as its platform connector gets them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Status, Tier
from healthd.core.errors import ConfigError
from healthd.integrations.nvsentinel.events import MAX_CHARACTERS, EventSender, SendError
from healthd.integrations.nvsentinel.settings import NvsentinelSettings, NvsentinelStrategy
from healthd.node.protobuf import fields, messages, text
from healthd.node.state.store import NodeStore
from tests.node.node_api_kit import healthy, node
from tests.node.node_kit import MovedClock, eventually, finding, lease, result

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")
pytestmark = pytest.mark.anyio

STORE_ONLY, EXECUTE_REMEDIATION = 2, 1  # of ProcessingStrategy
EXECUTE = NvsentinelStrategy.EXECUTE_REMEDIATION


def read(request: bytes) -> list[dict[str, Any]]:
    """The events by the names that health_event.proto gives their fields."""
    found = []
    for event in messages(request, 2):
        numbers = {number: value for number, value in fields(event) if isinstance(value, int)}
        found.append(
            {
                "agent": text(event, 2),
                "componentClass": text(event, 3),
                "checkName": text(event, 4),
                "isFatal": bool(numbers.get(5, 0)),
                "isHealthy": bool(numbers.get(6, 0)),
                "message": text(event, 7),
                "recommendedAction": numbers.get(8, 0),
                "errorCode": [one.decode() for one in messages(event, 9)],
                "entities": [text(one, 2) for one in messages(event, 10)],
                "metadata": {text(one, 1): text(one, 2) for one in messages(event, 11)},
                "seconds": next(dict(fields(one))[1] for one in messages(event, 12)),
                "nodeName": text(event, 13),
                "processingStrategy": numbers.get(16, 0),
            }
        )
    return found


class Connector:
    """A platform connector that keeps what it gets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[list[dict[str, Any]]] = []

    def take(self, request: bytes, _context: object) -> bytes:
        assert dict(fields(request))[1] == 1, "version"
        self.calls.append(read(request))
        return b""

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        handler = grpc.unary_unary_rpc_method_handler(self.take)
        calls = grpc.method_handlers_generic_handler("datamodels.PlatformConnector", {"HealthEventOccurredV1": handler})
        with ThreadPoolExecutor(2) as pool:
            server = grpc.server(pool)
            server.add_generic_rpc_handlers((calls,))
            server.add_insecure_port(f"unix:{self.path}")
            server.start()
            try:
                yield
            finally:
                server.stop(None).wait()


@pytest.fixture
def connector() -> Iterator[Connector]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Connector(Path(folder) / "nvsentinel.sock")
        with made.serving():
            yield made


def sender(store: NodeStore, path: Path, strategy: NvsentinelStrategy = NvsentinelStrategy.STORE_ONLY) -> EventSender:
    wanted = NvsentinelSettings(socket=path, strategy=strategy)
    return EventSender(store, wanted, node="ip-10-0-0-1", clock=MovedClock().clock, least_seconds=0.0)


def broken(**more: Any) -> Any:
    return result("matmul", finding(Status.FAIL, "WrongResult", "cpu:0"), tier=Tier.QUICK, **more)


async def test_fault_and_its_end_are_events_of_their_check_and_nothing_is_sent_twice(
    connector: Connector, tmp_path: Path
) -> None:
    store = healthy(tmp_path)
    sending = sender(store, connector.path)
    assert await sending.send() == 2, "what passes at the start: an older daemon may have told of a fault"
    assert {(one["checkName"], one["isHealthy"]) for one in connector.calls[0]} == {("load", True), ("matmul", True)}
    assert await sending.send() == 0
    store.record(broken())
    assert await sending.send() == 1
    assert await sending.send() == 0
    (event,) = connector.calls[1]
    assert event | {"message": ""} == {
        "agent": "healthd",
        "componentClass": "Node",
        "checkName": "matmul",
        "isFatal": True,
        "isHealthy": False,
        "message": "",
        "recommendedAction": event["recommendedAction"],
        "errorCode": ["WrongResult"],
        "entities": ["cpu:0"],
        "metadata": {},
        "seconds": 1_700_001_000,
        "nodeName": "ip-10-0-0-1",
        "processingStrategy": STORE_ONLY,
    }
    assert event["recommendedAction"] in (2, 15, 25)
    assert "it is fail" in event["message"]
    store.record(result("matmul", tier=Tier.QUICK))
    assert await sending.send() == 1
    (event,) = connector.calls[2]
    assert (event["isHealthy"], event["errorCode"], event["recommendedAction"]) == (True, [], 0)


async def test_not_knowing_is_no_event(connector: Connector, tmp_path: Path) -> None:
    store = node(tmp_path)
    assert await sender(store, connector.path).send() == 0, "no check has run yet"
    store.record(result("load", finding(Status.UNKNOWN)))
    assert await sender(store, connector.path).send() == 0
    assert connector.calls == []


async def test_remediation_is_only_for_real_faults_of_a_node_that_no_job_has(
    connector: Connector, tmp_path: Path
) -> None:
    store, time = healthy(tmp_path), MovedClock()
    sending = sender(store, connector.path, EXECUTE)
    await sending.send()
    store.record(broken(injected=True))
    await sending.send()
    (event,) = connector.calls[-1]
    assert (event["processingStrategy"], event["isFatal"], event["metadata"]) == (
        STORE_ONLY,
        False,
        {"injected": "true"},
    )
    store.set_leases(((lease(), time.at),))
    store.record(broken())
    await sending.send()
    assert {one["processingStrategy"] for one in connector.calls[-1]} == {STORE_ONLY}
    store.set_leases(())
    await sending.send()
    (event,) = connector.calls[-1]
    assert (event["processingStrategy"], event["isFatal"]) == (EXECUTE_REMEDIATION, True)
    store.record(result("matmul", tier=Tier.QUICK))
    await sending.send()
    (event,) = connector.calls[-1]
    assert (event["processingStrategy"], event["isHealthy"]) == (EXECUTE_REMEDIATION, True)


async def test_message_is_bounded(connector: Connector, tmp_path: Path) -> None:
    store = healthy(tmp_path)
    store.record(result("matmul", *(finding(Status.FAIL, target=f"cpu:{n}") for n in range(99)), tier=Tier.QUICK))
    await sender(store, connector.path).send()
    (event,) = (one for one in connector.calls[0] if one["checkName"] == "matmul")
    assert len(event["message"]) <= MAX_CHARACTERS
    assert len(event["entities"]) == 16


async def test_connector_that_is_away_gets_the_newest_once_it_is_there(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        connector = Connector(Path(folder) / "nvsentinel.sock")
        store = healthy(tmp_path)
        sending = sender(store, connector.path)
        with pytest.raises(SendError, match=r"UNAVAILABLE.*does it run on this node, and is its socket mounted\?"):
            await sending.send()
        store.record(broken())
        with connector.serving():
            await sending.send()
        assert {(one["checkName"], one["isHealthy"]) for one in connector.calls[0]} == {
            ("load", True),
            ("matmul", False),
        }


async def test_daemon_sends_when_something_changes(connector: Connector, tmp_path: Path) -> None:
    store = healthy(tmp_path)
    task = asyncio.ensure_future(sender(store, connector.path).run())
    try:
        await eventually(lambda: len(connector.calls) == 1)
        store.record(broken())
        await eventually(lambda: len(connector.calls) == 2)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_without_the_library_the_setting_is_an_error_that_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"^node\.nvsentinel\.socket: needs grpcio; run 'pip install grpcio' in"):
        sender(healthy(tmp_path), tmp_path / "nvsentinel.sock")
