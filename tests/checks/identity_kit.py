"""What the tests of identity, and those beside them, are made with."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.hosts.machine import Machine

DMI = "/sys/devices/virtual/dmi/id"


ID = "i-0123456789abcdef0"


def reply(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@contextmanager
def serving(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A little server; `talk` has each connection in a thread of its own."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads: list[threading.Thread] = []

        def one(connection: socket.socket) -> None:
            with connection:
                try:
                    talk(connection)
                except OSError:
                    return  # whoever asked has hung up

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                thread = threading.Thread(target=one, args=(connection,))
                threads.append(thread)
                thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            server.close()
            accepting.join(5)
            for thread in threads:
                thread.join(5)
            assert not any(thread.is_alive() for thread in [accepting, *threads])


def read_request(connection: socket.socket) -> tuple[str, dict[str, str]]:
    text = b""
    while b"\r\n\r\n" not in text and (part := connection.recv(4096)):
        text += part
    first, *lines = text.decode().split("\r\n")
    return first, {key.lower(): value for key, _, value in (line.partition(": ") for line in lines) if key}


def make_ec2(machine: Machine, product: str = "trn1.32xlarge", asset: str = ID) -> None:
    machine.write(f"{DMI}/sys_vendor", "Amazon EC2\n")
    machine.write(f"{DMI}/product_name", f"{product}\n")
    machine.write(f"{DMI}/board_asset_tag", f"{asset}\n")
