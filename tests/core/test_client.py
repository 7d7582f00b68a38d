"""The aggregator's client against servers that are away, slow, broken, or something else altogether."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from healthd.core import wire
from healthd.core.errors import ConfigError, UnreachableError, connection_words
from healthd.core.http.addresses import aggregators_in
from healthd.core.http.client import Aggregator, Endpoint, RefusedError, read_token
from healthd.core.http.gates import GateClient, NotAdmittedError
from healthd.core.http.trust import verification
from healthd.core.model import Decision, GateRequest, Verdict
from tests.aggregator.service import free_port
from tests.core.client_kit import answer, decision, server
from tests.every import every
from tests.patience import PATIENCE

REQUEST = GateRequest(job="train", nodes=("n1",))


def said(verdict: Verdict, *, seconds: float = 0.0, **more: object) -> Callable[[socket.socket], None]:
    """An aggregator that answers so after a while."""

    def send(connection: socket.socket) -> None:
        time.sleep(seconds)
        connection.sendall(answer(wire.encode(decision(verdict, **more))))  # type: ignore[arg-type]

    return send


def aggregator(url: str, *, token: str | None = None, grace_seconds: float = 5.0) -> GateClient:
    return GateClient(Endpoint(urls=(url,), token=token, ca_file=None), grace_seconds=grace_seconds)


def ask(url: str, *, wait_seconds: float = 2.0, gone_seconds: float | None = None, **more: float) -> Decision:
    with aggregator(url, **more) as line:
        request = dataclasses.replace(REQUEST, wait_seconds=wait_seconds)
        return line.ask(request, on_hold=lambda _: None, gone_seconds=gone_seconds)


@every(
    ("sent", "said"),
    [
        (answer(b"<html>welcome to nginx</html>", kind="text/html"), "did not return JSON: is this really"),
        (answer(b"<html>no</html>", status="404 Not Found", kind="text/html"), "HTTP 404 Not Found"),
        (answer(b"{}", status="302 Found"), "HTTP 302 Found"),
        (answer(b'{"detail": "the disk is full"}', status="503 Service Unavailable"), "the disk is full"),
        (answer(b'{"a": ', length=100), "cannot be reached"),
        (b"", "cannot be reached"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be reached"),
    ],
)
def test_what_is_no_answer_of_an_aggregator_counts_as_away(sent: bytes, said: str) -> None:
    with server(sent) as url, aggregator(url) as line, pytest.raises(UnreachableError, match=said):
        line.call("GET", "/v1/fleet")


def several(*urls: str, slack_seconds: float = 5.0) -> Aggregator:
    return Aggregator(Endpoint(urls=urls, token=None, ca_file=None), slack_seconds=slack_seconds)


def vacant() -> str:
    """An address where nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


AWAY = answer(b'{"detail": "neither leads nor knows the leader"}', status="503 Service Unavailable")
GOOD = answer(b'{"nodes": 3}')


@pytest.mark.parametrize("sent", [AWAY, b"", None])
def test_next_aggregator_is_asked_where_one_gives_no_answer_and_stays_the_first(sent: bytes | None) -> None:
    with contextlib.ExitStack() as stack:
        first = vacant() if sent is None else stack.enter_context(server(sent))
        second = stack.enter_context(server(GOOD))
        line = stack.enter_context(several(first, second))
        assert line.url == first
        for _ in range(2):
            assert line.get("/v1/fleet") == {"nodes": 3}
            assert line.url == second


def test_where_no_aggregator_answers_all_are_named_in_one_line() -> None:
    first = vacant()
    with server(AWAY) as second, several(first, second) as line, pytest.raises(UnreachableError) as caught:
        line.get("/v1/fleet")
    (told,) = str(caught.value).splitlines()
    assert told.startswith(f"none of 2 aggregators responds: {first} cannot be reached")
    assert told.endswith(f"; {second}: neither leads nor knows the leader")


