"""
Running nccom-test: find it, learn what it can, and run one step of a plan within its time. Nothing is judged here.

Unverified on hardware: that nccom-test runs with a HOME and a working directory of its own, and that nothing of it
survives the end of its process group.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checks.collective.nccom.environment import FOLDER_PREFIX, environment_of
from checks.collective.nccom.plan import Step, arguments, environment
from checks.collective.nccom.report import Abilities, log_path, read_help
from checks.host.machine import Completed, Host, HostError

PROGRAM = "nccom-test"
REMEDY = "install the package aws-neuronx-tools, or leave the nccom checks out (disable)"
HELP_SECONDS = 30.0
_MAX_LOG_BYTES = 1 << 20
_MAX_REPORT_BYTES = 1 << 20
_TAIL_LINES, _TAIL_CHARACTERS = 4, 400

_learned: dict[tuple[str, int], Abilities] = {}  # by path and time of change: a process serves one installation


@dataclass(frozen=True, kw_only=True)
class Ran:
    """
    How a step ended. `returncode` None: it did not end in `timeout_seconds` and was killed.

    `output` is what it printed on both streams; `report` the text of its JSON report; `log` the path of the log that
    it named and `log_text` its text. None: there is none.
    """

    step: Step
    returncode: int | None
    output: str
    report: str | None
    log: str | None
    log_text: str | None
    seconds: float
    timeout_seconds: float

    @property
    def tail(self) -> str | None:
        """The last words of the log; None where there are none."""
        return last_lines(self.log_text or "") or None

    @property
    def words(self) -> str:
        """All that was said, on the streams and in the log."""
        return f"{self.output}\n{self.log_text or ''}"


def find_tool(host: Host) -> str:
    """The path of nccom-test. HostError MissingTool with the remedy."""
    try:
        return host.find_program(PROGRAM)
    except HostError as error:
        raise HostError(error.reason, f"no {PROGRAM} in PATH or /opt/aws/neuron/bin; {REMEDY}") from None


def learn_abilities(host: Host, program: str) -> Abilities:
    """What this installation can do, asked once. HostError where it cannot be asked or its answer is no help."""
    try:
        key = (program, os.stat(program).st_mtime_ns)
    except OSError as error:
        raise HostError("MissingTool", f"{program}: {error.strerror or error}; {REMEDY}") from None
    if key not in _learned:
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
            done = run_guarded(host, [program, "--help"], {"HOME": folder}, folder, HELP_SECONDS)
        found = read_help(done.stdout) or read_help(done.stderr)
        if found is None:
            words = last_lines(done.stdout + "\n" + done.stderr) or "nothing"
            raise HostError("NoData", f"{program} --help (exit code {done.returncode}) is not understood: {words}")
        _learned[key] = found
    return _learned[key]


def run_step(
    host: Host,
    program: str,
    step: Step,
    abilities: Abilities,
    *,
    core_ids: Sequence[int] | None,
    lnc: int | None,
    timeout_seconds: float,
) -> Ran:
    """
    Run one step in a folder of its own, which is removed with what the tool left in it (dumps of tensors).

    HostError where it cannot be started.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        report = os.path.join(folder, "report.json")
        ports = free_ports(2)
        words = arguments(step, abilities, report=report, port=ports[1])
        needed = environment(core_ids, comm_port=ports[0], folder=folder, lnc=lnc)
        code: int | None
        try:
            done = run_guarded(host, [program, *words], needed, folder, timeout_seconds)
            code, output = done.returncode, f"{done.stdout}\n{done.stderr}"
        except HostError as error:
            if error.reason != "Timeout":
                raise
            code, output = None, error.output
        text = _read_report(report)
    log = log_path(output)
    return Ran(
        step=step,
        returncode=code,
        output=output,
        report=text,
        log=log,
        log_text=read_log(host, log),
        seconds=time.monotonic() - began,
        timeout_seconds=timeout_seconds,
    )


def free_ports(count: int) -> list[int]:
    """
    TCP ports that are free on the loopback now, each another.

    Somebody else may take one before it is used: the run then fails and is told as it is.
    """
    held = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def last_lines(text: str) -> str:
    """The last words of a program or a log as one bounded line."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


def run_guarded(
    host: Host, argv: Sequence[str], given: Mapping[str, str], folder: str, timeout_seconds: float
) -> Completed:
    """In its folder, with an environment of its own. The exit code is as a shell would say it."""
    # The tool starts neuron-bench by PATH, where services have no /opt/aws/neuron/bin.
    path = os.pathsep.join((os.path.dirname(argv[0]), os.environ.get("PATH", os.defpath), "/opt/aws/neuron/bin"))
    done = host.run(
        argv,
        timeout_seconds=timeout_seconds,
        folder=folder,
        environment=lambda own: environment_of(own, {"PATH": path, **given}),
    )
    return done._replace(returncode=128 - done.returncode) if done.returncode < 0 else done


def _read_report(path: str) -> str | None:
    """In our own folder, so not through the door to the machine."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_REPORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def read_log(host: Host, path: str | None) -> str | None:
    """The log of neuron-bench; it stays where it is, for people. None where there is none to be read."""
    if path is None:
        return None
    try:
        return host.read(path, max_bytes=_MAX_LOG_BYTES)
    except HostError:
        return None
