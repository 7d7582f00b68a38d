"""
Accepts the connections of a server, and bounds those that have not asked anything yet.

A connection is *pending* from `accept` on until the head of its first request is whole; a TLS handshake lies in
between. The kernel keeps a silent connection for `KERNEL_SECONDS` before `accept` returns it. From then on it costs a
file and nothing else until it may begin: with its first byte, or for TLS with its whole ClientHello. Only then is there
a transport, which costs more. Pending connections have places of their own, so they never take the place of one that
has asked something.

When these places are taken, one pending connection goes: of those that have not begun before any other, of the address
that has most of them, the oldest. Clients send their first bytes together with the connection, so a flood of idle
connections displaces itself. A connection that is young is kept, unless most have not begun as it has not; while none
may go, nothing is accepted, and the kernel keeps what comes.

While places are short, one address may use a share of them for TLS handshakes under way. Beyond it, a handshake begins
when another of this address ends, or goes because it takes too long. So a flood of handshakes takes a bounded part of
the CPU and delays its own address only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from healthd.core.tasks import Tasks

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 32
"""At most: between two of these batches the loop does other work, and sees who has sent a first byte."""
YOUNG_SECONDS = 0.05
"""How long a connection is young; also how long the listener pauses."""
KERNEL_SECONDS = 10
"""How long the kernel keeps a connection that has not sent a byte; it rounds up to 15."""
FLOOD_SECONDS = 1.0
"""How long after a connection was displaced handshakes are bounded by address."""
HANDSHAKE_YOUNG_SECONDS = 0.25
"""How long a handshake goes on although others of its address wait: a round trip, on a server that is busy."""
HANDSHAKES_EACH = 32
"""How many TLS handshakes one address may have under way while places are short; at most a quarter of the places."""
SPOKEN_EVERY_SECONDS = 60.0
"""How often the same trouble is logged."""
TLS_CLOSE_SECONDS = 2.0
"""How long a peer may take to answer the end of TLS; asyncio's 30 s would keep the file open."""

# Errors of `accept` that mean one connection and not the socket: the peer has gone already.
_GONE = (BlockingIOError, InterruptedError, ConnectionAbortedError)
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# struct linger: on, 0 s.
_LINGER_NOT = struct.pack("ii", 1, 0)

# A TLS record: its type, two bytes of version, two of length.
_RECORD_HEAD_BYTES = 5
_RECORD_BYTES = 1 << 14
_HANDSHAKE_RECORD = 22


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client, and all of them together, may take."""

    connections: int = 512
    """
    Open connections that have asked something; one more takes the place of one that waits for its peer, and is answered
    503 only when all of them work. Prometheus, probes and people need a handful.
    """

    pending: int = 128
    """
    Open connections beside these whose first request has not arrived yet, TLS handshakes among them. One that is
    welcome is pending for milliseconds.
    """

    header_bytes: int = 32 * 1024
    """Bytes of one request's line and headers; more is answered 431. Browsers with cookies send under 8 KiB."""

    header_seconds: float = 10.0
    """
    Time in which a request's headers must have arrived. For the first request it counts from `accept` on and includes
    the TLS handshake; a connection that is late is closed.
    """

    keep_alive_seconds: float = 75.0
    """Time that an idle connection is kept: longer than the 60 s between two scrapes or syncs."""

    stop_seconds: float = 2.0
    """Time that requests under way have to end when the server stops."""


class LimitedLog:
    """Warnings that are logged at most once in `SPOKEN_EVERY_SECONDS` each, however often they are due."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}

    def warn(self, topic: str, text: Callable[[], str], *, error: BaseException | None = None) -> None:
        """Log `text()` unless something of this topic was logged lately. Topics are few and fixed."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at.get(topic, -SPOKEN_EVERY_SECONDS) >= SPOKEN_EVERY_SECONDS:
            self._said_at[topic] = now
            log.warning("%s", text(), exc_info=error)


class Pending:
    """One connection that has not asked anything yet."""

    __slots__ = ("address", "deadline", "needs_bytes", "place", "since", "sock", "transport")

    def __init__(self, sock: socket.socket, address: str, since: float, deadline: float) -> None:
        self.sock, self.address, self.since, self.deadline = sock, address, since, deadline
        self.needs_bytes = 1
        """So many must have arrived before it may begin."""
        self.place: _Shares | None = None
        self.transport: asyncio.Transport | None = None
        """Set by the protocol once there is one: for TLS, after the handshake."""