def test_frozen_aggregator_is_named_within_half_the_patience_and_the_next_one_is_asked_the_same() -> None:
    """One that is stopped (SIGSTOP): the kernel takes connections, and nobody answers."""
    told: list[tuple[float, str]] = []
    admitted = answer(wire.encode(decision(Verdict.ADMIT)))
    released = answer(b'{"decision": null, "released": [], "released_at": 7.0}')
    with socket.create_server(("127.0.0.1", 0)) as frozen, server(released, admitted) as second:
        first = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        endpoint = Endpoint(urls=(first, second), token=None, ca_file=None)
        with GateClient(endpoint, slack_seconds=2.0) as release:
            assert release.withdraw("job", 0).at == 7.0
        began = time.monotonic()
        with GateClient(endpoint, slack_seconds=2.0) as hook:
            found = hook.ask(
                REQUEST,
                on_hold=lambda _: None,
                on_away=lambda error: told.append((time.monotonic() - began, str(error))),
                hold_seconds=20.0,
            )
    assert found.decision is Verdict.ADMIT
    ((seconds, text),) = told
    assert f"aggregator {first} does not respond" in text
    assert second not in text
    assert seconds < 1.0 * PATIENCE


@pytest.mark.parametrize(("path", "again"), [("/v1/gates", True), ("/v1/validations", False)])
def test_what_may_have_been_done_is_asked_again_only_where_twice_is_as_once(path: str, *, again: bool) -> None:
    with server(b"") as first, server(GOOD) as second, several(first, second) as line:
        if again:
            assert line.call("POST", path, body={}) == b'{"nodes": 3}'
        else:
            with pytest.raises(UnreachableError, match=f"aggregator {first} cannot be reached"):
                line.call("POST", path, body={})


def test_addresses_are_separated_by_commas_and_each_is_a_url() -> None:
    assert aggregators_in("https://a:8090/, http://b:8090", where="x") == ("https://a:8090", "http://b:8090")
    for text in ("", "https://a,b"):
        with pytest.raises(ConfigError, match=r"x: '.?' is not a URL"):
            aggregators_in(text, where="x")
    with pytest.raises(ConfigError, match="17 addresses are too many"):
        aggregators_in(",".join(["http://a"] * 17), where="x")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"id": 7}', b'{"id": "g", "decision": "maybe"}', b"\xff\xfe"])
def test_json_that_is_no_decision_is_never_one(body: bytes) -> None:
    with server(answer(body)) as url, pytest.raises(NotAdmittedError):
        ask(url, wait_seconds=0.0)


def test_a_refusal_is_told_apart_from_silence() -> None:
    refused = answer(b'{"title": "Forbidden", "detail": "token lacks scope gate"}', status="403 Forbidden")
    with server(refused) as url, pytest.raises(RefusedError, match="token lacks scope gate") as caught:
        ask(url)
    assert caught.value.status == 403


def test_requests_share_a_connection_until_the_aggregator_closes_it() -> None:
    """A TLS handshake for each look of a gate that waits would cost both sides more than the look."""
    connections, served = [], threading.Event()

    def serve(door: socket.socket) -> None:
        for requests in (2, 1):
            held, _ = door.accept()
            connections.append(held)
            with held:
                for _ in range(requests):
                    held.recv(65536)
                    held.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            served.set()

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=serve, args=(door,), daemon=True)
        thread.start()
        with aggregator(f"http://127.0.0.1:{door.getsockname()[1]}") as line:
            assert [line.call("GET", "/v1/fleet") for _ in range(2)] == [b"{}", b"{}"]
            assert served.wait(20 * PATIENCE)
            assert line.call("GET", "/v1/fleet") == b"{}"
            assert len(connections) == 2
        thread.join()


def test_who_forgot_the_token_is_told_the_option() -> None:
    refused = answer(b'{"detail": "a token is required: send an Authorization header"}', status="401 Unauthorized")
    with server(refused) as url, aggregator(url) as line, pytest.raises(RefusedError, match="--token-file"):
        line.call("GET", "/v1/fleet")


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_token_that_is_not_wanted_is_a_fault_of_the_configuration_that_names_the_setting(status: str) -> None:
    refused = answer(b'{"detail": "this token may not"}', status=status)
    with server(refused) as url, aggregator(url, token="no-such-token") as line:
        with pytest.raises(RefusedError, match=r"may not.*--token-file or HEALTHD_TOKEN_FILE") as caught:
            line.call("GET", "/v1/fleet")
        assert isinstance(caught.value.told, ConfigError)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)",
            "--ca-file",
        ),
        ("certificate verify failed: Hostname mismatch, certificate is not valid for 'head'", "a name that is in its"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", "use http://"),
        ("Server disconnected without sending a response.", "use https://"),
    ],
)
def test_a_connection_that_fails_for_a_known_reason_names_the_remedy(said: str, remedy: str) -> None:
    words = connection_words(OSError(said))
    assert remedy in words
    assert "_ssl.c" not in words


