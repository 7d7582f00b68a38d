"""
A quiet HTTP server for both services: uvicorn without its idle tick, its own signals, access log and extra headers.

At rest it wakes nobody up. Sockets are bound before anything else starts, so that a port in use is one clear line. What
one client may take of it is bounded in `healthd.core.http.listener`, until it has asked something, and from then on in
`healthd.core.http.server`.

Also here:

- one HTTP connection that is read from: what it may do to us without asking the application, and which ones go when
  there are too many;
- in which format metrics are sent: what both services do alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import ssl
import stat
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from uvicorn._types import HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from checks.printable import printable_bytes
from healthd.core.http.addresses import ListenError, parse_listen
from healthd.core.http.listener import KERNEL_SECONDS, LimitedLog, Limits, Listener, Pending, address_of

__all__ = [
    "App",
    "Direct",
    "DirectRequest",
    "Limits",
    "ListenError",
    "Server",
    "address_of",
    "bind",
    "bind_unix",
    "closing_on_error",
    "keep_connection",
    "parse_listen",
]

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

KEEP = "keep"
"""The key of `scope["state"]` that an application sets for a peer that it knows."""
KEPT_SECONDS = 10.0
"""How long a connection that is kept may wait before it makes room: a node syncs again within milliseconds."""


def keep_connection(scope: Scope | HTTPScope) -> None:
    """Called by an application: the peer of this request is known, so its connection makes room last."""
    scope.setdefault("state", {})[KEEP] = True


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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, KERNEL_SECONDS)
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
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenError(f"{path}: exists and is not a socket; remove it or choose another directory")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # a daemon that is frozen accepts nobody
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            else:
                raise ListenError(f"{path}: another daemon listens there; stop it or give this one its own directory")
    except FileNotFoundError:
        pass
    except BlockingIOError:
        raise ListenError(
            f"{path}: another daemon holds this socket but does not respond; stop it or choose another directory"
        ) from None
    except OSError as error:
        raise ListenError(f"{path}: cannot be used: {error.strerror or error}; choose another directory") from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ListenError(f"{path.parent}: cannot be created: {error.strerror}; choose another directory") from None
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


class Server:
    """
    One ASGI application on sockets that are bound already.

    `async with Server(app, [sock])` serves from entry to exit; leaving closes the sockets and gives requests under way
    `limits.stop_seconds`. Requests that are held back must be woken by their owner before. `owner_only` is for Unix
    sockets: peers other than root and our own user are dropped. `direct` answers some requests before the application
    is asked. The application logs its own errors.
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
        direct: Direct | None = None,
    ) -> None:
        self._direct = direct
        self._limits = limits or Limits()
        self._sockets = list(sockets)
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # its warnings are a line for each bad request, without an address
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            # uvicorn's types ask for whole seconds.
            timeout_keep_alive=math.ceil(self._limits.keep_alive_seconds),
            timeout_graceful_shutdown=math.ceil(self._limits.stop_seconds),
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        self._server = uvicorn.Server(self._config)
        self._tls_files = (tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
        self._tls_stamps: tuple[tuple[int, int], ...] = ()
        self._owner_only = owner_only
        limited_log = LimitedLog()
        self._asking = Asking(self._limits, limited_log)
        self._listener = Listener(
            self._sockets,
            self._limits,
            make_protocol=self._connection,
            others=self._asking.__len__,
            limited_log=limited_log,
        )

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve from now on. Raises ListenError when the TLS files cannot be used."""
        try:
            self._tls_stamps = self._stamps()
            self._config.load()
        except OSError as error:  # ssl.SSLError is one
            raise self._unusable(error) from None
        # uvicorn's own loop would wake up ten times a second to do what these three lines do once.
        self._server.lifespan = self._config.lifespan_class(self._config)
        self._server.server_state.default_headers = self._config.encoded_headers
        self._server.servers = []  # the sockets are not uvicorn's
        self._listener.start(self._config.ssl)

    def renew_certificate(self) -> bool:
        """
        Serve new connections with the TLS files as they are now; whether they have changed.

        Raises ListenError when they cannot be used: the certificate from before stays, and the next call tries again.
        """
        if self._tls_files is None or self._config.ssl is None:
            return False
        try:
            stamps = self._stamps()
            if stamps == self._tls_stamps:
                return False
            # A key that does not belong to its certificate would leave the context that serves without any.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._tls_files)
            self._config.ssl.load_cert_chain(*self._tls_files)
        except OSError as error:
            raise self._unusable(error) from None
        self._tls_stamps = stamps
        return True

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        return tuple((found.st_mtime_ns, found.st_ino) for found in (file.stat() for file in self._tls_files or ()))

    def _unusable(self, error: OSError) -> ListenError:
        return ListenError(
            f"TLS: {self._config.ssl_certfile}, {self._config.ssl_keyfile}: cannot be used: {error}; "
            "give a PEM certificate chain and its key"
        )

    def _connection(self, pending: Pending) -> Connection:
        return Connection(
            self._config,
            self._server.server_state,
            self._server.lifespan.state,
            listener=self._listener,
            pending=pending,
            asking=self._asking,
            owner_only=self._owner_only,
            direct=self._direct,
        )

    async def stop(self, seconds: float | None = None) -> None:
        """Close the sockets, let requests under way end (`seconds` None: as `limits` say), then cut them off."""
        if seconds is not None:
            self._config.timeout_graceful_shutdown = math.ceil(seconds)
        await self._listener.stop()
        await self._server.shutdown(sockets=self._sockets)
        for connection in list(self._server.server_state.connections):
            connection.transport.close()


class Direct(Protocol):
    """
    Answers some requests without ASGI, which costs two thirds of a short request: no task, no messages.

    It gets whole requests that came in one piece, one at a time of each connection.
    """

    def wants(self, url: bytes) -> bool:
        """Whether it may answer a POST of this path and query."""

    def take(self, request: DirectRequest) -> None:
        """Answer it by `respond`, now or later, or leave it to the application by `hand_over`. It does not raise."""


class DirectRequest:
    """
    One whole request, in the place of uvicorn's cycle of request and response. `on_gone` is called when the peer goes
    before its answer.
    """

    # The upper ones are what uvicorn reads and sets of a cycle.
    __slots__ = (
        "_connection",
        "body",
        "disconnected",
        "headers",
        "keep_alive",
        "more_body",
        "on_gone",
        "response_complete",
        "scope",
        "url",
    )

    def __init__(self, connection: Connection, *, keep_alive: bool) -> None:
        self._connection = connection
        self.url, self.headers, self.scope = connection.url, connection.headers, connection.scope
        self.keep_alive = keep_alive
        self.body = b""
        self.more_body, self.response_complete, self.disconnected = True, False, False
        self.on_gone: Callable[[], None] | None = None

    def respond(self, body: bytes) -> None:
        """Answer 200 with JSON. Nothing happens where the peer has gone."""
        transport = self._connection.transport
        if self.disconnected or self.response_complete or transport.is_closing():
            return
        self.response_complete = True
        end = b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
        transport.write(head + end + body)
        if not self.keep_alive:
            transport.close()
        self._connection.answered()

    def hand_over(self) -> None:
        """Let the application answer it after all; whoever waits to answer it is told to forget it."""
        if self.disconnected or self.response_complete:
            return
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()
        self.response_complete = True  # not by this object
        self._connection.start_application(self)

    def gone(self) -> None:
        """The peer has gone."""
        self.disconnected = True
        if self.on_gone is not None and not self.response_complete:
            self.on_gone()


class Asking:
    """The connections of one server that have asked something."""

    def __init__(self, limits: Limits, limited_log: LimitedLog) -> None:
        self.limits = limits
        self._log = limited_log
        self._all: set[Connection] = set()
        # Those that wait for their peer and since when, in the order in which they began to; and those that are kept.
        self._waiting: dict[Connection, float] = {}
        self._kept: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, one: Connection) -> None:
        """It has asked something, and works."""
        self._all.add(one)

    def discard(self, one: Connection) -> None:
        """It is lost."""
        self._all.discard(one)
        self._works(one)

    def note(self, one: Connection, *, waits: bool, keep: bool) -> None:
        """Whether it waits for its peer or works now. Who goes on waiting keeps the place in the order."""
        if one not in self._all:
            return
        if not waits:
            self._works(one)
        elif one not in self._waiting and one not in self._kept:
            (self._kept if keep else self._waiting)[one] = one.loop.time()

    def make_room(self, asking: Connection) -> bool:
        """Let another one go while there are too many; false when all others work."""
        if len(self._all) <= self.limits.connections:
            return True
        oldest = next((one for one in self._waiting if one is not asking), None)
        if oldest is None:
            late = asking.loop.time() - KEPT_SECONDS
            oldest = next((one for one, since in self._kept.items() if one is not asking and since <= late), None)
        if oldest is None:
            self._log.warn("full", lambda: f"{len(self._all)} connections are open; further ones are answered with 503")
            return False
        self.discard(oldest)
        oldest.transport.abort()  # not `close`, which waits until the peer has read what is left
        return True

    def _works(self, one: Connection) -> None:
        self._waiting.pop(one, None)
        self._kept.pop(one, None)


class Connection(HttpToolsProtocol):
    """With bounds on what comes before the application sees anything."""

    _head_bytes = 0
    _in_head = True
    _refused = False
    _keep = False
    _deadline: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: Mapping[str, Any],
        *,
        listener: Listener,
        pending: Pending,
        asking: Asking,
        owner_only: bool,
        direct: Direct | None,
    ) -> None:
        super().__init__(config, server_state, dict(app_state))
        self._direct = direct
        # The one that has begun in the piece that is read now, and the one that has no answer yet.
        self._arriving: DirectRequest | None = None
        self._unanswered: DirectRequest | None = None
        self._listener, self._asking, self._owner_only = listener, asking, owner_only
        self._pending: Pending | None = pending
        self._limits = asking.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._pending is not None:
            self._pending.transport = transport
        if self._owner_only and not _peer_is_owner(transport):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        self._asking.discard(self)
        if self._pending is not None:
            self._listener.gone(self._pending)
        if self._unanswered is not None:
            self._unanswered.gone()
        if isinstance(self._current(), DirectRequest):
            self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # Only pieces before this one count: a body may follow its head in the same piece.
        if self._in_head and self._head_bytes > self._limits.header_bytes:
            self._refuse()
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._deadline is None and not self._refused:
            self._deadline = self.loop.call_later(self._limits.header_seconds, self._too_late)
        if self._arriving is not None:  # the rest of its body comes later
            self._arriving.hand_over()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # the one before was answered in the same piece
        self._head_done()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._head_done()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._limits.header_bytes:
            self._refuse()
            return
        if self._pending is not None:
            self._listener.asked(self._pending)
            self._pending = None
            self._asking.add(self)
        # Requests of peers that are gone take a moment to end, or are held back to their time.
        full = not self._asking.make_room(self) or len(self.tasks) >= 2 * self._limits.connections
        if not full and self._is_direct():
            self._arriving = self._unanswered = DirectRequest(self, keep_alive=self.parser.should_keep_alive())
            self.cycle = self._arriving  # type: ignore[assignment]
            self._note_state()
            return
        self.limit_concurrency = 0 if full else None  # with 0 uvicorn answers this one request 503
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _JoinedHead(self.transport, self.loop)  # type: ignore[assignment]
        self._note_state()

    def on_body(self, body: bytes) -> None:
        if self._arriving is not None:
            self._arriving.body = self._arriving.body + body if self._arriving.body else body
        elif not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        request, self._arriving = self._arriving, None
        if request is not None and self._direct is not None:
            request.more_body = False
            self._note_state()
            self._direct.take(request)
        elif not self._refused:
            super().on_message_complete()
            self._note_state()

    def _current(self) -> object:
        """What is answered now, or was answered last; uvicorn's type does not know direct requests."""
        return self.cycle

    def _is_direct(self) -> bool:
        """Whether the request whose head is whole may be answered without ASGI."""
        return (
            self._direct is not None
            and (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
            and not any(name == b"transfer-encoding" for name, _ in self.headers)
            and self._direct.wants(self.url)
        )

    def start_application(self, request: DirectRequest) -> None:
        """Have the application answer a direct request, whose body may not be whole yet."""
        url = httptools.parse_url(request.url)
        path = url.path.decode("ascii")
        request.scope["method"] = "POST"
        request.scope["path"] = unquote(path) if "%" in path else path
        request.scope["raw_path"] = url.path
        request.scope["query_string"] = url.query or b""
        cycle = RequestResponseCycle(
            scope=request.scope,
            transport=_JoinedHead(self.transport, self.loop),  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=request.keep_alive,
            on_response=self.on_response_complete,
        )
        cycle.body += request.body
        cycle.more_body = request.more_body
        cycle.message_event.set()
        self._arriving = self._unanswered = None
        if self._current() is request:
            self.cycle = cycle
            self._note_state()
        self._start_asgi_task(cycle, self.app)

    def answered(self) -> None:
        """A direct request has its answer."""
        self._unanswered = None
        self.on_response_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_state()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_state()

    def _note_state(self) -> None:
        """Say whether it waits for its peer or works now."""
        cycle = self.cycle
        working = cycle is not None and not cycle.response_complete and not cycle.more_body
        if cycle is not None and cycle.response_complete:
            self._keep = bool(cycle.scope["state"].get(KEEP))
        self._asking.note(self, waits=not working or self.flow.write_paused, keep=self._keep)

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


@contextlib.contextmanager
def closing_on_error(*sockets: socket.socket) -> Iterator[None]:
    """Close bound sockets when what follows fails, so that a service that does not start leaves no port behind."""
    try:
        yield
    except BaseException:
        for sock in sockets:
            sock.close()
        raise


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """
    The metrics and their content type, as the `Accept` header asks: Prometheus text or OpenMetrics.

    One that cannot be read asks for nothing. Control characters in labels are escaped.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        encode, content_type = choose_encoder("")
    return printable_bytes(encode(registry), backslash=rb"\\"), content_type


def task_errors_metric(errors: Mapping[str, int]) -> CounterMetricFamily:
    """`healthd_task_errors_total`, the same of every service; `errors` are those of `Tasks.errors`."""
    metric = CounterMetricFamily(
        "healthd_task_errors",
        "Unexpected failures of a task of the service: the task was restarted, or the service ended with it. The log "
        "has the traceback.",
        labels=["task"],
    )
    for task, count in errors.items():
        metric.add_metric([task], count)
    return metric


class _JoinedHead:
    """
    The transport of one answer: uvicorn writes its head by itself, which costs a system call more and a packet more.
    Here it goes with the first of the body, or at the end of this turn of the loop.
    """

    __slots__ = ("_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._begun, self._head = False, b""

    def write(self, data: bytes) -> None:
        if self._begun:
            head, self._head = self._head, b""
            self._transport.write(head + data if head else data)
        else:
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


def _peer_is_owner(transport: asyncio.Transport) -> bool:
    """Whether the other end of a Unix socket is root or our own user, by the kernel's word."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return False
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid in (0, os.geteuid()):
        return True
    log.warning("control socket: a process of user %d was refused", uid)
    return False
