"""
The hook: starts the sidecar, waits for its result, and then starts the command, parks, or ends.

It does nothing that takes time or memory itself, because it is what the launcher sees, signals and may kill.

Also here:

- a gate for one job with no standing service: what runs beside each node's command;
- what the job's command is given when the hook becomes it: its number, its peers, clean signals and files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

from checks.printable import printable_line
from healthd.core import wire
from healthd.core.errors import ConfigError, HealthdError
from healthd.core.model import Decision, GateRequest
from healthd.hooks.launchers import Place
from healthd.hooks.stopping import Signals

Plain = str | bool | int | float | list[str] | list[int] | dict[str, float]
"""What a setting of the gate's aggregator can be."""

NOT_ADMITTED, IMPOSSIBLE, USAGE = 75, 1, 2

_NODE_NAME = re.compile(r"\brank-(\d{1,9})\b")

_PID_FILE = re.compile(r"(.*-)(\d+)\.txt")

# A launcher that ends a hook kills it some seconds later.
END_SECONDS = 4.0

# Of a path in which a folder and a socket's name still fit.
FOLDER_BYTES = 60


@dataclass(frozen=True, kw_only=True)
class Task:
    """
    What the sidecar is to do.

    `began` is when the hook was started, by CLOCK_MONOTONIC: `wait_seconds` counts from there. `port` is the
    aggregator's; `parent` the hook's process id. `acknowledge_seconds` is how long the included have to confirm the
    start, `gone_seconds` after how long without an answer the main node counts as gone, `linger_seconds` how long the
    main node waits for the others to hear the end. `main_counts`: the launcher takes the exit code of rank 0 for the
    job's, so that nothing may start without it. `keeps_notes`: the commands have parents that tell of a bad end, so the
    aggregator lives as long as rank 0's command. `policy` is what the gate's aggregator goes by, by keys of
    `[policy]`; what is not named is as always.
    """

    rank: int
    size: int
    main: str
    port: int
    local_rank: int
    local_size: int
    request: GateRequest
    wait_seconds: float
    began: float
    acknowledge_seconds: float
    gone_seconds: float
    linger_seconds: float
    token: str | None
    parent: int
    main_counts: bool = False
    keeps_notes: bool = False
    policy: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def node(self) -> str:
        return node_name(self.rank)

    @property
    def url(self) -> str:
        host = f"[{self.main}]" if ":" in self.main else self.main
        return f"http://{host}:{self.port}"

    @property
    def probes(self) -> bool:
        """Whether this process checks the node: one on each node does."""
        return self.local_rank == 0

    @property
    def leads(self) -> bool:
        """Whether this process runs the aggregator."""
        return self.rank == 0 and self.local_rank == 0


def node_name(rank: int) -> str:
    """`rank-3`: how a preflight names its nodes."""
    return f"rank-{rank}"


def ranks_in(text: str) -> list[int]:
    """The ranks of the nodes that a text names, each once."""
    return list(dict.fromkeys(int(rank) for rank in _NODE_NAME.findall(text)))


def with_hosts(text: str, hosts_of: Mapping[str, str]) -> str:
    """The text with nodes named by their hosts: `gpu-17 (rank 3)` for `rank-3`, where the host is known."""
    return _NODE_NAME.sub(lambda m: f"{hosts_of[m[1]]} (rank {m[1]})" if m[1] in hosts_of else m[0], text)