class _Shares:
    """Pending connections by their address, in the order in which they came."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Pending, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, one: Pending) -> None:
        self._of.setdefault(one.address, {})[one] = None
        self._count += 1
        one.place = self

    def discard(self, one: Pending) -> None:
        if one.place is self:
            one.place = None
            self._count -= 1
            del self._of[one.address][one]
            if not self._of[one.address]:
                del self._of[one.address]

    def next_to_go(self) -> Pending | None:
        """The oldest of the address that has most of them; among equals, of the one that has had some for longest."""
        most = max(self._of.values(), key=lambda pending: len(pending), default={})
        return next(iter(most), None)


Serve = Callable[[Pending], asyncio.Protocol]


class Listener:
    """
    Accepts on sockets that are bound already, from `start` to `stop`.

    `make_protocol` makes the protocol of one connection that has begun; it calls `asked` when the head of
    the first request is whole, and `gone` when the connection is lost. `others` says how many connections there are
    that have asked something.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        limits: Limits,
        *,
        make_protocol: Serve,
        others: Callable[[], int],
        limited_log: LimitedLog,
    ) -> None:
        self._sockets = list(sockets)
        self._limits = limits
        self._make_protocol = make_protocol
        self._others = others
        self._log = limited_log
        self._tls: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[Pending, None] = {}  # in the order in which they came, which is that of their deadlines
        self._silent, self._speaking = _Shares(), _Shares()
        # Handshakes under way, by address, with the time when they began and in that order.
        self._handshakes: dict[str, dict[Pending, float]] = {}
        self._handshakes_each = max(1, min(HANDSHAKES_EACH, limits.pending // 4))
        self._waiting: dict[str, dict[Pending, None]] = {}  # for their turn, by address
        # Who may begin. An epoll of its own costs one call for each connection, and none for its end; the
        # loop's would cost two, and an object for each.
        self._first_bytes: select.epoll | None = None
        self._by_file: dict[int, Pending] = {}
        self._at_once = max(1, min(ACCEPTED_AT_ONCE, limits.pending // 2))
        self._deadline: asyncio.TimerHandle | None = None
        self._resumption: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._displaced, self._flood_until = 0, 0.0

    def start(self, tls: ssl.SSLContext | None) -> None:
        """Accept from now on, in the running loop."""
        self._tls, self._loop = tls, asyncio.get_running_loop()
        self._first_bytes = select.epoll()
        self._loop.add_reader(self._first_bytes, self._notice)
        self._listen()

    async def stop(self) -> None:
        """Accept nobody, and let go of all that are pending. The sockets stay open."""
        self._unlisten()
        for timer in (self._deadline, self._resumption):
            if timer is not None:
                timer.cancel()
        if self._loop is not None and self._first_bytes is not None:
            self._loop.remove_reader(self._first_bytes)
            self._first_bytes.close()
        self._deadline = self._resumption = self._loop = self._first_bytes = None
        for one in list(self._pending):
            self._close(one)
        await asyncio.sleep(0)  # what is cancelled before it began would leave its socket open
        await self._tasks.stop(TLS_CLOSE_SECONDS)

    def asked(self, one: Pending) -> None:
        """The head of its first request is whole: from now on it counts among the others."""
        self._forget(one)

    def gone(self, one: Pending) -> None:
        """The connection was lost. Safe to repeat."""
        self._forget(one)

    # --- accepting ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._resumption = None
        if self._loop is not None:
            for sock in self._sockets:
                self._loop.add_reader(sock, self._accept_some, sock)

    def _unlisten(self) -> None:
        if self._loop is not None:
            for sock in self._sockets:
                self._loop.remove_reader(sock)

    def _pause(self) -> None:
        """Accept nothing for a moment: what comes waits in the kernel."""
        if self._resumption is None and self._loop is not None:
            self._unlisten()
            self._resumption = self._loop.call_later(YOUNG_SECONDS, self._listen)

    def _accept_some(self, listening: socket.socket) -> None:
        self._notice()  # on a busy machine a connection and its first byte wait for the same turn of the loop
        for _ in range(self._at_once):
            if not self._make_room():
                self._pause()
                return
            try:
                sock, address = listening.accept()
            except _GONE as error:
                if isinstance(error, BlockingIOError):
                    return
            except OSError as error:
                self._not_accepted(listening, error)
                return
            else:
                self._take(sock, _share_of(address))

    def _not_accepted(self, listening: socket.socket, error: OSError) -> None:
        remedy = "; raise LimitNOFILE or ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        self._log.warn(
            "accept",
            lambda: (
                f"{address_of(listening)}: cannot accept connections: {error.strerror or error}, with "
                f"{self._others()} connections and {len(self._pending)} that have sent no request yet{remedy}"
            ),
        )
        if error.errno not in _NO_FILES or not self._displace():  # else there is a file as soon as the loop has turned
            self._pause()

    def _make_room(self) -> bool:
        """Whether one more may be accepted; closes one that is pending where that helps."""
        most = min(self._limits.pending, self._limits.pending + self._limits.connections - self._others())
        return len(self._pending) < most or self._displace()

    def _displace(self) -> bool:
        """Close one pending connection; false when there is none, or the one whose turn it is is too young."""
        if self._loop is None:
            return False
        old = self._loop.time() - YOUNG_SECONDS
        one = self._silent.next_to_go()
        if one is None or (one.since > old and len(self._silent) <= len(self._speaking)):
            one = self._speaking.next_to_go()
            if one is None or one.since > old:
                return False
        self._displaced += 1
        self._flood_until = self._loop.time() + FLOOD_SECONDS
        address = one.address
        self._log.warn(
            "displaced",
            lambda: (
                f"idle connections were closed to make room for others: {self._displaced} so far, this one from "
                f"{address}"
            ),
        )
        self._close(one, leave_nothing=True)
        return True

    # --- pending connections ------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket, address: str) -> None:
        if self._loop is None or self._first_bytes is None:
            sock.close()
            return
        try:
            self._first_bytes.register(sock, select.EPOLLIN | select.EPOLLONESHOT)
        except OSError as error:  # the kernel's memory, or fs.epoll.max_user_watches, is used up
            sock.close()
            reason = error.strerror or error
            self._log.warn("watch", lambda: f"a connection from {address} cannot be watched: {reason}")
            return
        now = self._loop.time()
        one = Pending(sock, address, now, now + self._limits.header_seconds)
        self._pending[one] = None
        self._silent.add(one)
        if self._deadline is None:
            self._deadline = self._loop.call_at(one.deadline, self._close_late)
        self._by_file[sock.fileno()] = one

    def _notice(self) -> None:
        """Hand those over to TLS or HTTP that may begin. What they have sent is still to be read."""
        if self._first_bytes is None:
            return
        for file, _ in self._first_bytes.poll(0):
            one = self._by_file.get(file)
            if one is None:
                continue
            try:
                found = one.sock.recv(_RECORD_HEAD_BYTES + _RECORD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                self._first_bytes.modify(one.sock, select.EPOLLIN | select.EPOLLONESHOT)
                continue
            except OSError:
                found = b""
            needs = _needs_bytes(found) if self._tls is not None else 1
            if len(found) < one.needs_bytes or needs is None:  # the peer has gone, or speaks no TLS
                self._close(one)
            elif len(found) < needs:
                one.needs_bytes = needs
                one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needs)
                self._first_bytes.modify(one.sock, select.EPOLLIN | select.EPOLLONESHOT)
            elif self._tls is None or self._has_turn(one.address):
                self._begin(one)
            else:
                self._waiting.setdefault(one.address, {})[one] = None

    def _has_turn(self, address: str) -> bool:
        """Whether one more handshake of this address may begin. Ends old ones for it where that is needed."""
        if self._loop is None or self._loop.time() > self._flood_until:
            return True
        under_way = self._handshakes.get(address, {})
        old = self._loop.time() - HANDSHAKE_YOUNG_SECONDS
        while len(under_way) >= self._handshakes_each:
            oldest = next(iter(under_way))
            if under_way[oldest] > old:
                return False
            del under_way[oldest]
            if oldest.transport is None:  # else it has just ended, and may have asked already
                self._close(oldest)
        return True

    def _begin(self, one: Pending) -> None:
        if one.needs_bytes > 1:
            one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        del self._by_file[one.sock.fileno()]
        self._silent.discard(one)
        self._speaking.add(one)
        if self._tls is not None and self._loop is not None:
            self._handshakes.setdefault(one.address, {})[one] = self._loop.time()
        self._tasks.start("a connection's begin", self._hand_over(one))

    async def _hand_over(self, one: Pending) -> None:
        """Make transport and protocol, TLS before them."""
        loop, tls = asyncio.get_running_loop(), self._tls
        try:
            await loop.connect_accepted_socket(
                lambda: self._make_protocol(one),
                one.sock,
                ssl=tls,
                # Ours ends earlier: it counts from `accept` on.
                ssl_handshake_timeout=self._limits.header_seconds if tls is not None else None,
                ssl_shutdown_timeout=TLS_CLOSE_SECONDS if tls is not None else None,
            )
        except OSError:  # the peer has gone, or speaks no TLS (ssl.SSLError is one)
            self._forget(one)
        except Exception as error:  # noqa: BLE001  # one connection must not end the accepting of others
            self._forget(one)
            self._log.warn("begin", lambda: f"a connection from {one.address} could not be set up", error=error)
        finally:
            self._handshake_ended(one)

    def _handshake_ended(self, one: Pending) -> None:
        """Those that wait have their turn, the newest first: its peer is the most likely to be still there."""
        under_way = self._handshakes.get(one.address, {})
        if under_way.pop(one, None) is None:
            return
        if not under_way:
            del self._handshakes[one.address]
        while self._loop is not None and (waiting := self._waiting.get(one.address)) and self._has_turn(one.address):
            following = next(reversed(waiting))
            self._no_longer_waits(following)
            self._begin(following)

    def _no_longer_waits(self, one: Pending) -> None:
        waiting = self._waiting.get(one.address)
        if waiting is not None:
            waiting.pop(one, None)
            if not waiting:
                del self._waiting[one.address]

    def _close_late(self) -> None:
        """Close those whose time is over; the timer goes on to the next."""
        self._deadline = None
        if self._loop is None:
            return
        now = self._loop.time()
        for one in list(self._pending):
            if one.deadline > now:
                self._deadline = self._loop.call_at(one.deadline, self._close_late)
                return
            self._close(one)

    def _close(self, one: Pending, *, leave_nothing: bool = False) -> None:
        """`leave_nothing`: no TIME_WAIT, of which a flood would leave tens of thousands; the peer reads a reset."""
        silent = one.place is self._silent
        self._forget(one)
        if silent:
            del self._by_file[one.sock.fileno()]
            if leave_nothing:
                with contextlib.suppress(OSError):
                    one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            one.sock.close()
        elif one.transport is not None:
            one.transport.abort()
        else:
            # Its handshake is under way. Whoever reads from it meets the end, and closes it in order.
            with contextlib.suppress(OSError):
                one.sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, one: Pending) -> None:
        self._pending.pop(one, None)
        self._no_longer_waits(one)
        if one.place is not None:
            one.place.discard(one)
        if not self._pending and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _needs_bytes(found: bytes) -> int | None:
    """How many bytes the first TLS record takes, as far as can be seen; None where it is not a handshake."""
    if found[:1] != bytes([_HANDSHAKE_RECORD]):
        return None
    if len(found) < _RECORD_HEAD_BYTES:
        return _RECORD_HEAD_BYTES
    length = int.from_bytes(found[3:_RECORD_HEAD_BYTES])
    return _RECORD_HEAD_BYTES + length if length <= _RECORD_BYTES else None


def address_of(sock: socket.socket) -> str:
    """`HOST:PORT` that a bound socket really has; the path of a Unix socket."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return str(name)
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def _share_of(address: object) -> str:
    """Whose share a peer's address counts for: an IPv4 address, a /64 of IPv6, all peers of a Unix socket together."""
    if not isinstance(address, tuple):
        return "the Unix socket"
    host = str(address[0])
    if ":" not in host or host.startswith("::ffff:"):
        return host.removeprefix("::ffff:")
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"
