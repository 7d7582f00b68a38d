"""What the tests of client, and those beside them, are made with."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from healthd.core.model import AdmittedNode, Decision, Verdict


def decision(verdict: Verdict, *, gate: str = "g-1", **policy: object) -> Decision:
    return Decision(
        id=gate,
        decision=verdict,
        reasons=(),
        nodes=(AdmittedNode(node="n1", evidence_age_seconds=1.0),) if verdict is Verdict.ADMIT else (),
        excluded=(),
        policy=policy,
        retryable=False,
        decided_at=0.0,
        duration_seconds=0.0,
    )


def answer(body: bytes, *, status: str = "200 OK", kind: str = "application/json", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body) if length is None else length}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + body


@contextlib.contextmanager
def server(*answers: bytes | Callable[[socket.socket], None]) -> Iterator[str]:
    """Answers one connection after the other; the last answer is given to all that follow."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()

        def serve() -> None:
            count = 0
            while True:
                try:
                    connection, _ = door.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    what = answers[min(count, len(answers) - 1)]
                    count += 1
                    if callable(what):
                        what(connection)
                    else:
                        connection.sendall(what)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            door.shutdown(socket.SHUT_RDWR)
            door.close()
            thread.join(timeout=5)
