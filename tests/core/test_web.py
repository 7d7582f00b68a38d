"""The quiet server: sockets bound first, bounds on what comes before the application, an end that waits for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from healthd.core.errors import ConfigError
from healthd.core.http import server as web
from tests.patience import PATIENCE


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def served(app: web.App = hello, **limits: Any) -> AsyncIterator[tuple[str, int]]:
    sock = web.bind("127.0.0.1:0")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0)  # accept silent connections at once
    host, port = sock.getsockname()
    async with web.Server(app, [sock], limits=web.Limits(**limits)):
        yield host, port


async def say(address: tuple[str, int], text: bytes) -> bytes:
    """What comes back until the server closes, or is silent for a while after its first words."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(text)
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while chunk := await asyncio.wait_for(reader.read(65536), 0.3 if got else 20 * PATIENCE):
                got += chunk
        return got
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_plain_request_is_answered_without_extra_headers() -> None:
    async with served() as address:
        assert await say(address, GET) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_short_answer_is_one_packet_and_the_head_of_a_long_one_waits_for_nothing() -> None:
    more = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        if scope["path"] == "/slow":
            await more.wait()
        await send({"type": "http.response.body", "body": b"slow"})

    async with served(slow) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET)
        assert (await reader.read(65536)).endswith(b"\r\n\r\nslow"), "head and body came one by one"
        writer.write(GET.replace(b"/", b"/slow", 1))
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20 * PATIENCE)).startswith(b"HTTP/1.1 200 OK")
        more.set()
        assert await reader.readexactly(4) == b"slow"
        writer.close()


async def test_server_at_rest_does_not_wake_up() -> None:
    async with served() as address:
        await say(address, GET)
        handles = len(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
        spent = []
        for _ in range(5):  # of all threads of this process; what other tests left behind may run once
            before = time.thread_time()
            await asyncio.sleep(0.1)
            spent.append(time.thread_time() - before)
        assert len(asyncio.get_running_loop()._scheduled) <= handles  # type: ignore[attr-defined]
        assert min(spent) < 0.03, spent


async def test_endless_headers_are_refused() -> None:
    async with served(header_bytes=2000) as address:
        large = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 5000 + b"\r\n\r\n"
        assert (await say(address, large)).startswith(b"HTTP/1.1 431 ")
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionError):
            for _ in range(20):  # one line that never ends, in pieces
                writer.write(b"GET / HTTP/1.1\r\nx: " if _ == 0 else b"b" * 1000)
                await writer.drain()
                await asyncio.sleep(0.005)
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert await say(address, GET) != b""


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nhost:", GET + b"GET / HT"])
async def test_client_that_stops_in_the_middle_of_a_head_is_cut_off(beginning: bytes) -> None:
    async with served(header_seconds=0.1) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(beginning)
        async with asyncio.timeout(5 * PATIENCE):
            await reader.read()  # to the end of the connection
        writer.close()


async def test_idle_connection_is_kept_between_requests() -> None:
    async with served(header_seconds=0.05) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(GET)
            assert (await reader.read(1000)).endswith(b"ok")
            await asyncio.sleep(0.1)
        writer.close()


