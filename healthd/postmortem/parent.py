"""
The parent of a job's command: starts it, passes bytes and signals on, keeps its last words, and exits as it did.

A program of its own (`PYTHON -I -S parent.py OPTIONS -- COMMAND`), which `healthd run` becomes: it lasts as long as the
job, so it imports the standard library alone, and little of that. It judges nothing. At the end it gives its notes to
the program that OPTIONS name, waits for that program, and exits.

A second process stands by for the case that this one is killed: it holds the reading ends of the command's streams
open and goes on passing them, so that the job neither dies of SIGPIPE nor blocks. It also serves descendants of the
command that outlive it.

Launchers give each rank a session of its own, so a signal to the command need not reach its ranks. This process is
their subreaper: when the command has ended after a signal to stop, its remaining descendants receive that signal too,
and this process stays until none is left.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections import deque

KEPT_BYTES = 96 * 1024  # the end of each stream
RELEVANT_BYTES = 96 * 1024  # of what is older: lines that tell of a failure, and what came first after a silence
SILENCE_SECONDS = 10.0
AFTER_SILENCE_LINES = 8
TRACEBACK_LINES = 60
ALIKE_LINES = 3  # lines of one form: what every rank prints when it ends is kept so often
FORMS_KEPT = 4096
LONGEST_LINE = 2000
STEPS_KEPT, STEP_SECONDS = 48, 1.0
READ_BYTES = 64 * 1024  # what a pipe holds
CHUNK_BYTES, CHUNK_SECONDS = 4096, 0.02  # what arrives together shares one time
MAX_CHUNKS = 8192  # each has its time: dots that come one by one for days would take more memory than their text
STOP_WITHIN_SECONDS = 900.0  # a command that ends later than this after a signal has not ended by it
DRAINED_BYTES = 1024 * 1024  # after the command's end: the largest pipe; what writes on is a descendant
TERMINAL_MS = 50  # the kernel hands on what was written to a terminal a little later
SIGNALS_KEPT = 64
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells exit
# What is set where the job has set neither: the number of collectives that torch remembers. By its name of today, since
# torch warns of the older one in the output of each rank.
BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
BUFFER_ENTRIES = "2000"
# What says who a process is among the ranks of its job, and where its libraries leave files.
NOTED_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_DEBUG_FILE", "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE",
    "NEURON_RT_LOCAL_CORE_DUMP_DIRECTORY", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
    "PMI_SIZE", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_RESTART_COUNT",
    "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ID", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_ATTEMPT", "SM_CURRENT_HOST",
)  # fmt: skip
# Words of lines that tell of a failure. A test holds that the lines of each signature have one of these.
RELEVANT = (
    b"rror", b"xcept", b"raceback", b"ail", b"FAIL", b"atal", b"WARN", b"bort", b"illed", b"ignal", b"SIG", b"xit",
    b"ancel", b"CANCEL", b"imeout", b"imed out", b"DEADLINE", b"memory", b"OOM", b"NRT", b"err:", b"status",
    b"nresponsive", b"nreachable", b"onnect", b"space", b"quota", b"ead-only", b"efused", b"denied", b"ault",
    b"nterrupt", b"erminat", b"ismatch", b" nan", b"NaN", b"nexpected", b"annot", b"ot found", b"o such", b"task:",
    b"died", b"orrupt", b"runcated", b"ssert", b"EXHAUSTED", b"exhausted", b"oo many", b"ndefined", b"tale ",
    b"exceeded", b"CUDA", b"osed", b"Gloo", b"available", b"spot", b"low on", b"rror 802",
)  # fmt: skip
DIGITS = re.compile(rb"[0-9]+|0x[0-9a-f]+")
INDENTED = re.compile(rb"(?:\[[^\]]{1,40}\]:?|\d+:)?\s|\s*$")
# Signals that cannot be waited for, and those by which this process would say that it is broken itself.
_OWN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_STOPPING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_KERNEL = 0x80  # SI_KERNEL of siginfo: from a terminal, which means the whole group


def is_relevant(text: bytes | bytearray) -> bool:
    """Whether some text has a word of lines that tell of a failure."""
    return any(word in text for word in RELEVANT)


class Relevant:
    """
    Of output that is older than what is kept of its end: the lines that tell of a failure.

    A line is kept if it has a word of RELEVANT, if it belongs to a traceback, or if it comes first after a silence of
    its stream; of lines of one form only the first few: what hundreds of ranks print when they end takes no room.
    """

    def __init__(self, most: int = RELEVANT_BYTES) -> None:
        self.lines: deque[tuple[float, bytes]] = deque()
        self.steps: deque[tuple[float, bytes]] = deque(maxlen=STEPS_KEPT)
        """Now and then an ordinary line: signs of progress, so that what the job survived can be told."""
        self._most = most
        self._kept = 0
        self.left = b""
        """The beginning of the line that has not ended yet: what comes next belongs to it."""
        self._last = 0.0
        self._after_silence = 0
        self._traceback = 0
        self._seen: dict[bytes, int] = {}

    def add(self, at: float, data: bytes | bytearray) -> None:
        """Take in what came at one time."""
        if at - self._last > SILENCE_SECONDS and self._last:
            self._after_silence = AFTER_SILENCE_LINES
        self._last = at
        if not self._after_silence and not self._traceback and not is_relevant(self.left[-64:] + data):
            if b"\n" in data and (not self.steps or at - self.steps[-1][0] >= STEP_SECONDS):
                self.steps.append((at, bytes(data.rpartition(b"\n")[0].rpartition(b"\n")[2][:LONGEST_LINE]) + b"\n"))
            _, newline, left = data.rpartition(b"\n")
            self.left = bytes(left if newline else self.left + left)[:LONGEST_LINE]
            return
        whole, newline, left = (self.left + data).rpartition(b"\n")
        self.left = left[:LONGEST_LINE]
        for line in whole.split(b"\n") if newline else ():
            self._add_line(at, line[:LONGEST_LINE])

    def kept(self) -> list[tuple[float, bytes]]:
        """What is kept, oldest first."""
        return sorted((*self.lines, *self.steps), key=lambda each: each[0])

    def _add_line(self, at: float, line: bytes) -> None:
        begins = b"Traceback (most recent call last)" in line
        inside = self._traceback > 0
        if begins:
            self._traceback = TRACEBACK_LINES
        elif inside:
            # The exception itself is the first line that is not indented.
            self._traceback = self._traceback - 1 if INDENTED.match(line) else 0
        first = self._after_silence > 0
        self._after_silence -= first
        if not (begins or inside or first or is_relevant(line)):
            return
        form = DIGITS.sub(b"", line[:160])
        count = self._seen.get(form, 0)
        if count >= ALIKE_LINES:
            return
        if len(self._seen) >= FORMS_KEPT:
            self._seen.clear()
        self._seen[form] = count + 1
        self.lines.append((at, line + b"\n"))
        self._kept += len(line) + 1
        while self._kept > self._most:
            self._kept -= len(self.lines.popleft()[1])


class Stream:
    """One output of the command: what is read from `source` is written to `sink`, and its end is kept."""

    def __init__(self, name: str, source: int, sink: int) -> None:
        self.name, self.source, self.sink = name, source, sink
        self.bytes = 0
        self.open = True
        self._chunks: deque[tuple[float, bytearray]] = deque()
        self._kept = 0
        self._relevant = Relevant()

    def pass_on(self, wake: int, on_refused: object = None) -> None:
        """
        Pass bytes on until the stream ends. Once `wake` is readable, no longer than there is something to read.

        Where nobody reads `sink` any more, `source` is closed, so that the command learns it as it would by itself.
        """
        watch = select.poll()
        watch.register(self.source, select.POLLIN)
        watch.register(wake, select.POLLIN)
        left, wait_ms = float("inf"), -1
        while left > 0:
            ready = dict(watch.poll(wait_ms))
            if wake in ready:
                watch.unregister(wake)
                left, wait_ms = DRAINED_BYTES, TERMINAL_MS if os.isatty(self.source) else 0
                continue
            if self.source not in ready:
                return
            try:
                data = os.read(self.source, READ_BYTES)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                data = b""  # EIO: no process has the terminal any more
            if not data:
                self.open = False
                return
            left -= len(data)
            self.keep(data)
            if not write_all(self.sink, data):
                os.close(self.source)
                self.open = False
                if callable(on_refused):
                    on_refused(self)
                return

    def keep(self, data: bytes) -> None:
        """Remember the end of what was said, with its time."""
        now = time.time()
        self.bytes += len(data)
        last = self._chunks[-1] if self._chunks else None
        if last is not None and len(last[1]) < CHUNK_BYTES and now - last[0] < CHUNK_SECONDS:
            last[1].extend(data)
        else:
            self._chunks.append((now, bytearray(data)))
        self._kept += len(data)
        while len(self._chunks) > MAX_CHUNKS or self._kept - len(self._chunks[0][1]) >= KEPT_BYTES:
            at, old = self._chunks.popleft()
            self._kept -= len(old)
            self._relevant.add(at, old)

    def noted(self) -> dict[str, object]:
        """The stream as a note: how much it was, and pairs of time and text: what is relevant, and then its end."""
        kept: list[tuple[float, bytes | bytearray]] = [*self._relevant.kept()]
        if self._chunks and self._relevant.left:  # half a line may hide what its secret is called
            kept.append((self._chunks[0][0], self._relevant.left))
        kept += self._chunks
        chunks = [[round(at, 3), data.decode("utf-8", "backslashreplace")] for at, data in kept]
        return {"name": self.name, "bytes": self.bytes, "chunks": chunks}


def write_all(sink: int, data: bytes) -> bool:
    """Write all of it, however slow the reader; False where it cannot be written at all."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(sink, view) :]
        except BlockingIOError:  # whoever gave us the stream has made it so
            select.select([], [sink], [])
        except OSError:
            return False
    return True


