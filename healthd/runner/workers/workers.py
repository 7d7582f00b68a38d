"""
Starts and sets up the worker processes of one run, and records those that could not be killed.

Also here:

- whether the kernel has lately killed a process of this host for want of memory;
- starts, reads, kills and reaps one worker process with its pipes. It knows messages, not checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from checks.accelerators import find_descriptor
from checks.contract import Missing
from checks.host.descendants import first_child
from checks.limits import floors, hardware_in, replaces
from checks.worker.protocol import HOST, LineDecoder, ProtocolError
from healthd.core.backoff import Backoff
from healthd.runner.settings import OnProgress, RunnerSettings, RunProgress
from healthd.runner.workers.launch import LOAD, Launch, command, environment, take_ahead

if TYPE_CHECKING:
    from checks.contract import Limit
    from healthd.runner.workers.fork_server import ForkServer, ForkServers

WINDOW_SECONDS = 600.0
"""A kill counts at least so long. The death that follows it may show seconds later, when the memory is given back."""

READ_BYTES = 64 * 1024
TAIL_BYTES = 64 * 1024  # of its output: the stacks of an abort follow the words that tell why
LAST_OUTPUT_CHARS = 4096  # of that, what goes into results
MAX_UNREAD_MESSAGES = 1024  # beyond it the worker has to wait until its messages are read
MAX_DRAIN_READS = 32  # of what a dead worker left in its pipe; a grandchild may still be writing
CLOSED_SECONDS = 1.0  # from the end of its results to its own end: its guard may have much to kill
FORK_SECONDS = 10.0  # for a worker of the node from the process that stays; then one is executed
_POLL_SECONDS = 0.02


class Workers:
    """The worker processes of one run."""

    def __init__(
        self,
        settings: RunnerSettings,
        unreaped: Unreaped,
        versions: dict[str, str],
        on_progress: OnProgress | None,
        servers: ForkServers | None = None,
    ) -> None:
        """`servers` None: workers are executed, none is forked."""
        self.settings = settings
        self.inventory: dict[str, Any] = {}
        """Devices and their holders, by the last survey."""
        self.identity: dict[str, Any] | None = None
        """Hardware and versions, by the last survey: see `checks.limits`."""
        self._floors: dict[str, Limit] = {}
        self.boot_id: str | None = None
        """The boot id, by the last survey."""
        self.compile: dict[str, Any] | None = None
        """What new workers are to do about compilation: see `healthd.runner.compilation`."""
        self.group: dict[str, Any] | None = None
        """The group of which new workers become ranks, where they must know it before they open their device."""
        self.device_seconds = 0.0
        """How long workers have had devices, all together."""
        self.python = str(settings.probe_python or sys.executable)
        self._unreaped = unreaped
        self._versions = versions
        self._on_progress = on_progress
        self._servers = servers
        self._server: ForkServer | None = None
        self._executes = False  # there is no server, and will be none
        self._processes: list[tuple[str, WorkerProcess]] = []
        self._prestarted: WorkerProcess | None = None
        self._unreaped_of_node = 0
        self._env = environment(self.python, settings.env, os.environ)
        self._extra_files = check_files(settings.directories)

    def prestart(self) -> WorkerProcess:
        """Start the node's worker and let it import its checks, for a later run to `adopt`. Raises OSError."""
        ahead = take_ahead(self._command(None), self._env)
        if ahead is not None:
            return WorkerProcess(ahead)
        process = self._record(None, Launch(self._command(None), self._env))
        process.send(LOAD)
        return process

    def adopt(self, process: WorkerProcess) -> None:
        """Use a prestarted worker as the first one of the node."""
        self._prestarted = process
        self._processes.append(("node", process))

    def expect_devices(self) -> None:
        """
        Begin with the import that the workers of devices share, where they can be forked.

        Call it as soon as it is likely that devices are checked: the import takes longer than all else.
        """
        if self._server is None and not self._executes:
            self._server = self._servers.take() if self._servers is not None else None
            self._executes = self._server is None

    async def spawn(self, target: str | None) -> WorkerProcess:
        """
        Start a worker for a device, or for the node (None). Raises OSError.

        It is forked where it can be, once the shared import is done.
        """
        if target is None and self._prestarted is not None:
            process, self._prestarted = self._prestarted, None
            return process
        if target is None:
            if (forked := await self._fork_for_node()) is not None:
                return forked
        else:
            self.expect_devices()
            if self._server is not None:
                accelerator = self.inventory.get("accelerator")
                forked = await self._server.fork(accelerator, lambda made: self._record(target, made))
                if forked is not None:
                    return forked
        return self._record(target, Launch(self._command(target), self._env))

    async def _fork_for_node(self) -> WorkerProcess | None:
        """A worker of the node from the process that stays; None where there is none, or it does not answer in time."""
        host = self._servers.host(alone=self._alone) if self._servers is not None else None
        if host is None or self._servers is None:
            return None
        try:
            async with asyncio.timeout(FORK_SECONDS):
                return await host.fork(HOST, lambda made: self._record(None, made))
        except TimeoutError:
            self._servers.drop_host()
            return None

    def _record(self, target: str | None, launched: Launched) -> WorkerProcess:
        process = WorkerProcess(launched)
        self._processes = [(name, other) for name, other in self._processes if not other.reaped.is_set()]
        self._processes.append((target or "node", process))
        return process

    def _command(self, target: str | None) -> list[str]:
        return command(self.python, alone=target is None and self._alone)

    @property
    def _alone(self) -> bool:
        return not (self.settings.third_party or self.settings.directories)  # others alone may need site-packages

    def note_survey(self, answer: Mapping[str, Any]) -> None:
        """Use this answer to a survey for the setup of new workers."""
        self.inventory = {**answer["inventory"], "holders": answer["holders"]}
        self.identity = {
            "hardware": hardware_in(answer["instance_type"], answer["inventory"]),
            "accelerator": answer["inventory"]["accelerator"],
            "versions": answer["versions"],
        }
        self.boot_id = answer["boot_id"]
        if self.settings.floors:
            self._floors = {
                name: limit
                for name, limit in floors(answer["instance_type"], self.inventory).items()
                if not any(replaces(other, name) for other in self.settings.limits)
            }

    def setup(self, target: str | None) -> dict[str, Any]:
        """The members of a worker's first command."""
        settings = self.settings
        options = {**settings.options, "ignore_pids": [os.getpid(), *settings.options.get("ignore_pids", ())]}
        if settings.run_dir is not None:
            options["run_dir"] = str(settings.run_dir)
        if self.group is not None:
            options["group"] = self.group
        return {
            "host_root": str(settings.host_root) if settings.host_root else None,
            "target": target,
            "accelerator": self.inventory.get("accelerator") or settings.accelerator,
            "inventory": self.inventory,
            "compile": self.compile if target is not None else None,
            "options": options,
            "limits": {name: dataclasses.asdict(limit) for name, limit in settings.limits.items()},
            "floors": {name: dataclasses.asdict(limit) for name, limit in self._floors.items()},
            "learned": [dataclasses.asdict(one) for one in settings.baselines],
            "identity": self.identity if target is not None else None,
            "extra_files": self._extra_files,
            "third_party": list(settings.third_party),
            "programs": {name: dataclasses.asdict(program) for name, program in settings.programs.items()},
        }

    def note_versions(self, versions: object) -> None:
        """Record the versions of a worker's libraries."""
        if isinstance(versions, dict):
            self._versions.update({str(k)[:64]: str(v)[:64] for k, v in list(versions.items())[:32]})

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that workers have reported, by name."""
        return self._versions

    def machine(self) -> str | None:
        """Hardware and versions of this run, as far as they decide bits; None where one of them is not known."""
        identity = self.identity or {}
        described = find_descriptor(identity.get("accelerator"))
        hardware = identity.get("hardware")
        if described is None or not hardware:
            return None
        versions = {**self._versions, **identity["versions"]}
        matter = described.speed_versions
        # A part of the others may not be installed; a driver is always there.
        if any(name not in versions for name in matter if name == matter[0] or name.endswith("_driver")):
            return None
        return ", ".join(
            (str(hardware)[:120], described.name, *(f"{name} {versions.get(name, 'none')}" for name in matter))
        )

    def report_progress(self, event: RunProgress) -> None:
        """Pass a sign of progress to the listener."""
        if self._on_progress is not None:
            self._on_progress(event)

    async def back_off(self, attempt: int) -> None:
        """Wait before another attempt at something transient."""
        await asyncio.sleep(Backoff(self.settings.retry_backoff_seconds, 10.0).after(attempt))

    def stuck(self, target: str) -> Missing | None:
        """Why no worker can be started for a target: a killed one is still there. None when one can."""
        # A worker of several devices (`xla:0,xla:1`) holds each of them.
        process = next((found for one in target.split(",") if (found := self._unreaped.reap(one)) is not None), None)
        if process is None and not (target == "node" and self._unreaped_of_node > 1):
            return None
        who = f"pid {process.worker_pid}" if process is not None else "more than one"
        text = f"a killed probe ({who}) does not exit: the kernel or the device's driver blocks it; reboot the node"
        return Missing(target=target, reason="Stuck", message=text)

    def add_unreaped(self, key: str, process: WorkerProcess) -> None:
        """Record a worker that was killed and is still there."""
        process.close_pipes()
        self._unreaped_of_node += key.startswith("node/")
        for one in key.split(","):
            self._unreaped.add(one, process)

    async def end_server(self) -> None:
        """No device needs another worker."""
        self._executes = True
        if self._server is not None and self._servers is not None:
            server, self._server = self._server, None
            await self._servers.give_back(server)

    async def kill_all(self) -> None:
        """Kill all workers and wait until they are reaped; those that are not in time are recorded as unreaped."""
        for _, process in self._processes:
            process.kill()
        await self.end_server()  # a worker that it was just making is known from then on
        if self._servers is not None:
            await self._servers.settle_host()
        for _, process in self._processes:
            process.kill()
        left = [(name, process) for name, process in self._processes if process not in self._unreaped]
        deadline = time.monotonic() + self.settings.kill_grace_seconds
        for name, process in left:
            if not await process.wait_gone(max(0.0, deadline - time.monotonic())) and name != "node":
                self.add_unreaped(name, process)


class Unreaped:
    """Killed workers that the kernel still holds, by device target or `node/CHECK`. Lives as long as the runner."""

    def __init__(self) -> None:
        self._by_key: dict[str, WorkerProcess] = {}

    def add(self, key: str, process: WorkerProcess) -> None:
        self._by_key[key] = process

    def reap(self, key: str) -> WorkerProcess | None:
        """Try to reap the one with this key; returns it when it is still there."""
        process = self._by_key.get(key)
        if process is not None and process.is_gone():
            del self._by_key[key]
            return None
        return process

    def __contains__(self, process: object) -> bool:
        return any(process is other for other in self._by_key.values())

    def keys(self) -> tuple[str, ...]:
        """The keys of those that are still there."""
        return tuple(key for key in list(self._by_key) if self.reap(key) is not None)


class WorkerProcess:
    """
    A worker under the guard (`checks.host.guard`) that leads its session and kills everything that it started.

    Must be created in the main thread while a loop runs there: the worker dies with the thread that started it.
    """

    def __init__(self, launched: Launched, *, oom_kills: Callable[[], int | None] | None = None) -> None:
        """`oom_kills` says how many processes the kernel has killed for want of memory; None: it is asked."""
        self._oom_kills = OomKills(oom_kills or read_oom_kills)
        self._loop = asyncio.get_running_loop()
        self.started = launched.started
        self._process, self._results = launched.process, launched.results
        self.pid = self._process.pid
        """The pid of the guard."""
        self.last_event_at = 0.0
        """When a message of it was last read (monotonic)."""
        self.reaped = asyncio.Event()
        self._worker_pid: int | None = None
        self._events: deque[Event] = deque()
        self._new_event = asyncio.Event()
        self._decoder = LineDecoder()
        self._unsent = bytearray()
        self._output_tail = bytearray()
        self._ended = False
        self._killed = False
        self._stdin = _descriptor(self._process.stdin)
        self._output = _descriptor(self._process.stdout)
        for descriptor in (self._stdin, self._output, self._results):
            os.set_blocking(descriptor, False)
        self._reading = True
        self._loop.add_reader(self._results, self._read_results)
        self._loop.add_reader(self._output, self._read_output)
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._on_death)
        except OSError:  # a kernel or a sandbox without pidfd
            self._loop.call_later(_POLL_SECONDS, self._poll)

    @property
    def worker_pid(self) -> int:
        """The process that runs the checks, the guard's first child; the guard's own pid where there is none."""
        found = first_child(self.pid, self._worker_pid)
        self._worker_pid = None if found == self.pid else found
        return found

    # --- commands and events ------------------------------------------------------------------------------------------

    def send(self, lines: bytes) -> None:
        """Send command lines; never blocks. What a dead worker does not read is lost, and its last event says why."""
        self._oom_kills.mark()
        self._unsent += lines
        if len(self._unsent) == len(lines):  # else it goes on when the worker has read
            self._write()

    def _write(self) -> None:
        if self._stdin < 0:
            self._unsent.clear()
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self._stdin, self._unsent[:READ_BYTES])]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._write)
            return
        except OSError:  # it is dead, or has closed its input; its last event reports that
            self._unsent.clear()
        self._loop.remove_writer(self._stdin)

    async def next_event(self) -> Event:
        """The next message, or how it ended; the end is repeated for ever."""
        while not self._events:
            self._new_event.clear()
            await self._new_event.wait()
        event = self._events[0]
        if not isinstance(event, Ended):
            self._events.popleft()
            self.last_event_at = time.monotonic()
            if not self._reading and not self._ended and len(self._events) < MAX_UNREAD_MESSAGES // 2:
                self._reading = True
                self._loop.add_reader(self._results, self._read_results)
        return event

    def last_output(self) -> str:
        """The end of what it wrote to its standard output and error, short enough for a result."""
        return self.tail()[-LAST_OUTPUT_CHARS:].strip()

    def tail(self) -> str:
        """The end of its output, long enough to find why it ended."""
        self._read_output()
        return self._output_tail.decode(errors="replace").strip()

    def _read_results(self) -> None:
        if self._ended or self._results < 0:
            return
        try:
            data = os.read(self._results, READ_BYTES)
            if not data:
                # Usually it has ended and the pidfd says so at once, with the signal. If not, it closed its results.
                self._stop_reading()
                self._loop.call_later(CLOSED_SECONDS, self._end, "Garbage", "closed its results but kept running")
            for message in self._decoder.feed(data):
                self._events.append(message)
                self._new_event.set()
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._end("Garbage", str(error))
        except OSError as error:
            self._end("Garbage", f"its results cannot be read: {error}")
        if len(self._events) >= MAX_UNREAD_MESSAGES:
            self._stop_reading()

    def _stop_reading(self) -> None:
        self._reading = False
        if self._results >= 0:
            self._loop.remove_reader(self._results)

    def _read_output(self) -> None:
        if self._output < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, READ_BYTES)
            if not data:
                self._loop.remove_reader(self._output)
                return
            self._output_tail += data
            del self._output_tail[:-TAIL_BYTES]

    def _end(self, reason: str, message: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._stop_reading()
        self._events.append(Ended(reason, message))
        self._new_event.set()

    # --- its end ------------------------------------------------------------------------------------------------------

    def _on_death(self) -> None:
        """The process has ended: read what it still wrote, kill its process group, and reap it."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for _ in range(MAX_DRAIN_READS):
            if self._ended or not self._reading:
                break
            self._read_results()
        self._read_output()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before it is reaped: the number cannot be used again until then
        code = self._process.poll()
        if code == -signal.SIGKILL and not self._killed and self._oom_kills.have_grown():
            self._end("CannotAllocate", f"{_how(code)} when memory ran out")
        self._end("Crashed", "killed" if self._killed else _how(code))
        self.close_pipes()
        self._reap()

    def _reap(self) -> None:
        if self._process.poll() is None:  # it has ended, and a tracer or the driver of a device still holds it
            self._loop.call_later(_POLL_SECONDS * 10, self._reap)
        else:
            self.reaped.set()

    def _poll(self) -> None:
        """Without a pidfd: look, without reaping, whether it has ended."""
        if self.reaped.is_set():
            return
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            ended = True
        if ended:
            self._on_death()
        else:
            self._loop.call_later(_POLL_SECONDS, self._poll)

    def kill(self) -> None:
        """Have its guard kill it and everything that it started, without waiting."""
        self._killed = True
        self._end("Crashed", "killed")
        if not self.reaped.is_set():
            for number in (signal.SIGTERM, signal.SIGCONT):  # a check may have stopped the guard
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, number)

    def is_gone(self) -> bool:
        """Try to reap it; returns whether that is done."""
        return self._process.poll() is not None

    async def wait_gone(self, within_seconds: float) -> bool:
        """Whether it is reaped within that time."""
        try:
            async with asyncio.timeout(within_seconds):
                await self.reaped.wait()
        except TimeoutError:
            return False
        return True

    async def retire(self, within_seconds: float) -> bool:
        """Close its input, which ends it; kill it when that does not help. Returns whether it is reaped."""
        self._close_stdin()
        if not self._ended and await self.wait_gone(1.0):
            return True
        self.kill()
        return await self.wait_gone(within_seconds)

    def _close_stdin(self) -> None:
        if self._stdin >= 0 and self._process.stdin is not None:
            self._loop.remove_writer(self._stdin)
            self._stdin = -1
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close_pipes(self) -> None:
        """Close our ends of its pipes: nothing more is read from it."""
        self._close_stdin()
        if self._output >= 0 and self._process.stdout is not None:
            self._loop.remove_reader(self._output)
            self._output = -1
            self._process.stdout.close()
        if self._results >= 0:
            self._loop.remove_reader(self._results)
            os.close(self._results)
            self._results = -1