def test_an_answer_without_end_is_cut_off() -> None:
    def babble(connection: socket.socket) -> None:
        connection.sendall(answer(b"", length=1 << 40).removesuffix(b"\r\n") + b"\r\n")
        while True:
            connection.sendall(b" " * (1 << 20))

    with server(babble) as url, aggregator(url) as line, pytest.raises(UnreachableError, match="more than 64 MiB"):
        line.call("GET", "/v1/fleet")


def test_a_lost_answer_is_asked_again() -> None:
    with server(b"", answer(wire.encode(decision(Verdict.ADMIT)))) as url:
        assert ask(url, wait_seconds=5.0).decision is Verdict.ADMIT


def test_hold_is_followed_to_the_last_word() -> None:
    heard: list[Verdict] = []
    first, last = (answer(wire.encode(decision(verdict))) for verdict in (Verdict.HOLD, Verdict.REJECT))
    with server(first, last) as url, aggregator(url) as line:
        found = line.ask(REQUEST, on_hold=lambda d: heard.append(d.decision))
    assert (found.decision, heard) == (Verdict.REJECT, [Verdict.HOLD])


def test_one_that_stays_away_is_given_up_after_the_wait_or_after_it_is_gone() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for limits in ({"wait_seconds": 0.5}, {"wait_seconds": 600.0, "gone_seconds": 0.5}):
            began = time.monotonic()
            with pytest.raises(UnreachableError, match="cannot be reached"):
                ask(url, **limits)
            assert time.monotonic() - began < 10 * PATIENCE


def test_a_gate_that_is_never_decided_is_not_admitted_which_is_not_an_aggregator_that_is_away() -> None:
    hold = said(Verdict.HOLD, seconds=0.05, wait_seconds=0.2)
    with server(hold) as url, pytest.raises(NotAdmittedError, match=r"did not decide gate g-1 within its 0\.2 s"):
        ask(url, wait_seconds=600.0, grace_seconds=0.2)
    assert not issubclass(NotAdmittedError, UnreachableError), "on_unreachable has no say in it"


def test_the_wait_is_the_aggregators_and_counts_from_its_first_answer() -> None:
    """Its policy may hold a gate for longer than we would."""
    first, hold = (said(Verdict.HOLD, seconds=seconds, wait_seconds=1800.0) for seconds in (0.0, 0.6))
    with server(first, hold, hold, said(Verdict.ADMIT)) as url:
        assert ask(url, wait_seconds=1.0, grace_seconds=0.1).decision is Verdict.ADMIT


def test_a_gate_that_begins_anew_because_the_database_was_lost_is_followed_to_its_own_end() -> None:
    first = said(Verdict.HOLD, wait_seconds=1.0)
    second = said(Verdict.HOLD, seconds=0.4, gate="g-2", wait_seconds=1800.0)
    with server(first, second, second, second, said(Verdict.ADMIT, gate="g-2")) as url:
        assert ask(url, grace_seconds=0.1).id == "g-2"


def test_a_reject_that_is_held_back_after_the_wait_is_still_heard() -> None:
    hold = said(Verdict.HOLD, seconds=0.1, wait_seconds=0.0)
    with server(hold, hold, hold, said(Verdict.REJECT)) as url:
        assert ask(url, wait_seconds=0.0).decision is Verdict.REJECT


def test_an_aggregator_that_restarts_when_the_wait_ends_is_not_taken_for_away() -> None:
    with server(said(Verdict.HOLD, wait_seconds=0.0), b"", said(Verdict.REJECT)) as url:
        assert ask(url, wait_seconds=0.0).decision is Verdict.REJECT


@pytest.mark.parametrize("url", ["n1:8090", "ftp://n1", "", "http//n1"])
def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        aggregator(url)


def test_a_token_file_is_one_line_and_its_faults_are_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  secret \nsecond line\n")
    assert read_token(file) == "secret"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path)


@pytest.mark.parametrize(
    "content", ["t\u00f6ken-0123456789", "\ufefftoken", "two words", "bell\x07", "\u201cquoted\u201d"]
)
def test_what_no_header_can_carry_is_no_token(tmp_path: Path, content: str) -> None:
    """Else it is an error of the library, or, where an aggregator is there, taken for one that cannot be reached."""
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="ASCII letters, digits and signs") as caught:
        read_token(file)
    assert content not in str(caught.value)


