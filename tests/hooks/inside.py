"""The `healthd` command inside the test's own process, and the port of a real node's daemon beside it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from healthd.cli import main
from healthd.core.http import server
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.state.store import NodeStore
from tests.cli.cli_kit import Said


def run_inside(*arguments: str, out: str | None = None) -> Said:
    """Run a command to its end, in the main thread. `out` is a file to be its standard output."""
    before, said, error = (sys.stdout, sys.stderr), io.StringIO(), io.StringIO()
    code: object = None
    with contextlib.ExitStack() as stack:
        sys.stdout = said if out is None else stack.enter_context(Path(out).open("w", encoding="utf-8"))
        sys.stderr = error
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout, sys.stderr = before
    assert isinstance(code, int)
    assert "internal error" not in error.getvalue(), error.getvalue()
    return Said(code, said.getvalue(), error.getvalue())


@contextlib.contextmanager
def daemon_port(book: NodeStore) -> Iterator[str]:
    """The TCP port of a node's daemon that knows what is in the book; its URL."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ending = asyncio.Event()
    sock = server.bind("127.0.0.1:0")

    async def serve() -> None:
        async with server.Server(NodeApi(book), [sock], limits=server.Limits(stop_seconds=0.1)):
            ready.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield f"http://{server.address_of(sock)}"
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()
