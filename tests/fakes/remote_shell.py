"""
A stand-in for ssh between network namespaces: the client that mpirun calls, and the server.

    python remote_shell.py serve
    python remote_shell.py [-x] [-o OPTION]... HOST WORD...

The server runs the words by a shell, in a session of its own, as sshd does; the client ends with their exit code.
Of the options ConnectionAttempts counts: it tries once a second.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_PORT = 22022


def ssh_command(folder: Path) -> Path:
    """A folder for PATH with the client as `ssh`."""
    place = folder / "ssh-bin"
    place.mkdir()
    (place / "ssh").write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-SE", __file__])} "$@"\n')
    (place / "ssh").chmod(0o755)
    return place


def serve() -> None:
    with socket.create_server(("", _PORT)) as server:
        print(f"listens on port {_PORT}", flush=True)
        while True:
            threading.Thread(target=_answer, args=(server.accept()[0],), daemon=True).start()


def _answer(line: socket.socket) -> None:
    with line, line.makefile() as lines:
        command = json.loads(lines.readline())
        done = subprocess.run(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False, start_new_session=True, cwd="/"
        )
        line.sendall(f"{done.returncode}\n".encode())


def call(words: Sequence[str]) -> int:
    rest, attempts = list(words), 1
    while rest[0].startswith("-"):
        option = rest.pop(0)
        name, _, value = rest.pop(0).partition("=") if option == "-o" else ("", "", "")
        attempts = int(value) if name == "ConnectionAttempts" else attempts
    try:
        with _connection(rest[0], attempts) as line:
            line.settimeout(None)
            line.sendall(json.dumps(" ".join(rest[1:])).encode() + b"\n")
            with line.makefile() as lines:
                return int(lines.readline())
    except (OSError, ValueError) as error:
        print(f"ssh: {rest[0]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 255


def _connection(host: str, attempts: int) -> socket.socket:
    for _ in range(attempts - 1):
        with contextlib.suppress(OSError):
            return socket.create_connection((host, _PORT), timeout=10)
        time.sleep(1.0)
    return socket.create_connection((host, _PORT), timeout=10)


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["serve"] else call(sys.argv[1:]))