class OomKills:
    """
    Compares the kernel's count with that of the time before the last window; a worker may live for days.

    `read` says the count; None where the kernel does not say. `clock` in seconds.
    """

    def __init__(self, read: Callable[[], int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._before = self._later = read()
        self._later_at = clock()

    def mark(self) -> None:
        """Let go what was longer ago than two windows: called whenever the worker is told to work."""
        now = self._clock()
        if now - self._later_at >= WINDOW_SECONDS and (count := self._read()) is not None:
            self._before, self._later, self._later_at = self._later, count, now

    def have_grown(self) -> bool:
        """Whether one was killed lately; False where the kernel does not say."""
        now = self._read()
        return self._before is not None and now is not None and now > self._before


def read_oom_kills() -> int | None:
    """How many processes of this host the kernel has killed for want of memory; None where it does not say (< 4.13)."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return None


@dataclass(frozen=True)
class Ended:
    """
    The last event of a worker. `reason` is Crashed, CannotAllocate or Garbage; `message` says in a few words how it
    ended.
    """

    reason: str
    message: str


class Launched(Protocol):
    """A worker that was executed (`Launch`) or forked (`Forked`), and our end of the pipe of its results."""

    started: float
    results: int

    @property
    def process(self) -> Child: ...


class Child(Protocol):
    """A child of this process, as `Popen` has it."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, once it is reaped; None as long as it runs."""


def probed_devices(inventory: Mapping[str, Any]) -> tuple[str, ...]:
    """The devices that the workers measure: those that are workers' targets, or whose cores are."""
    targets = set(worker_targets(inventory))
    cores = {target.rpartition(":")[2] for target in targets}
    found = []
    for device in inventory.get("devices") or ():
        own = {str(core) for core in device.get("core_ids") or ()}
        if device["target"] in targets or (own and own <= cores):
            found.append(str(device["target"]))
    return tuple(found)


def worker_targets(inventory: Mapping[str, Any]) -> list[str]:
    """
    The targets that get a worker each, and become ranks: those that the inventory names, else its devices.

    Empty where there are devices and it is not known how to assign them to workers.
    """
    named = inventory.get("workers")
    found = [device["target"] for device in inventory.get("devices") or ()] if named is None else named
    return [str(target) for target in found]


def check_files(directories: tuple[Path, ...]) -> list[str]:
    """The check files of an operator, sorted; the worker reports a directory that cannot be read."""
    found: list[str] = []
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            found.append(str(directory.absolute()))
            continue
        found.extend(
            str(directory.absolute() / name) for name in names if name.endswith(".py") and not name.startswith("_")
        )
    return found


def _descriptor(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise OSError("a pipe of the worker could not be created")
    return pipe.fileno()


def _how(code: int | None) -> str:
    if code is None:
        return "ended but cannot be reaped"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with code {code} in the middle"


Event = dict[str, Any] | Ended
