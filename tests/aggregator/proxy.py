"""A TCP proxy that loses, cuts and delays what passes through it: a bad network between two real processes."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from types import TracebackType


class Rule(enum.Enum):
    """PASS everything; CUT before the first byte of an answer; HALF of an answer and then the end; LATE answers."""

    PASS = "pass"
    CUT = "cut"
    HALF = "half"
    LATE = "late"


class Proxy:
    """
    Listens on `url`; what is said to `rule` goes for everything that passes from then on.

    `lost` and `late` count the answers that were.
    """

    def __init__(self, target: str, *, late_seconds: float = 0.5) -> None:
        host, _, port = target.rpartition("/")[2].rpartition(":")
        self._target = (host, int(port))
        self._late_seconds = late_seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._over = False
        self.rule = Rule.PASS
        self.lost = 0
        self.late = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def switch(self, target: str) -> None:
        """Lead there from now on, and cut all that is open: a name that another machine has taken."""
        host, _, port = target.rpartition("/")[2].rpartition(":")
        self._target = (host, int(port))
        for sock in list(self._open):
            _end(sock)

    def __enter__(self) -> Proxy:
        self._run(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._threads[0].join(5)  # nobody is let in any more
        for sock in list(self._open):
            _end(sock)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            client.settimeout(None)
            self._open |= {client, server}
            self._run(self._pump, client, server, False)
            self._run(self._pump, server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        """Bytes of one direction until either side ends; then both end."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self.rule is Rule.LATE:
                    time.sleep(self._late_seconds)
                    self.late += 1
                if answers and self.rule in (Rule.CUT, Rule.HALF):
                    self.lost += 1
                    if self.rule is Rule.HALF:
                        sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        for sock in (source, sink):
            _end(sock)
        if answers:
            self._open -= {source, sink}
            source.close()
            sink.close()


def _end(sock: socket.socket) -> None:
    """Wake whoever reads it; closing alone would not."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
