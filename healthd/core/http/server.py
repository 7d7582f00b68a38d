"""
A quiet HTTP server for both services: uvicorn without its idle tick, its own signals, access log and extra headers.

At rest it wakes nobody up. Sockets are bound before anything else starts, so that a port in use is one clear line. What
one client may take of it is bounded in `healthd.core.http.listener`, until it has asked something, and from then on in
`healthd.core.http.connection`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import uvicorn

from healthd.core.http.addresses import ListenError, parse_listen
from healthd.core.http.connection import App, Asking, Connection, keep_connection
from healthd.core.http.listener import LimitedLog, Limits, Listener, Pending, address_of

__all__ = [
    "App",
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
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenError(f"{path}: is there and is no socket; remove it or choose another directory")
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
        raise ListenError(f"{path}: a daemon has it that answers nobody; end it or choose another directory") from None
    except OSError as error:
        raise ListenError(f"{path}: cannot be used: {error.strerror or error}; choose another directory") from None
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
            self._config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ListenError(
                f"TLS: {self._config.ssl_certfile}, {self._config.ssl_keyfile}: cannot be used: {error}; "
                "give a PEM certificate chain and its key"
            ) from None
        # uvicorn's own loop would wake up ten times a second to do what these three lines do once.
        self._server.lifespan = self._config.lifespan_class(self._config)
        self._server.server_state.default_headers = self._config.encoded_headers
        self._server.servers = []  # the sockets are not uvicorn's
        self._listener.start(self._config.ssl)

    def _connection(self, pending: Pending) -> Connection:
        return Connection(
            self._config,
            self._server.server_state,
            self._server.lifespan.state,
            listener=self._listener,
            pending=pending,
            asking=self._asking,
            owner_only=self._owner_only,
        )

    async def stop(self) -> None:
        """Close the sockets, let requests under way end, then cut them off."""
        await self._listener.stop()
        await self._server.shutdown(sockets=self._sockets)
        for connection in list(self._server.server_state.connections):
            connection.transport.close()


@contextlib.contextmanager
def closing_on_error(*sockets: socket.socket) -> Iterator[None]:
    """Close bound sockets when what follows fails, so that a service that does not start leaves no port behind."""
    try:
        yield
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
