"""What the tests of hook answers, and those beside them, are made with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from healthd.core import wire
from healthd.core.model import AdmittedNode, Decision, Verdict

Answer = tuple[int, str, bytes]


@dataclass
class Answers:
    """
    What a server answers, by the end of the path: status, type of the content, content (a function: by the method). It
    notes what was asked, with the query.
    """

    by_end: Mapping[str, Answer | Callable[[str], Answer]]
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    url: str = ""

    def of(self, method: str, path: str) -> Answer:
        plain = path.partition("?")[0]
        self.asked.append(f"{method} {path}")
        found = next((one for end, one in self.by_end.items() if plain.endswith(end)), (200, "application/json", b"{}"))
        return found(method) if callable(found) else found


@contextlib.contextmanager
def serving(by_end: Mapping[str, Answer | Callable[[str], Answer]]) -> Iterator[Answers]:
    answers = Answers(by_end)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            answers.bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            status, kind, body = answers.of(self.command, self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - http.server's names

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    answers.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def admission(*nodes: str, verdict: Verdict = Verdict.ADMIT) -> bytes:
    return wire.encode(
        Decision(
            id="g-1",
            decision=verdict,
            reasons=(),
            nodes=tuple(AdmittedNode(node=name, evidence_age_seconds=1.0) for name in nodes),
            excluded=(),
            policy={},
            retryable=False,
            decided_at=0.0,
            duration_seconds=0.0,
        )
    )
