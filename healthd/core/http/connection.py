"""
One HTTP/1.1 connection of a command, by the standard library: httpx takes longer to import than a question takes.

Blocking, and for one request at a time. Services, which hold many, use httpx.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from healthd.core.bounded import read_parts

PART_BYTES = 1 << 16

# What goes wrong with a connection or with what comes over it; ValueError: a port that is no number, a name that is
# no name.
FAILURES = (OSError, http.client.HTTPException, ValueError)


class NotSentError(OSError):
    """There was no connection, so the request cannot have been done."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`phrase` is what follows the status, `kind` the type of the content, empty where none is named."""

    status: int
    phrase: str
    kind: str
    body: bytes


class _Head:
    """What an answer is read from until its body begins; `last` is the line that was read last."""

    def __init__(self, lines: io.BufferedReader) -> None:
        self._lines = lines
        self.last = b""

    def readline(self, most: int = -1) -> bytes:
        """As of a file."""
        self.last = self._lines.readline(most)
        return self.last

    def close(self) -> None:
        """As of a file."""
        self._lines.close()


class _Answer(http.client.HTTPResponse):
    """The library takes the end of the connection for the end of the head; half a head is no answer."""

    def begin(self) -> None:
        """As the library's. ConnectionError where the connection ends before the head does."""
        lines = self.fp
        head = _Head(lines)
        self.fp = cast("io.BufferedReader", head)
        try:
            super().begin()
        finally:
            if self.fp is not None:  # else the library has closed it
                self.fp = lines
        if head.last not in (b"\r\n", b"\n"):
            raise ConnectionError("the connection closed within the head of the answer")


class Connection:
    """To the server of `url`; made anew where it was closed meanwhile. `tls` is needed for https."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._url = url
        self._prefix = urlsplit(url).path.rstrip("/")  # of an aggregator behind a proxy, such as /healthd
        self._tls = tls
        self._http: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """End it."""
        if self._http is not None:
            self._http.close()
            self._http = self._socket = None

    def exchange(
        self,
        method: str,
        target: str,
        content: bytes | None,
        headers: Mapping[str, str],
        *,
        connect_seconds: float,
        send_seconds: float,
        seconds: float,
        body_bytes: int,
        body_seconds: float,
    ) -> Answer:
        """
        One request and its answer. `seconds` bound its head, `body_seconds` and `body_bytes` the rest.

        NotSentError; any other of FAILURES; BadInputError for a body that is too long or too slow.
        """
        try:
            line = self._connected(connect_seconds)
        except FAILURES as error:
            self.close()
            raise NotSentError(str(error)) from error
        try:
            line.sock.settimeout(send_seconds)
            line.request(method, self._prefix + target, body=content, headers=dict(headers))
            line.sock.settimeout(seconds)
            with self._cut_after(seconds + 1.0):  # the time-out counts from each byte, and fires first
                answer = line.getresponse()
            with contextlib.closing(answer):  # else the connection takes no other request
                body = read_parts(_parts(answer), body_bytes, until=time.monotonic() + body_seconds)
            return Answer(
                status=answer.status, phrase=answer.reason, kind=answer.headers.get("content-type", ""), body=body
            )
        except BaseException:
            self.close()  # what is still to come on it answers another request
            raise

    def _connected(self, connect_seconds: float) -> http.client.HTTPConnection:
        if self._http is not None and self._http.sock is not None:
            if not select.select([self._http.sock], [], [], 0)[0]:  # before a request only its end can be read
                return self._http
            self.close()
        address = urlsplit(self._url)
        host, port = address.hostname or "", address.port
        if address.scheme == "https":
            line: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=connect_seconds, context=self._tls
            )
        else:
            line = http.client.HTTPConnection(host, port, timeout=connect_seconds)
        line.response_class = _Answer
        line.connect()
        self._http, self._socket = line, line.sock
        return line

    def cut(self) -> None:
        """End the request under way, whatever comes over the connection. From any thread."""
        if (line := self._socket) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)  # of TLS too: its own would not be thread-safe

    @contextlib.contextmanager
    def _cut_after(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _parts(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it comes. IncompleteRead where it ends before its announced length."""
    while part := answer.read1(PART_BYTES):
        yield part
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def is_cut_off(error: Exception) -> bool:
    """Whether the other side ended the connection without an answer, which is what TLS servers do to plain HTTP."""
    return isinstance(error, ConnectionError | http.client.BadStatusLine | http.client.IncompleteRead)