class Terminal:
    """The command's terminal where standard output or error is one: a pair of which it has the inner end."""

    def __init__(self, outer: int) -> None:
        import fcntl
        import termios

        self._outer, self._termios, self._fcntl = outer, termios, fcntl
        self.master, self.slave = os.openpty()
        for end in (self.master, self.slave):
            os.set_inheritable(end, False)
        self._typed = os.isatty(0)
        self._entered = threading.Event()
        self.group = 0
        """The process group of the command, once it is started."""
        self.saved: list[int | list[bytes | int]] = termios.tcgetattr(outer)
        self.raw = False
        termios.tcsetattr(self.master, termios.TCSANOW, self._inner(self._is_ours()))
        self.resize()
        self.enter()

    def _inner(self, raw: bool) -> list[int | list[bytes | int]]:
        """The attributes of the outer one; where it is not raw, it alone translates output."""
        attributes = list(self.saved)
        if not raw and isinstance(attributes[1], int):
            attributes[1] &= ~self._termios.OPOST
        return attributes

    def _is_ours(self) -> bool:
        """Whether what is typed comes to us: we are in the foreground of the terminal that is standard input."""
        try:
            return self._typed and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False

    def enter(self) -> None:
        """Let everything that is typed through to the command, where that is for us."""
        if self.raw or not self._is_ours():
            return
        import tty

        self._termios.tcsetattr(self.master, self._termios.TCSANOW, self._inner(True))
        tty.setraw(0, self._termios.TCSADRAIN)
        self.raw = True
        self._entered.set()

    def leave(self) -> None:
        """The outer terminal as it was."""
        if self.raw:
            self.raw = False
            self.restore()

    def restore(self) -> None:
        """The outer terminal as it was, also after another process has ended without that."""
        with contextlib.suppress(OSError, self._termios.error):  # it has gone away
            self._termios.tcsetattr(self._outer, self._termios.TCSADRAIN, self.saved)

    def resize(self) -> None:
        """Tell the inner terminal how large the outer one is."""
        with contextlib.suppress(OSError):
            size = self._fcntl.ioctl(self._outer, self._termios.TIOCGWINSZ, b"\0" * 8)
            self._fcntl.ioctl(self.master, self._termios.TIOCSWINSZ, size)

    def _stopping(self, data: bytes) -> bytes:
        """
        The character of `data` by which a person stops the command; b"" where there is none.

        The kernel stops nobody whose parent is in another session: we do it in its place, unless the command reads
        characters as they are or has a shell's jobs of its own.
        """
        attributes = self._termios.tcgetattr(self.master)
        stop: bytes = attributes[6][self._termios.VSUSP]
        typed = stop != b"\0" and stop in data and bool(attributes[3] & self._termios.ISIG)
        return stop if typed and os.tcgetpgrp(self.master) == self.group else b""

    def type_in(self) -> None:
        """Pass what is typed on to the command, for ever, whenever the terminal is ours."""
        while self._entered.wait():
            try:
                data = os.read(0, READ_BYTES)
            except OSError:  # we are in the background, or the terminal is gone
                self._entered.clear()
                continue
            stops = self._stopping(data)
            if not data or not write_all(self.master, data.replace(stops, b"") if stops else data):
                return
            if stops:
                os.killpg(self.group, signal.SIGSTOP)


