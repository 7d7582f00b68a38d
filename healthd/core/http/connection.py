"""
One HTTP connection: what it may do to us without asking the application, and which ones go when there are too many.

A connection either waits for its peer (between two requests, for the rest of a head or a body, or for the peer to read
an answer) or works: its request is whole, and the application has it, however long it holds the answer back. When a
server is full, the one that has waited longest goes, so that idle and slow peers never keep a question from its answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client, and all of them together, may take."""

    connections: int = 512
    """
    Open connections; one more takes the place of one that waits for its peer, and is answered 503 only when all of them
    work. Prometheus, probes and people need a handful.
    """

    header_bytes: int = 32 * 1024
    """Bytes of one request's line and headers; more is answered 431. Browsers with cookies send under 8 KiB."""

    header_seconds: float = 10.0
    """Time in which a request's headers must have arrived; connections that never send any are closed after it."""

    keep_alive_seconds: float = 75.0
    """Time that an idle connection is kept: longer than the 60 s between two scrapes or syncs."""

    stop_seconds: float = 2.0
    """Time that requests under way have to end when the server stops."""


class Connection(HttpToolsProtocol):
    """With bounds on what comes before the application sees anything. A server has a subclass with its own values."""

    limits: ClassVar[Limits] = Limits()
    owner_only: ClassVar[bool] = False
    waiting: ClassVar[dict[Connection, None]] = {}
    """Those that wait for their peer, in the order in which they began to."""

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
        self._note_state()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        self.waiting.pop(self, None)
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
            return
        # Requests of peers that are gone take a moment to end, or are held back to their time.
        full = not self._make_room() or len(self.tasks) >= 2 * self.limits.connections
        self.limit_concurrency = 0 if full else None  # with 0 uvicorn answers this one request 503
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()
            self._note_state()

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
        """Whether it waits for its peer or works now. Who goes on waiting keeps the place in the order."""
        cycle = self.cycle
        working = cycle is not None and not cycle.response_complete and not cycle.more_body
        if working and not self.flow.write_paused:
            self.waiting.pop(self, None)
        else:
            self.waiting.setdefault(self)

    def _make_room(self) -> bool:
        """Let another one go while there are too many; false when all others work."""
        if len(self.connections) <= self.limits.connections:
            return True
        oldest = next((one for one in self.waiting if one is not self), None)
        if oldest is None:
            return False
        del self.waiting[oldest]
        oldest.transport.abort()  # not `close`, which waits until the peer has read what is left
        return True

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
