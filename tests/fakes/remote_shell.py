"""
A stand-in for ssh between network namespaces: the client that mpirun calls, and the server.

    python remote_shell.py serve
    python remote_shell.py [-x] [-o OPTION]... HOST WORD...

The server runs the words by a shell, in a session of its own, as sshd does; the client ends with their exit code.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
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
    rest = list(words)
    while rest[0].startswith("-"):
        del rest[: 2 if rest[0] == "-o" else 1]
    try:
        with socket.create_connection((rest[0], _PORT), timeout=10) as line:
            line.settimeout(None)
            line.sendall(json.dumps(" ".join(rest[1:])).encode() + b"\n")
            with line.makefile() as lines:
                return int(lines.readline())
    except (OSError, ValueError) as error:
        print(f"ssh: {rest[0]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 255


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["serve"] else call(sys.argv[1:]))
