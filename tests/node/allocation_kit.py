"""Parts for tests of allocations: a process table as files, the kubelet's messages in bytes, a server on loopback."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from healthd.node.occupancy.model import JobScheduler, read_processes
from healthd.node.occupancy.occupancy import find_schedulers


def process(
    root: Path,
    pid: int,
    name: str,
    *arguments: str,
    parent: int = 1,
    state: str = "S",
    variables: Mapping[str, str] | None = None,
) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} 1 1\n")
    (folder / "cmdline").write_text("".join(f"{argument}\0" for argument in arguments or (name,)))
    (folder / "environ").write_text("".join(f"{key}={value}\0" for key, value in (variables or {}).items()))


def is_here(root: Path, path: str, content: str, scheduler: JobScheduler) -> str:
    """Why a scheduler is on a host with one file; empty where it is not."""
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(content)
    found = find_schedulers(root, read_processes(root / "proc"), {}, [scheduler])
    return "".join(one.why for one in found)


# --- protocol buffers ---------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def devices(resource: str, *ids: str) -> bytes:
    """A container with devices of a device plugin, with a topology that nobody asked for."""
    topology = field(3, field(1, field(1, 1)))
    return field(2, field(1, resource) + b"".join(field(2, each) for each in ids) + topology) + field(3, 7)


def claim(name: str, driver: str) -> bytes:
    """A container with a resource claim."""
    return field(5, field(2, name) + field(3, "ml") + field(4, field(2, driver) + field(3, "pool") + field(4, "dev0")))


def pod(name: str, namespace: str, *containers: bytes) -> bytes:
    inner = b"".join(field(3, field(1, f"c{index}") + each) for index, each in enumerate(containers))
    return field(1, field(1, name) + field(2, namespace) + inner)


@contextlib.contextmanager
def kubelet_at(path: Path, answer: Callable[[bytes, object], bytes], method: str = "List") -> Iterator[None]:
    """A real gRPC server as the kubelet's."""
    import grpc

    path.parent.mkdir(parents=True, exist_ok=True)
    handler = grpc.method_handlers_generic_handler(
        "v1.PodResourcesLister", {method: grpc.unary_unary_rpc_method_handler(answer)}
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((handler,))
        assert server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()


# --- HTTP ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def http_server(body: bytes, *, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    """Answers /v1/tasks with that body; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v1/tasks" else 404)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
