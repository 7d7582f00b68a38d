"""Jobs that die, each of one fault, for real: `python faults.py NAME`. Standard library alone."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import zipfile


def exception() -> None:
    raise ValueError("learning rate must be positive")


def exception_with_a_cause() -> None:
    try:
        {}["key"]  # type: ignore[index]
    except KeyError as error:
        raise RuntimeError("no such layer") from error


def import_error() -> None:
    import no_such_module_of_a_job  # type: ignore[import-not-found]  # noqa: F401


def assertion() -> None:
    assert [] != [], "batch is empty"


def recursion() -> None:
    recursion()


def nan_loss() -> None:
    loss = float("inf") - float("inf")
    raise FloatingPointError(f"loss is {loss}, stopping")


def exit_without_a_word() -> None:
    sys.exit(3)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segmentation_fault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def real_segmentation_fault() -> None:
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(1)


def bus_error() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def abort() -> None:
    os.abort()


def full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def full_file_system() -> None:
    """In its directory, which the test has made small."""
    with open("step-500.pt", "wb") as file:
        file.writelines(b"x" * 65536 for _ in range(64))


def read_only_file_system() -> None:
    open("step-500.pt", "wb").close()


def missing_file() -> None:
    open("/no/such/data/shard-0.bin").close()


def empty_shard() -> None:
    pickle.load(io.BytesIO(b""))


def cut_shard() -> None:
    pickle.loads(pickle.dumps(list(range(1000)))[:500])


def bad_json() -> None:
    json.loads("")


def bad_text() -> None:
    b"\xff\xfe\x00".decode("utf-8")


def bad_gzip() -> None:
    gzip.decompress(b"no gzip at all")


def bad_zip() -> None:
    zipfile.ZipFile(io.BytesIO(b"no zip at all"))


def open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    assert kept


def memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    assert bytearray(2**32)


def memory_of_the_group() -> None:
    """Until the kernel ends it."""
    kept = []
    while True:
        kept.append(os.urandom(2**20))


def port_in_use() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(first.getsockname())


def peer_not_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    with socket.create_connection(address):
        pass


def peer_went_away() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.send(b"x")
    ours.send(b"x")


def name_not_resolved() -> None:
    socket.getaddrinfo("no-such-host.invalid", 80)


def permission() -> None:
    """As a user that may not: root may everything."""
    with contextlib.suppress(PermissionError):
        os.setuid(65534)
    folder = os.path.join(tempfile.gettempdir(), f"healthd-closed-{os.getppid()}")
    open(os.path.join(folder if os.path.isdir(folder) else "/root", "checkpoint.pt"), "w").close()


def child_killed() -> None:
    """As a shell that waits for it would exit."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    sys.exit(128 + os.WTERMSIG(status))


def survived_then_exception() -> None:
    """A connection lost long ago is not what it died of."""
    print("ConnectionResetError: [Errno 104] Connection reset by peer, retrying", file=sys.stderr)
    for step in range(400):
        print(f"step {step} loss 0.31", file=sys.stderr)
    raise ValueError("learning rate must be positive")


def waits() -> None:
    """For a signal."""
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
