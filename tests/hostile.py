"""Requests as an adversary writes them: any bytes as headers and query, straight into an ASGI application."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

Header = tuple[bytes, bytes]

NO_HOST: tuple[Header, ...] = ((b"host", b"[::1"), (b"host", b"]["), (b"host", b"h]:80"), (b"host", b"[x]"))
"""Host headers that hold neither a name nor an address."""

NO_ORIGIN: tuple[Header, ...] = ((b"origin", b"http://["), (b"origin", b"//["), (b"origin", b"https://[::1"))
"""Origin headers that are no URL."""

HOSTILE: tuple[Header, ...] = (
    *NO_HOST,
    *NO_ORIGIN,
    (b"host", b""),
    (b"host", b"a:b:c"),
    (b"host", b"\xff\xfe"),
    (b"origin", b"\xff"),
    (b"origin", b"null"),
    (b"accept", b"application/openmetrics-text;version=x"),
    (b"accept", b"text/plain;version=..;;=,\xff"),
    (b"authorization", b"Bearer \xff\xfe"),
    (b"authorization", b"Bearer"),
    (b"cookie", b'healthd-page="\xff\\777; =; ;;'),
    (b"content-length", b"9" * 5000),
    (b"content-length", b"-1"),
    (b"content-type", b"application/x-www-form-urlencoded; charset=\xff"),
    (b"last-event-id", b"x-" + b"9" * 5000),
    (b"sec-fetch-site", b"\xff"),
    (b"x-healthd-node-key", b"\xff" * 20),
)

QUERIES: tuple[bytes, ...] = (
    b"\xff",
    b"%ff=%fe",
    b"next=//[",
    b"job=%00&before=%00",
    b"wait=nan",
    b"wait=" + b"9" * 5000,
    b"=&=&;",
    b"a" * 3000,
)


async def call(
    app: Any, method: str, path: str, headers: Iterable[Header] = (), *, query: bytes = b"", body: bytes = b""
) -> tuple[int, str]:
    """Status and text of the answer. What the application raises is raised here. A stream is hung up on."""
    sent: list[MutableMapping[str, Any]] = []
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    given = dict(headers)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": list(({b"host": b"127.0.0.1:8090"} | given).items()),
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8090),
    }

    async def receive() -> MutableMapping[str, Any]:
        return asked.pop() if asked else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], text.decode(errors="replace")
