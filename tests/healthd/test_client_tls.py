"""An aggregator whose certificate is not trusted, or that speaks TLS where plain HTTP is asked: said at once."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from healthd.core.errors import ConfigError, UnreachableError
from healthd.core.http.client import Endpoint
from healthd.core.http.gates import GateClient
from healthd.core.model import GateRequest
from tests.cli.cli_kit import healthd

LONG = ("--wait", "10m", "--job", "train", "--node", "n1")


@contextlib.contextmanager
def tls_server(certificate: trustme.LeafCert) -> Iterator[int]:
    """A port that speaks TLS and hangs up on whoever does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = door.accept()
                    connection.settimeout(20)
                    with contextlib.suppress(OSError), connection, context.wrap_socket(connection, server_side=True):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=5)


@contextlib.contextmanager
def plain_server() -> Iterator[int]:
    """A port that answers HTTP alone."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = door.accept()
                    with contextlib.suppress(OSError), connection:
                        connection.recv(4096)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=5)


def line_of(url: str, ca_file: Path | None = None) -> str:
    """What a gate that would wait for ten minutes says; it does not wait."""
    with (
        GateClient(Endpoint(urls=(url,), token=None, ca_file=ca_file)) as aggregator,
        pytest.raises(ConfigError) as caught,
    ):
        aggregator.ask(GateRequest(job="train", nodes=("n1",), wait_seconds=600.0), on_hold=lambda _: None)
    said = str(caught.value)
    assert url in said
    assert "\n" not in said
    return said


def test_a_ca_that_is_not_trusted_is_a_wrong_setting_and_is_not_tried_again(tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    with tls_server(trustme.CA().issue_cert("127.0.0.1")) as port:
        assert "--ca-file or HEALTHD_CA_FILE" in line_of(f"https://127.0.0.1:{port}")
        assert "--ca-file or HEALTHD_CA_FILE" in line_of(f"https://127.0.0.1:{port}", other)


def test_a_name_that_is_not_in_the_certificate_is_one_too(tmp_path: Path) -> None:
    authority, ca = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    with tls_server(authority.issue_cert("head.example")) as port:
        assert "use a name that is in its certificate" in line_of(f"https://127.0.0.1:{port}", ca)


def test_plain_http_to_a_tls_port_and_tls_to_a_plain_one_say_what_to_write() -> None:
    with tls_server(trustme.CA().issue_cert("127.0.0.1")) as port:
        assert f"it speaks TLS: write https://127.0.0.1:{port}" in line_of(f"http://127.0.0.1:{port}")
    with plain_server() as port:
        assert "it does not speak TLS: use http://" in line_of(f"https://127.0.0.1:{port}")


def test_an_expired_certificate_is_renewed_by_another_so_that_waiting_may_help(tmp_path: Path) -> None:
    authority, ca = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    with (
        tls_server(authority.issue_cert("127.0.0.1", not_after=past)) as port,
        GateClient(Endpoint(urls=(f"https://127.0.0.1:{port}",), token=None, ca_file=ca)) as aggregator,
        pytest.raises(UnreachableError, match=r"expired.*renew its certificate"),
    ):
        aggregator.call("GET", "/v1/fleet")


@pytest.mark.parametrize("command", [("gate", *LONG), ("gate", "--join", "g", "--size", "2", "--rank", "0")])
def test_the_hooks_end_with_2_at_once_as_for_a_wrong_token(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Also where the rule is to start without a gate while the aggregator is away: it is not away."""
    with tls_server(trustme.CA().issue_cert("127.0.0.1")) as port:
        for scheme, remedy in (("https", "--ca-file"), ("http", "https://")):
            url = f"{scheme}://127.0.0.1:{port}"
            said = healthd(tmp_path, *command, "--aggregator", url, "--on-unreachable", "admit")
            assert (said.code, remedy in said.err) == (2, True), said
            assert "trying again" not in said.err