def test_a_token_file_without_end_is_none() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: the token cannot be read: larger than"):
        read_token(Path("/dev/zero"))


def test_where_nobody_answers_the_message_says_what_to_do() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with (
        aggregator(url) as line,
        pytest.raises(UnreachableError, match=r"refused; nothing listens there: start it, or"),
    ):
        line.call("GET", "/v1/fleet")
    assert "nothing listens there" in connection_words(OSError("All connection attempts failed"))  # what anyio says
    with aggregator("http://no-such-host.invalid:8090") as line, pytest.raises(UnreachableError, match="to DNS or"):
        line.call("GET", "/v1/fleet")


def test_only_a_url_that_is_plainly_without_tls_is_not_verified() -> None:
    assert verification("http://node:8080") is False
    for url in ("https://node:8080", "HTTPS://node:8080", "Https://node", "HTTP://node"):
        assert verification(url)


def test_an_answer_whose_head_comes_by_drops_is_none() -> None:
    """Each byte is in time by itself; also on a connection that has answered before."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        held, _ = listener.accept()
        with held, contextlib.suppress(OSError):
            held.recv(65536)
            held.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            held.recv(65536)
            held.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            end = time.monotonic() + 6 * PATIENCE
            while not over.wait(0.05) and time.monotonic() < end:
                held.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        began = time.monotonic()
        endpoint = Endpoint(urls=(f"http://127.0.0.1:{listener.getsockname()[1]}",), token=None, ca_file=None)
        try:
            with GateClient(endpoint, slack_seconds=1.0) as client:
                assert client.call("GET", "/v1/x", hold_seconds=0.0) == b"{}"
                with pytest.raises(UnreachableError):
                    client.call("GET", "/v1/x", hold_seconds=0.0)
                assert time.monotonic() - began < 4 * PATIENCE
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def hearing() -> Iterator[tuple[str, list[str | None]]]:
    """A server that lets everybody in, and hears with which words."""
    heard: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers["authorization"])
            self.wfile.write(answer(b"{}"))

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing on the terminal."""

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}", heard
        made.shutdown()
        thread.join()


def project(volume: Path, token: str) -> None:
    """Write a token as the kubelet does: a new directory, to which a link is turned."""
    fresh = volume / f"..{token}"
    fresh.mkdir(parents=True)
    (fresh / "token").write_text(token)
    (volume / "..data_tmp").symlink_to(fresh.name)
    (volume / "..data_tmp").replace(volume / "..data")
    if not (volume / "token").is_symlink():
        (volume / "token").symlink_to("..data/token")


def test_a_token_that_the_kubelet_replaces_is_sent_from_the_next_request_on(tmp_path: Path) -> None:
    project(tmp_path, "first")
    endpoint = Endpoint(urls=("",), token=None, ca_file=None, token_file=tmp_path / "token")
    with hearing() as (url, heard), GateClient(dataclasses.replace(endpoint, urls=(url,))) as line:
        line.get("/v1/fleet")
        project(tmp_path, "second")
        line.get("/v1/fleet")
        (tmp_path / "..data").unlink()  # the last one stays good for a while
        line.get("/v1/fleet")
    assert heard == ["Bearer first", "Bearer second", "Bearer second"]


def test_a_token_out_of_a_pipe_is_read_once() -> None:
    """As `--token-file <(kubectl create token ...)`: the shell has opened the pipe, and names it /dev/fd/N."""
    reader, writer = os.pipe()
    os.write(writer, b"secret\n")
    os.close(writer)
    try:
        endpoint = Endpoint(urls=("",), token=None, ca_file=None, token_file=Path(f"/dev/fd/{reader}"))
        with hearing() as (url, heard), GateClient(dataclasses.replace(endpoint, urls=(url,))) as line:
            line.get("/v1/fleet")
            line.get("/v1/fleet")
    finally:
        os.close(reader)
    assert heard == ["Bearer secret"] * 2


def test_a_token_file_that_is_not_there_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the token cannot be read"):
        GateClient(Endpoint(urls=("http://127.0.0.1:1",), token=None, ca_file=None, token_file=tmp_path / "none"))
