"""Who a machine is: configuration, metadata service, firmware, tool; and what never leaves a machine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checks.host import metadata
from checks.host.identity import Metadata, ask_metadata, read_identity
from checks.host.metadata import may_ask
from tests.checks.identity_kit import DMI, ID, make_ec2, read_request, reply, serving
from tests.every import every
from tests.hosts.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


NOTHING = Metadata(None, None)
Answer = Callable[[str, dict[str, str]], bytes]


class Service:
    """The metadata service as documented: a token by PUT, then GET with it; what was asked is kept."""

    def __init__(self, instance_type: bytes = b"trn1.32xlarge", **others: bytes) -> None:
        self.asked: list[str] = []
        self._answers = {"instance-type": instance_type, "instance-id": ID.encode(), "token": b"TOKEN==", **others}

    def __call__(self, connection: socket.socket) -> None:
        first, headers = read_request(connection)
        method, path, _ = first.split()
        self.asked.append(f"{method} {path}")
        if (method, path) == ("PUT", "/latest/api/token"):
            good = 1 <= int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600
            connection.sendall(reply("200 OK", self._answers["token"]) if good else reply("400 Bad Request"))
        elif headers.get("x-aws-ec2-metadata-token") != "TOKEN==":
            connection.sendall(reply("401 Unauthorized"))
        else:
            connection.sendall(reply("200 OK", self._answers[path.rpartition("/")[2]]))


def found(machine: Machine, **others: Any) -> tuple[str | None, str | None, str | None]:
    said = read_identity(machine.host, **others)
    return said["instance_type"], said["instance_type_origin"], said["instance_id"]


# --- which source counts ----------------------------------------------------------------------------------------------


def test_firmware_of_a_nitro_machine_tells_all_and_nobody_is_asked(machine: Machine) -> None:
    make_ec2(machine)
    service = Service(b"trn2.48xlarge")
    with serving(service) as endpoint:
        assert found(machine, endpoint=endpoint) == ("trn1.32xlarge", "dmi", ID)
    assert service.asked == []
    assert read_identity(machine.host)["on_ec2"] is True


def test_configured_type_wins_over_all(machine: Machine) -> None:
    make_ec2(machine)
    with serving(Service()) as endpoint:
        said = found(machine, configured="ml.inf2.48xlarge", endpoint=endpoint, imds=True)
    assert said == ("inf2.48xlarge", "config", ID)


def test_service_fills_what_the_firmware_does_not_tell(machine: Machine) -> None:
    make_ec2(machine, product="HVM domU", asset="")
    service = Service()
    with serving(service) as endpoint:
        assert found(machine, endpoint=endpoint) == ("trn1.32xlarge", "imds", ID)
    assert service.asked == [
        "PUT /latest/api/token",
        "GET /latest/meta-data/instance-type",
        "GET /latest/meta-data/instance-id",
    ]


def test_service_that_was_asked_for_wins_over_the_firmware(machine: Machine) -> None:
    make_ec2(machine)
    with serving(Service(b"trn2.48xlarge")) as endpoint:
        assert found(machine, endpoint=endpoint, imds=True)[:2] == ("trn2.48xlarge", "imds")


def test_tool_is_the_last_word(machine: Machine) -> None:
    inventory = {"instance_type": "inf2.xlarge"}
    assert found(machine, inventory=inventory) == ("inf2.xlarge", "tool", None)
    make_ec2(machine)
    assert found(machine, inventory=inventory)[:2] == ("trn1.32xlarge", "dmi")


@pytest.mark.parametrize("vendor", ["QEMU", "Dell Inc.", ""])
def test_machine_that_is_not_on_ec2_asks_nobody_and_has_no_type(vendor: str, machine: Machine) -> None:
    """Its serial number is not an instance id either."""
    make_ec2(machine)
    machine.write(f"{DMI}/sys_vendor", vendor)
    service = Service()
    with serving(service) as endpoint:
        assert found(machine, endpoint=endpoint) == (None, None, None)
    assert service.asked == []
    assert read_identity(machine.host)["on_ec2"] is False


def test_switch_keeps_requests_inside(machine: Machine) -> None:
    make_ec2(machine, product="", asset="")
    service = Service()
    with serving(service) as endpoint:
        assert found(machine, endpoint=endpoint, imds=False) == (None, None, None)
    assert service.asked == []


def test_machine_that_is_data_is_never_asked_about_over_the_network(machine: Machine) -> None:
    make_ec2(machine, product="", asset="")
    started = time.monotonic()
    assert found(machine, imds=True) == (None, None, None)
    assert time.monotonic() - started < metadata.CONNECT_SECONDS


@every(
    ("imds", "on_ec2", "variables", "expected"),
    [
        (None, True, {}, True),
        (None, False, {}, False),
        (None, True, {"HEALTHD_IMDS": "off"}, False),
        (None, False, {"HEALTHD_IMDS": "on"}, True),
        (None, True, {"HEALTHD_IMDS": "Off "}, False),
        (None, True, {"AWS_EC2_METADATA_DISABLED": "true"}, False),
        (None, False, {"HEALTHD_IMDS": "on", "AWS_EC2_METADATA_DISABLED": "true"}, False),
        (True, False, {"HEALTHD_IMDS": "off"}, True),
        (False, True, {"HEALTHD_IMDS": "on"}, False),
    ],
)
def test_who_may_ask(imds: bool | None, on_ec2: bool, variables: dict[str, str], expected: bool) -> None:
    assert may_ask(imds, on_ec2=on_ec2, environment=variables) is expected


# --- the service misbehaves -------------------------------------------------------------------------------------------


def test_server_that_hangs_costs_a_second_at_most() -> None:
    released = threading.Event()
    with serving(lambda connection: released.wait(10) and None) as endpoint:
        started = time.monotonic()
        assert ask_metadata(endpoint) == NOTHING
        took = time.monotonic() - started
        released.set()
    assert took < metadata.SECONDS + 4


def test_server_that_drips_bytes_costs_a_second_at_most() -> None:
    """A socket's own time limit begins anew with every byte."""

    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" * 10:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    with serving(drip) as endpoint:
        started = time.monotonic()
        assert ask_metadata(endpoint) == NOTHING
        assert time.monotonic() - started < metadata.SECONDS + 4


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ask_metadata(f"http://127.0.0.1:{port}") == NOTHING