class Parent:
    """One command from start to end. `run` returns how it ended."""

    def __init__(self, command: list[str], options: dict[str, object]) -> None:
        self.command, self.options = command, options
        self.signals: list[dict[str, object]] = []
        self.started = time.time()
        self.ended = self.started
        self.pid = 0
        self.status = 0
        self.error: OSError | None = None
        self.before = memory_events()
        self.unseen = ""
        """Why the output of the command is not read; "" where it is."""
        self._over = False  # the command has ended; its descendants may live
        self._stop = 0  # the last signal to stop that was passed on
        self._stop_at = 0.0
        self._ignored = {number for number in _STOPPING if signal.getsignal(number) is signal.SIG_IGN}  # as by nohup
        self._stopped: set[int] = set()  # the descendants that received it
        self._stand_by_pid = 0
        self._earlier = descendants(os.getpid(), set())
        """Descendants that are not the command's: a hook that became this process has its sidecar with it."""
        become_subreaper()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored the kernel tells nobody how a child ended
        self._waited = set(signal.valid_signals()) - _OWN
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self.terminal: Terminal | None = None
        self._inner: list[int] = []  # the command's ends, by number of its descriptor
        self.streams: list[Stream] = []
        self._opened: list[int] = []
        self._wake = self._wake_end = self._lifeline = self._lifeline_end = self._told = self._tell = -1
        self._foreground = False
        self._open_all()
        self._foreground = self.terminal is None and os.isatty(0) and foreground() == os.getpgrp()

    def _open_all(self) -> None:
        """Open what observation takes; where that is refused, close it again, and the command runs unobserved."""
        try:
            outer = next((number for number in (1, 2) if os.isatty(number)), None)
            if outer is not None:
                self.terminal = Terminal(outer)
                self._opened += [self.terminal.master, self.terminal.slave]
            self.streams = self._open_streams()
            self._wake, self._wake_end = self._pipe()
            self._lifeline, self._lifeline_end = self._pipe()
            self._told, self._tell = self._pipe()
            self._stand_by_pid = os.fork()
        except OSError as error:
            if self.terminal is not None:
                self.terminal.leave()
            for opened in self._opened:
                os.close(opened)
            self.terminal, self.streams, self._inner, self._lifeline_end = None, [], [], -1
            self.unseen = os.strerror(error.errno or 0)
            return
        if self._stand_by_pid == 0:
            self._stand_by()
        os.close(self._lifeline)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._opened += ends
        return ends

    def _open_streams(self) -> list[Stream]:
        streams: list[Stream] = []
        ends: dict[int, int] = {}
        for number, name in ((1, "stdout"), (2, "stderr")):
            if self.terminal is not None and os.isatty(number):
                ends[number] = self.terminal.slave
                if not any(stream.source == self.terminal.master for stream in streams):
                    streams.append(Stream(name, self.terminal.master, number))
            elif number == 2 and ends[1] != getattr(self.terminal, "slave", -1) and same_pipe():
                ends[2] = ends[1]  # one pipe as it was: the order of both is kept
                streams[0].name = "stdout and stderr"
            else:
                source, ends[number] = self._pipe()
                streams.append(Stream(name, source, number))
        self._inner = [ends[1], ends[2]]
        return streams

    def run(self) -> None:
        """Start the command and wait for its end."""
        if self.unseen:
            say(f"the output of the command is not read: {self.unseen}; raise the limit (ulimit -n, ulimit -u)")
            self._start()
            if self.error is None:
                self._wait()
            self.ended = time.time()
            return
        self._start()
        for end in set(self._inner):
            os.close(end)
        if self.terminal is not None:
            self.terminal.group = self.pid
        threads = [
            threading.Thread(target=stream.pass_on, args=(self._wake, self._refused), daemon=True)
            for stream in self.streams
        ]
        for thread in threads:
            thread.start()
        if self.terminal is not None and os.isatty(0):
            threading.Thread(target=self.terminal.type_in, daemon=True).start()
        if self.error is None:
            self._wait()
        self.ended = time.time()
        os.close(self._wake_end)  # from here on only what is there is passed on; the other process does the rest
        for thread in threads:
            thread.join()
        if self.terminal is not None:
            self.terminal.leave()
        if self._foreground:
            take_foreground(os.getpgrp())

    def _refused(self, stream: Stream) -> None:
        """Nobody reads this stream any more: the process that stands by closes its end too."""
        with contextlib.suppress(OSError):  # it is gone
            os.write(self._lifeline_end, bytes([self.streams.index(stream)]))

    def _stand_by(self) -> None:
        """What the second process does: nothing, until the first is gone."""
        try:
            os.setsid()
            os.close(self._lifeline_end)
            os.close(self._wake_end)
            os.close(self._told)
            os.close(self._tell)
            for end in set(self._inner):
                os.close(end)
            streams = list(self.streams)
            farewell = False
            while told := os.read(self._lifeline, 1):
                if told[0] >= len(self.streams):
                    farewell = True
                elif (stream := self.streams[told[0]]) in streams:
                    streams.remove(stream)
                    os.close(stream.source)
            if self.terminal is not None and not farewell:
                self.terminal.restore()
            never, _end = os.pipe()
            threads = [threading.Thread(target=stream.pass_on, args=(never,)) for stream in streams]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            os._exit(0)

    def _start(self) -> None:
        try:
            self.pid = os.fork()
        except OSError:  # no process more may be started: this one becomes the command
            self.pid, self.unseen = 0, "no process may be started"
        if self.pid == 0:
            try:
                self._become()
            except OSError as error:
                if self.unseen:
                    say(f"{self.command[0]}: {reason_of(error)}")
                    os._exit(NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE)
                os.write(self._tell, str(error.errno or errno.EINVAL).encode())
            finally:
                os._exit(NOT_FOUND)
        if self.unseen:
            return
        os.close(self._tell)
        failed = os.read(self._told, 16)  # nothing: it has begun, in its own group
        os.close(self._told)
        if failed:
            os.waitpid(self.pid, 0)
            self.error = OSError(int(failed), os.strerror(int(failed)))

    def _become(self) -> None:
        if self.terminal is not None:
            import fcntl
            import termios

            os.setsid()
            fcntl.ioctl(self.terminal.slave, termios.TIOCSCTTY, 0)
            if os.isatty(0):
                os.dup2(self.terminal.slave, 0)
        else:
            os.setpgid(0, 0)
        if self._foreground:
            take_foreground(os.getpid())
        for number, end in zip((1, 2), self._inner, strict=not self.unseen):
            os.dup2(end, number)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own, which would be inherited
            signal.signal(ignored, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        environment = dict(os.environ)
        if not any(name in environment for name in BUFFER_VARIABLES):
            environment[BUFFER_VARIABLES[0]] = BUFFER_ENTRIES
        os.execvpe(self.command[0], self.command, environment)  # noqa: S606  never through a shell

    def _wait(self) -> None:
        """Pass signals on until the command has ended; after a signal to stop, until no descendant of it is left."""
        while True:
            info = signal.sigwaitinfo(self._waited)
            if info.si_signo == signal.SIGCHLD:
                if self._reap():
                    self._over = True
                    if time.monotonic() - self._stop_at > STOP_WITHIN_SECONDS:
                        self._stop = 0  # the command survived that signal, and ended for another reason
                if self._over and not (self._stop and self._stop_rest()):
                    return
            elif info.si_signo == signal.SIGWINCH and self.terminal is not None:
                self.terminal.resize()
            elif info.si_signo not in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGPIPE):
                self._pass_signal(info)

    def _pass_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCONT and self.terminal is not None:
            self.terminal.enter()
            self.terminal.resize()
        elif number != signal.SIGCONT and len(self.signals) < SIGNALS_KEPT:
            by_kernel = info.si_code == _KERNEL
            sender = "the terminal" if by_kernel else name_of(info.si_pid)
            self.signals.append(
                {"at": round(time.time(), 3), "signal": number, "pid": info.si_pid, "uid": info.si_uid, "by": sender}
            )
        if number in _STOPPING and number not in self._ignored:
            self._stop, self._stop_at = number, time.monotonic()
            self._stopped.clear()
        if self._over:
            self._stop_rest()
            return
        with contextlib.suppress(ProcessLookupError):
            # A terminal means all processes of its foreground; who names one process means that one.
            if info.si_code == _KERNEL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def _stop_rest(self) -> bool:
        """Send the signal to stop to the descendants that have not received it; whether any descendant is left."""
        left = descendants(os.getpid(), self._earlier | {self._stand_by_pid})
        for pid in left - self._stopped:
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                os.kill(pid, self._stop)
        self._stopped |= left
        return bool(left)

    def _reap(self) -> bool:
        """Take in who has ended, orphans too where this is the first process of a container. True: the command has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return False
            if pid == 0:
                return False
            if pid != self.pid:
                continue
            if not os.WIFSTOPPED(status):
                self.status = status
                return True
            self._stop_too()

    def _stop_too(self) -> None:
        """The command was stopped by what was typed: the shell gets its terminal back, until it continues us."""
        at_terminal = self._foreground or (self.terminal is not None and self.terminal.raw)
        if not at_terminal:
            return
        if self.terminal is not None:
            self.terminal.leave()
        if self._foreground:
            take_foreground(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        if self.terminal is not None:
            self.terminal.enter()
            self.terminal.resize()
        elif foreground() == os.getpgrp():
            take_foreground(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    @property
    def code(self) -> int:
        """The exit code that says how the command ended: its own, or 128 and the signal, as shells do."""
        if self.error is not None:
            return NOT_FOUND if self.error.errno == errno.ENOENT else NOT_EXECUTABLE
        return -ended if (ended := -os.waitstatus_to_exitcode(self.status)) <= 0 else 128 + ended

    def notes(self) -> dict[str, object]:
        """All that this process knows, as JSON has it."""
        signalled = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None
        return {
            "version": 1,
            "host": os.uname().nodename,
            "command": self.command,
            "directory": working_directory(),
            "pid": self.pid,
            "started": round(self.started, 3),
            "ended": round(self.ended, 3),
            "code": self.code,
            "signal": signalled,
            "dumped_core": bool(signalled and os.WCOREDUMP(self.status)),
            "signals": self.signals,
            "environment": {name: os.environ[name] for name in NOTED_VARIABLES if name in os.environ},
            "streams": [stream.noted() for stream in self.streams],
            "memory_events": {"before": self.before, "after": memory_events()},
            "unread": [f"the output of the command: {self.unseen}"] if self.unseen else [],
        }

    def explain(self) -> int | None:
        """
        Give the notes to the program that explains them; its exit code, None where it gave none in time.

        A signal that comes meanwhile ends it: whoever wants us gone does not wait for an explanation.
        """
        program = self.options.get("explain")
        if not isinstance(program, list) or (self.code == 0 and not self.options.get("always")):
            return None
        seconds = self.options.get("seconds")
        deadline = time.monotonic() + (float(seconds) if isinstance(seconds, int | float) else 60.0)
        try:
            given = os.memfd_create("notes")
        except OSError as error:
            say(f"the end of the command is not explained: {os.strerror(error.errno or 0)}")
            return None
        write_all(given, json.dumps(self.notes()).encode())
        os.lseek(given, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                os.dup2(given, 0)
                os.dup2(2, 1)  # standard output is the command's
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                os.execv(program[0], program)  # noqa: S606  never through a shell
            finally:
                os._exit(NOT_FOUND)
        waited = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        while (left := deadline - time.monotonic()) > 0:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else None
            info = signal.sigtimedwait(waited, left)
            if info is not None and info.si_signo != signal.SIGCHLD:
                break
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def farewell(self) -> None:
        """Tell the process that stands by that this one ends as it should."""
        if self._lifeline_end >= 0:
            with contextlib.suppress(OSError):
                os.write(self._lifeline_end, bytes([255]))


def same_pipe() -> bool:
    """Whether standard output and standard error are one and the same pipe or file."""
    try:
        return os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        return False


def foreground() -> int:
    """The foreground process group of the terminal that is standard input; -1 where it has none."""
    try:
        return os.tcgetpgrp(0)
    except OSError:
        return -1


def take_foreground(group: int) -> None:
    """Make a process group the foreground of standard input. SIGTTOU is blocked in who calls this."""
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)


def name_of(pid: int) -> str:
    """The name of a process that may be gone already; "" where nobody can say."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def working_directory() -> str:
    """The directory that the command was started in; "" where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that they can be found; where that is refused, they are init's as always."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int, others: set[int]) -> set[int]:
    """
    The processes below a process, without `others`, what is below those, and what has ended and is not reaped.

    None is seen where /proc cannot be read.
    """
    below: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return set()
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                if state not in ("Z", "X"):
                    below.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    left = [root]
    while left:
        children = set(below.get(left.pop(), ())) - found - others
        found |= children
        left += children
    return found


def memory_events() -> dict[str, int]:
    """How often the kernel killed for lack of memory in this control group; {} where it does not say."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return {}
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            names = [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"]
        elif "memory" in controllers.split(","):
            names = [f"/sys/fs/cgroup/memory{path}/memory.oom_control", "/sys/fs/cgroup/memory/memory.oom_control"]
        else:
            continue
        for name in names:
            try:
                with open(name, encoding="ascii") as file:
                    pairs = [line.split() for line in file.read(4096).splitlines()]
            except (OSError, ValueError):
                continue
            return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    return {}


def reason_of(error: OSError) -> str:
    """Why the command could not be started."""
    return "no such command" if error.errno == errno.ENOENT else os.strerror(error.errno or 0)


def say(text: str) -> None:
    """One line on standard error, which may be closed."""
    write_all(2, f"healthd: {text}\n".encode())


def main(arguments: list[str]) -> int:
    """Run `OPTIONS -- COMMAND`: the exit code."""
    options = json.loads(arguments[0])
    parent = Parent(arguments[2:], options)
    parent.run()
    if parent.error is not None:
        say(f"{parent.command[0]}: {reason_of(parent.error)}")
        parent.farewell()
        return parent.code
    said = parent.explain()
    parent.farewell()
    verdicts = options.get("verdict_codes")
    if isinstance(verdicts, list) and parent.code != 0:
        if said is not None and said in verdicts:
            return said
        return 1 if parent.code in verdicts else parent.code
    return parent.code


if __name__ == "__main__":
    # No clean-up of the interpreter: threads that still read would hold it up.
    os._exit(main(sys.argv[1:]))
