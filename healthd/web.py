"""
A quiet HTTP server for both services: uvicorn without its idle tick, its own signals, access log and extra headers.

At rest it wakes nobody up. Sockets are bound before anything else starts, so that a port in use is one clear line. What
a client may do to us without asking the application (slow or endless headers, hundreds of connections) ends here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from healthd.listen import ListenError, parse_listen

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client, and all of them together, may take."""

    connections: int = 512
    """Open connections; one more is answered 503. Prometheus, probes and people need a handful."""

    header_bytes: int = 32 * 1024
    """Bytes of one request's line and headers; more is answered 431. Browsers with cookies send under 8 KiB."""

    header_seconds: float = 10.0
    """Time in which a request's headers must have arrived; connections that never send any are closed after it."""

    keep_alive_seconds: float = 75.0
    """Time that an idle connection is kept: longer than the 60 s between two scrapes or syncs."""

    stop_seconds: float = 2.0
    """Time that requests under way have to end when the server stops."""


def bind(listen: str, *, backlog: int = 512) -> socket.socket:
    """A listening socket at `HOST:PORT`; port 0 takes any free one (see `address_of`). ListenError in one line."""
    host, port = parse_listen(listen)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ListenError(f"listen: cannot resolve {host!r}: {error}; name an address of this machine") from None
    # The protocol is named because asyncio sets TCP_NODELAY only where it is: without, answers wait 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `[::]` means IPv4 too, whatever net.ipv6.bindv6only says.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        remedy = {
            errno.EADDRINUSE: "another program has the port; stop it or choose another port with --listen",
            errno.EACCES: "ports below 1024 need root; choose another port with --listen",
            errno.EADDRNOTAVAIL: "this machine has no such address; choose another with --listen",
        }.get(error.errno or 0, "choose another address with --listen")
        raise ListenError(f"cannot listen on {listen}: {error.strerror}; {remedy}") from None
    sock.setblocking(False)
    return sock


def bind_unix(path: Path, *, backlog: int = 16) -> socket.socket:
    """
    A listening Unix socket that its owner alone may use (mode 0600).

    A socket that nobody listens on any more is replaced; one in use is a ListenError, as is a file that is no socket.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenError(f"{path}: is there and is no socket; remove it or choose another directory")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
            else:
                raise ListenError(f"{path}: another daemon listens there; stop it or give this one its own directory")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ListenError(f"{path.parent}: cannot be made: {error.strerror}; choose another directory") from None
    before = os.umask(0o177)  # the mode must be right from the first moment on
    try:
        sock.bind(str(path))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ListenError(f"{path}: cannot listen: {error.strerror or error}; choose another directory") from None
    finally:
        os.umask(before)
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """`HOST:PORT` that a bound socket really has; the path of a Unix socket."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return str(name)
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


class Server:
    """
    One ASGI application on sockets that are bound already.

    `async with Server(app, [sock])` serves from entry to exit; leaving closes the sockets and gives requests under way
    `limits.stop_seconds`. Requests that are held back must be woken by their owner before. `owner_only` is for Unix
    sockets: peers other than root and our own user are dropped. The application logs its own errors.
    """

    def __init__(
        self,
        app: App,
        sockets: Iterable[socket.socket],
        *,
        limits: Limits | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        owner_only: bool = False,
    ) -> None:
        self._limits = limits or Limits()
        self._sockets = list(sockets)
        self._config = uvicorn.Config(
            app,
            http=type("Bounded", (_Bounded,), {"limits": self._limits, "owner_only": owner_only}),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=self._limits.connections,
            # uvicorn's types ask for whole seconds.
            timeout_keep_alive=math.ceil(self._limits.keep_alive_seconds),
            timeout_graceful_shutdown=math.ceil(self._limits.stop_seconds),
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        self._server = uvicorn.Server(self._config)

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve from now on. Raises ListenError when the TLS files cannot be used."""
        try:
            self._config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ListenError(
                f"TLS: {self._config.ssl_certfile}, {self._config.ssl_keyfile}: cannot be used: {error}; "
                "give a PEM certificate chain and its key"
            ) from None
        # uvicorn's own loop would wake up ten times a second to do what these three lines do once.
        self._server.lifespan = self._config.lifespan_class(self._config)
        self._server.server_state.default_headers = self._config.encoded_headers
        await self._server.startup(sockets=self._sockets)

    async def stop(self) -> None:
        """Close the sockets, let requests under way end, then cut them off."""
        await self._server.shutdown(sockets=self._sockets)
        for connection in list(self._server.server_state.connections):
            connection.transport.close()


class _Bounded(HttpToolsProtocol):
    """One connection, with bounds on what comes before the application sees anything."""

    limits = Limits()
    owner_only = False

    _head_bytes = 0
    _in_head = True
    _refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.owner_only and not _peer_is_owner(transport):
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # Only pieces before this one count: a body may follow its head in the same piece.
        if self._in_head and self._head_bytes > self.limits.header_bytes:
            self._refuse()
            return
        self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_done()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.limits.header_bytes:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._head_done()
        self._in_head, self._head_bytes = True, 0
        self._deadline = self.loop.call_later(self.limits.header_seconds, self._too_late)

    def _head_done(self) -> None:
        self._in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        self._refused = True
        self._head_done()
        text = b"request headers are too large"
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(text) + text)
        self.transport.close()


def _peer_is_owner(transport: asyncio.Transport) -> bool:
    """Whether the other end of a Unix socket is root or our own user, by the kernel's word."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return False
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid in (0, os.geteuid()):
        return True
    log.warning("control socket: a process of user %d was turned away", uid)
    return False


@contextlib.contextmanager
def closing_on_error(*sockets: socket.socket) -> Iterator[None]:
    """Close bound sockets when what follows fails, so that a service that does not start leaves no port behind."""
    try:
        yield
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
