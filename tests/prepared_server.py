"""
A process that has imported much and forks children that become other processes: see `tests.prepared`.

    PYTHON -I prepared_server.py SOCKET PARENT_PID FOLDER MODULE ...

It answers each request on SOCKET with the process id of a new child of the process that has started it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
CLONE_PARENT = 0x8000
MADV_COLLAPSE = 25
HUGE_PAGE = 1 << 21
MAX_REQUEST_BYTES = 1 << 18
MAX_DESCRIPTORS = 16
ABOVE = 100  # descriptors are moved here first, so that none is in the way of another's number
# Commands that start workers or services of their own: they get a prepared process too.
STARTING = {"check", "node", "preflight", "demo", "--execute"}

forgotten: list[object] = []
"""Modules of ours that the process which this one becomes does not know."""

Found = tuple[dict[str, Any], list[int]]


def receive(line: socket.socket) -> Found | None:
    """The next request with its descriptors; None when nobody asks any more."""
    descriptors = array.array("i")
    text, ancillary, _, _ = line.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_LEN(MAX_DESCRIPTORS * descriptors.itemsize))
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return (json.loads(text), descriptors.tolist()) if text else None


def serve(line: socket.socket) -> Found | None:
    """Fork for each request. Returns the request in a child, None when nobody asks any more."""
    while (found := receive(line)) is not None:
        pid = fork_for_parent()
        if pid == 0:
            return found
        for one in found[1]:
            os.close(one)
        line.sendall(str(pid).encode())
    return None


def fork_for_parent() -> int:
    """
    Fork a child of the process that has started this one, which alone asks. Returns 0 in the child, else its id.

    Python's own fork gives no choice of parent; two forks and an adoption would copy all page tables twice.
    """
    from tests import prepared

    names = ("PyOS_BeforeFork", "PyOS_AfterFork_Child", "PyOS_AfterFork_Parent")
    before, in_child, in_parent = (getattr(ctypes.pythonapi, name) for name in names)
    before()
    # Without giving up the interpreter's lock: there is no other thread here.
    pid: int = ctypes.PyDLL(None, use_errno=True).syscall(
        prepared.CLONE, ctypes.c_ulong(CLONE_PARENT | signal.SIGCHLD), *[None] * 4
    )
    (in_parent if pid else in_child)()
    if pid == -1:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def run_to_end(program: Callable[[], None]) -> NoReturn:
    """Be a process of this program, to its end."""
    code = 1
    try:
        code = code_of(program)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of any program does
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        # An interpreter that takes itself to pieces would copy all memory that it shares with the prepared process.
        os._exit(code)


def code_of(program: Callable[[], None]) -> int:
    """The exit code of a program that has ended, with its traceback or last word on standard error."""
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


def perform(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take on all that the process is given, and run its program."""
    from tests import prepared

    words = prepared.program_of(request["argv"])
    numbers = [*request["numbers"]]
    if not request["session"] and request["group"] >= 0:
        # Before the fork: at the end of a process whose parent left the group, the kernel may send SIGHUP to all of it.
        os.setpgid(0, request["group"])
    if words[0] in prepared.SERVICES or STARTING & set(words):
        descriptors, numbers = [*descriptors, own_server()], [*numbers, max(numbers) + 1]
    if request["session"]:
        os.setsid()
    atexit._clear()
    ignore(set(request["ignored"]))
    for one, limits in zip(prepared.LIMITS, request["limits"], strict=True):
        if resource.getrlimit(one) != tuple(limits):
            resource.setrlimit(one, limits)
    place(descriptors, numbers)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    show(request["argv"], request["env"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    if request["before"]:
        module, name = request["before"]
        getattr(importlib.import_module(module), name)()
    if len(numbers) > len(request["numbers"]):
        os.set_inheritable(numbers[-1], False)
        prepared.lines[os.getpid(), False] = prepared.Line(socket.socket(fileno=numbers[-1]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        run_script(words)
        return
    if prepared.guards_script(request["argv"]):
        os.execvp = be_script  # type: ignore[assignment]  # what the guard calls in the process that it has forked
    if words[0] == prepared.WORKER:
        # It knows nothing of the rest, which is kept: to take modules to pieces would copy all memory that they are in.
        ours = [name for name in sys.modules if name.split(".")[0] in ("healthd", "tests")]
        forgotten.extend(sys.modules.pop(name) for name in ours)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def run_script(words: list[str]) -> None:
    """Run the text of `-c TEXT ARGUMENT ...`."""
    sys.argv = ["-c", *words[2:]]
    forgotten.append(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))


def be_script(_: str, argv: list[str]) -> NoReturn:
    """In place of executing `PYTHON -I -c TEXT ...`: what an execution does to a process, and the text."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            if not os.get_inheritable(int(name)):
                os.close(int(name))
    for one in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(one, signal.SIG_IGN)
    show(argv, dict(os.environ))
    run_to_end(lambda: run_script(argv[2:]))


def ignore(wanted: set[int]) -> None:
    """Ignore these signals, and no other but those that each Python ignores."""
    for one in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGKILL, signal.SIGSTOP}:
        if (signal.getsignal(one) is signal.SIG_IGN) is not (one in wanted):
            usual = signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL
            signal.signal(one, signal.SIG_IGN if one in wanted else usual)


def own_server() -> int:
    """A copy of this process that forks for the one that this process becomes: the descriptor on which it answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        place([null, null, null, theirs.detach()], [0, 1, 2, 3])
        run(3, parent)
    theirs.close()
    return ours.detach()


def run(number: int, parent: int) -> NoReturn:
    """Fork for the parent as long as it lives, and end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    line = socket.socket(fileno=number)
    found = serve(line)
    line.detach()
    if found is None:
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    run_to_end(lambda: perform(*found))


def place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that are asked for, and close all others."""
    import fcntl

    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, ABOVE + max(numbers)) for one in descriptors]
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number, inheritable=True)
    low = 0
    for number in sorted(set(numbers)):
        if low < number:  # of none, it would close all
            os.closerange(low, number)
        low = number + 1
    os.closerange(low, ABOVE + max(numbers) + 2 * MAX_DESCRIPTORS)


def show(argv: list[str], env: dict[str, str]) -> None:
    """Let /proc/PID/cmdline and /proc/PID/environ show what an executed process would."""
    with open("/proc/self/stat") as file:
        places = [int(word) for word in file.read().rpartition(")")[2].split()[45:49]]
    shown = (argv, [f"{name}={value}" for name, value in env.items()])
    for (start, end), words in zip((places[:2], places[2:]), shown, strict=True):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def collapse() -> None:
    """
    Have the kernel hold the memory of this process in pages of 2 MB (Linux 6.1 and newer; others leave it as it is):
    each fork copies the table of pages, which has 50,000 entries otherwise.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as file:
        areas = [line.split() for line in file]
    for span, rights, *rest in areas:
        if rights == "rw-p" and (len(rest) < 4 or rest[3] == "[heap]"):
            start, end = (int(word, 16) for word in span.split("-"))
            start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            for one in range(start, end, HUGE_PAGE):
                libc.madvise(ctypes.c_void_p(one), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def main() -> None:
    number, parent, folder, *modules = (word for word in sys.argv[1:] if word.strip())
    sys.path.insert(0, folder)
    from tests import prepared

    subprocess.Popen = prepared.Popen  # type: ignore[misc]  # before any of healthd is imported, which takes it for a default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest alone
                importlib.import_module(module)
    gc.freeze()
    collapse()
    run(int(number), int(parent))


if __name__ == "__main__":
    main()
