"""
One HTTP/1.1 connection of a command, by the standard library: httpx takes longer to import than a question takes.

Blocking, and for one request at a time. Services, which hold many, use httpx.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


class Connection:
    """To the server of `url`; made anew where it was closed meanwhile. `tls` is needed for https."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._url = url
        self._tls = tls
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """End it."""
        if self._http is not None:
            self._http.close()
            self._http = None

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
            line.request(method, target, body=content, headers=dict(headers))
            line.sock.settimeout(seconds)
            with self._cut_after(seconds + 1.0, line.sock):  # the time-out counts from each byte, and fires first
                answer = line.getresponse()
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
        line.connect()
        self._http = line
        return line

    @contextlib.contextmanager
    def _cut_after(self, seconds: float, line: socket.socket) -> Iterator[None]:
        """End the connection when the time is over, whatever comes over it."""

        def cut() -> None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)  # of TLS too: its own would not be thread-safe

        timer = threading.Timer(seconds, cut)
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
