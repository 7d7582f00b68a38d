"""
A node of a round, run by itself in a network namespace: starts what it accepts, as a node's daemon would.

    python launch_node.py FOLDER ADDRESS

Listens on FOLDER/ADDRESS.sock for one line of JSON, `{"plan": ..., "argv": ...}`, and answers as
`healthd.node.nccom.rsh` wants.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from checks.collective.nccom.environment import environment_of
from checks.collective.nccom.launch import Plan, daemon_environment
from checks.collective.nccom.vector import Refused, accepts


def main(folder: str, address: str) -> None:
    os.makedirs(f"{folder}/{address}")
    own = environment_of(os.environ, {"TMPDIR": f"{folder}/{address}", "HOME": folder})
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"{folder}/{address}.sock")
    server.listen()
    print("listening", flush=True)
    started = []
    while True:
        line, _ = server.accept()
        with line, line.makefile("rb") as lines:
            said = json.loads(lines.readline())
            plan = Plan(**{key: tuple(v) if isinstance(v, list) else v for key, v in said["plan"].items()})
            found = accepts(plan, said["argv"], me=address)
            if isinstance(found, Refused):
                answer = {"exit": 1, "error": found.reason}
            else:
                environment = daemon_environment(plan, os.uname().release, own)
                started.append(subprocess.Popen(found.argv, env=environment, stdin=subprocess.DEVNULL))
                answer = {"exit": 0, "error": None}
            line.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