async def test_nonsense_is_a_400() -> None:
    async with served() as address:
        assert (await say(address, b"\x16\x03\x01\x02\x00nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_end_waits_for_requests_under_way_but_not_for_ever() -> None:
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        begun.release()
        await (go_on.wait() if scope["path"] == "/soon" else asyncio.Event().wait())
        await hello(scope, receive, send)

    sock = web.bind("127.0.0.1:0")
    address = sock.getsockname()
    server = web.Server(slow, [sock], limits=web.Limits(stop_seconds=0.5))
    await server.start()
    soon = asyncio.create_task(say(address, b"GET /soon HTTP/1.1\r\nhost: x\r\n\r\n"))
    never = asyncio.create_task(say(address, GET))
    await begun.acquire()
    await begun.acquire()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    async with asyncio.timeout(10 * PATIENCE):
        await server.stop()
    assert (await soon).endswith(b"ok")
    await never


def test_port_in_use_is_one_clear_line() -> None:
    said = "another program has the port; stop it or choose another"
    with contextlib.closing(web.bind("127.0.0.1:0")) as sock, pytest.raises(web.ListenError, match=said):
        web.bind(web.address_of(sock))


@pytest.mark.parametrize("listen", ["8080", "host:", "host:http", "::1:8080", "1.2.3.4:99999"])
def test_address_that_is_none_is_one_clear_line(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT; write 127.0.0.1:8080"):
        web.bind(listen)


def test_addresses_are_read_as_people_write_them() -> None:
    assert web.parse_listen("[::1]:8080") == ("::1", 8080)
    assert web.parse_listen(":8080") == ("0.0.0.0", 8080)
    with contextlib.closing(web.bind("[::]:0")) as sock:
        host, _, port = web.address_of(sock).rpartition(":")
        assert host == "[::]"
        socket.create_connection(("127.0.0.1", int(port)), timeout=2).close()  # it means IPv4 too


def test_unix_socket_is_for_its_owner_and_replaces_one_that_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "run" / "x.sock"
    first = web.bind_unix(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.stat(path.parent).st_mode & 0o100
    with pytest.raises(web.ListenError, match="another daemon listens there"):
        web.bind_unix(path)
    first.close()
    web.bind_unix(path).close()
    path.unlink()
    path.write_text("x")
    with pytest.raises(web.ListenError, match="exists and is not a socket"):
        web.bind_unix(path)


def test_unix_socket_of_a_daemon_that_is_frozen_keeps_no_other_waiting(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(web.bind_unix(path, backlog=1)))
        for _ in range(10):  # it accepts none of them
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(web.ListenError, match="another daemon holds this socket"):
            web.bind_unix(path)
        assert path.exists()


def test_unix_socket_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(web.ListenError, match="cannot be used: Not a directory; choose another directory"):
        web.bind_unix(tmp_path / "file" / "x.sock")


async def test_unix_socket_answers_its_owner(tmp_path: Path) -> None:
    sock = web.bind_unix(tmp_path / "x.sock")
    async with web.Server(hello, [sock], owner_only=True):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "x.sock")
        writer.write(GET)
        assert (await reader.read(1000)).endswith(b"ok")
        writer.close()


@pytest.mark.system(root=True)  # to become another user
async def test_unix_socket_turns_another_user_away_whatever_its_mode(tmp_path: Path) -> None:
    path = Path("/tmp") / f"healthd-test-{os.getpid()}.sock"
    sock = web.bind_unix(path)
    path.chmod(0o777)
    try:
        async with web.Server(hello, [sock], owner_only=True):
            process = await asyncio.create_subprocess_exec(
                "python3",
                "-c",
                "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
                "s.sendall(b'GET / HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n')\nprint(s.recv(100))",
                str(path),
                user=65534,
                cwd="/",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            assert b"200" not in out
    finally:
        path.unlink()


async def test_renewed_certificate_is_served_without_a_restart_and_a_broken_one_is_not(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    async def make() -> None:
        line = [sys.executable, "-m", "healthd", "tls", "init", "localhost", "--dir", str(tmp_path)]
        await asyncio.to_thread(subprocess.run, line, check=True, capture_output=True)

    await make()
    sock = web.bind("127.0.0.1:0")
    address = ("127.0.0.1", sock.getsockname()[1])

    async def served() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, address)

    async with web.Server(hello, [sock], tls_cert=cert, tls_key=key) as server:
        first = await served()
        assert not server.renew_certificate()
        await make()
        own_key = key.read_text()
        key.write_text((tmp_path / "ca-key.pem").read_text())
        with pytest.raises(web.ListenError, match="cannot be used"):
            server.renew_certificate()
        assert await served() == first
        key.write_text(own_key)
        assert server.renew_certificate()
        assert await served() != first


async def test_tls_files_that_cannot_be_used_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nonsense")
    with contextlib.closing(web.bind("127.0.0.1:0")) as sock:
        server = web.Server(hello, [sock], tls_cert=tmp_path / "x.pem", tls_key=tmp_path / "x.pem")
        with pytest.raises(web.ListenError, match="cannot be used"):
            await server.start()
