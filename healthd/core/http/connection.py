"""
One HTTP connection that is read from: what it may do to us without asking the application, and which ones go when there
are too many.

A connection either waits for its peer (between two requests, for the rest of a body or of a later head, or for the peer
to read an answer) or works: its request is whole, and the application has it, however long it holds the answer back.
When a server is full, the one that has waited longest goes, so that idle and slow peers never keep a question from its
answer. Those whose application has said `scope["state"]["keep"] = True` go last, and not soon: a node that has synced
keeps its connection, whoever else asks. Until its first head is whole a connection is `pending`: see `listener`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from healthd.core.http.listener import LimitedLog, Limits, Listener, Pending

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

KEEP = "keep"
"""The key of `scope["state"]` that an application sets for a peer that it knows."""
KEPT_SECONDS = 10.0
"""How long a connection that is kept may wait before it makes room: a node syncs again within milliseconds."""


def keep_connection(scope: Scope) -> None:
    """Called by an application: the peer of this request is known, so its connection makes room last."""
    scope.setdefault("state", {})[KEEP] = True


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
            self._log.warn("full", lambda: f"{len(self._all)} connections work; what else asks is answered 503")
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
    ) -> None:
        super().__init__(config, server_state, dict(app_state))
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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

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
        self.limit_concurrency = 0 if full else None  # with 0 uvicorn answers this one request 503
        super().on_headers_complete()
        self._note_state()

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
        """Say whether it waits for its peer or works now."""
        cycle = self.cycle
        working = cycle is not None and not cycle.response_complete and not cycle.more_body
        if cycle is not None and cycle.response_complete:
            self._keep = bool(cycle.scope["state"].get(KEEP))
        self._asking.note(self, waits=not working or self.flow.write_paused, keep=self._keep)

    def _await_head(self) -> None:
        self._head_done()
        self._in_head, self._head_bytes = True, 0
        self._deadline = self.loop.call_later(self._limits.header_seconds, self._too_late)

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