HTML = b"<!DOCTYPE html><html><body>Please sign in</body></html>"


@every(
    "answer",
    [
        reply("404 Not Found", HTML),
        reply("404 Not Found", b"trn1.32xlarge"),
        reply("403 Forbidden"),
        reply("200 OK", HTML),
        reply("200 OK"),
        reply("200 OK", b"x" * 10_000_000),
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\ntrn1.32xlarge",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x00\xff" * 1000,
        b"",
    ],
)
def test_answer_that_is_not_the_service_says_nothing(answer: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(answer)

    with serving(talk) as endpoint:
        assert ask_metadata(endpoint) == NOTHING


@every("body", [HTML, b"", b"x" * 10_000_000, b"\xff\xfe", b"trn1", b"a b.c", b"trn1.32xlarge\r\nx: y"])
def test_type_that_is_no_type_is_not_believed_and_the_id_still_stands(body: bytes) -> None:
    said = []
    with serving(Service(body)) as endpoint:
        said.append(ask_metadata(endpoint))
    assert said[0].instance_type is None
    assert said[0].instance_id in (ID, None)


def test_id_that_is_no_id_is_not_believed() -> None:
    with serving(Service(**{"instance-id": b"i-XYZ"})) as endpoint:
        assert ask_metadata(endpoint) == Metadata("trn1.32xlarge", None)


def test_token_that_would_break_a_header_is_not_sent() -> None:
    service = Service(token=b"TOKEN\r\nX-Other: 1")
    with serving(service) as endpoint:
        assert ask_metadata(endpoint) == NOTHING
    assert service.asked == ["PUT /latest/api/token"]


def test_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(Service()) as endpoint:
        assert ask_metadata(endpoint) == Metadata("trn1.32xlarge", ID)


def test_service_that_fails_leaves_the_word_of_the_firmware(machine: Machine) -> None:
    make_ec2(machine, asset="unknown")
    with serving(lambda connection: connection.sendall(reply("404 Not Found"))) as endpoint:
        assert found(machine, endpoint=endpoint) == ("trn1.32xlarge", "dmi", None)


# --- the tool's own words ---------------------------------------------------------------------------------------------


def entries(*names: object) -> str:
    return json.dumps([{"neuron_device": index, "instance_type": name} for index, name in enumerate(names)])