def become(command: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    """Never returns: the hook becomes the command. ConfigError when it cannot be started."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would forget one that comes just now
    # Python ignores these, and what is ignored stays so over exec: a pipe's end would no longer end a job's commands.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, dict(environment))  # noqa: S606 - the hook becomes the job's command
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be started: {error.strerror}") from None


def run_hook(
    place: Place,
    command: tuple[str, ...],
    sidecar_arguments: Sequence[str],
    show: Callable[[Outcome], None],
    signals: Signals,
    *,
    keeps_notes: bool = False,
) -> int | Start:
    """
    The exit code when the command is not to be started here.

    `keeps_notes`: the sidecar may have the aggregator live on, and is not waited for.

    `sidecar_arguments` are this command's own, for the sidecar which gets `--sidecar` besides. Raises HealthdError in
    one line. Whatever is raised here ends the sidecar, for which `signals` are deferred.
    """
    began = time.monotonic()
    _open_standard_files()
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: no such command here; it should start after the gate")
    folder = _make_folder()
    sidecar: subprocess.Popen[bytes] | None = None
    try:
        own, its = socket.socketpair()
        with own, own.makefile("rb") as words:
            with its:
                told = f"{its.fileno()}:{os.getpid()}:{began}:{folder}"
                sidecar = _start_sidecar(sidecar_arguments, told, its.fileno())
            outcome = _read_outcome(words, sidecar)
            show(outcome)
            if outcome.kind == "run":
                environment = environment_of(place, outcome, os.environ)
                start = Start(command=command, environment=environment, aggregator=outcome.aggregator)
                with contextlib.suppress(OSError):  # a sidecar that has ended may have said why
                    own.send(b"\n")  # nothing can fail here any more but the command: it is confirmed now
                outcome = dataclasses.replace(_read_outcome(words, sidecar), decision=outcome.decision)
                if outcome.kind == "run":
                    if not keeps_notes and (outcome.decision is None or not outcome.decision.excluded):
                        sidecar.wait()  # nobody is parked, so the sidecar has nothing left to do
                    return start
                show(dataclasses.replace(outcome, decision=None))  # which was shown
        if outcome.kind == "park":
            sys.stderr.write("healthd: this node was left out; waiting for the job to end\n")
            sys.stderr.flush()
        sidecar.wait()
    except BaseException:
        with signals.deferred():
            if sidecar is not None:
                _end(sidecar)
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return outcome.code if outcome.kind == "park" else outcome.code or NOT_ADMITTED


def environment_of(place: Place, outcome: Outcome, environ: Mapping[str, str]) -> dict[str, str]:
    """The command's environment: its number among the admitted, and the launcher's own variables to match."""
    environment = dict(environ)
    rank, size, main = outcome.rank or 0, outcome.size or 1, outcome.main or place.main
    environment.update(HEALTHD_RANK=str(rank), HEALTHD_NNODES=str(size), HEALTHD_MAIN=main)
    if place.renumber is not None:
        environment.update(place.renumber(environ, rank=rank, size=size, main=main))
    environment["HEALTHD_HOSTFILE"] = str(write_hostfile(outcome.hosts))
    return environment


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """
    What the hook is to do: `run` the command as number `rank` of `size` with `main` and `hosts`, `park` until the
    sidecar ends, or `exit` with `code`. `decision` is shown. `run` is told twice: first to print the decision and write
    the host file, and then, when all have confirmed that, to start.
    """

    kind: str
    code: int
    rank: int | None = None
    size: int | None = None
    main: str | None = None
    hosts: tuple[str, ...] = ()
    decision: Decision | None = None
    message: str = ""
    aggregator: str = ""
    """The URL of the gate's aggregator, for who tells it of the job's end."""
    hosts_of: Mapping[str, str] = field(default_factory=dict)
    """The hosts of the ranks that the decision or the message names, as far as they are known; for people."""


def write_hostfile(hosts: tuple[str, ...], *, folder: Path | None = None) -> Path:
    """
    The admitted, one a line, in a file named by this process, which is about to become the command.

    Nobody can remove it when the command ends, so those of processes that are gone are removed here. A folder may be
    shared by hosts and by containers, in which the same number is another process: their files stay.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"healthd-hosts-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or folder.is_symlink():
            folder = Path(tempfile.mkdtemp(prefix="healthd-hosts-"))
        here = f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-".replace("/", "_")
        for old in folder.iterdir():
            match = _PID_FILE.fullmatch(old.name)
            if match and match[1] == here and not Path(f"/proc/{match[2]}").exists():
                with contextlib.suppress(FileNotFoundError):
                    old.unlink()
        file = folder / f"{here}{os.getpid()}.txt"
        file.write_text("".join(f"{printable_line(host)}\n" for host in hosts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: the host file cannot be written: {error.strerror}; set TMPDIR") from None
    return file


@dataclass(frozen=True, kw_only=True)
class Start:
    """The command that the hook is to become, with its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    aggregator: str = ""


def _start_sidecar(sidecar_arguments: Sequence[str], told: str, descriptor: int) -> subprocess.Popen[bytes]:
    """It is in a process group of its own: Ctrl-C is for the hook, whose end it sees."""
    return subprocess.Popen(
        # -P: the working directory is the job's, and a module of its name must not come before ours.
        [sys.executable, "-P", "-m", "healthd", "preflight", "--sidecar", told, *sidecar_arguments],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


def _read_outcome(words: IO[bytes], sidecar: subprocess.Popen[bytes]) -> Outcome:
    line = b""
    with contextlib.suppress(ConnectionResetError):  # it ended without reading what it was told
        line = words.readline()
    if not line:
        sidecar.wait()
        raise HealthdError("the sidecar of this node exited without a result; not admitted")
    return wire.decode(line, Outcome, what="the sidecar's result")


def _end(sidecar: subprocess.Popen[bytes]) -> None:
    """
    Have the sidecar take back what it has acknowledged and end, within seconds.

    It would see the end of the hook by itself, but not where that is the first process of a container.
    """
    sidecar.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        sidecar.wait(END_SECONDS)


def _make_folder() -> Path:
    """In /tmp where a socket in one of the usual place would have too long a name for the kernel (107 bytes)."""
    try:
        usual = tempfile.gettempdir()
        where = usual if len(os.fsencode(usual)) <= FOLDER_BYTES else "/tmp"
        return Path(tempfile.mkdtemp(prefix="healthd-preflight-", dir=where))
    except OSError as error:
        text = f"no temporary folder can be created: {error.strerror}; set TMPDIR to a writable folder"
        raise ConfigError(text) from None


def _open_standard_files() -> None:
    """A launcher may close them: then the next file that is opened would be taken for one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(number, True)
