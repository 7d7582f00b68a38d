"""
Runs this node's part in a group that nccom-test runs over: the first of its nodes, the main node, runs nccom-test.

The main node runs one nccom-test for each check and judges its output. Its launcher (mpirun by ssh, or srun) starts the
processes of the other nodes; healthd starts nothing there, and holds the devices until the order ends. However the
order ends, no process of it is left on the main node.

Unverified on hardware: that the real nccom-test passes its environment on to mpirun and srun. Proved with Open MPI
4.1.4 and stand-ins for nccom-test, ssh and srun.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checks.collective.nccom.launch import MPI_PREFIX, OverNodes, plan_over_nodes, step_over_nodes
from checks.collective.nccom.run import (
    FOLDER_PREFIX,
    Abilities,
    Ran,
    Step,
    environment_of,
    find_tool,
    free_ports,
    learn_abilities,
    log_path,
    read_log,
)
from checks.collective.nccom.steps import judge_step
from checks.contract import Finding, Limit, Status
from checks.host import guard
from checks.host.machine import Host, HostError
from healthd.core.model import CollectiveOrder, NccomGroup
from healthd.runner.collective.ranks import RefusedError

_MAX_OUTPUT_BYTES = 1 << 20
_LEAST_SECONDS = 1.0
# The guard ends what is left at once, but for what the kernel holds.
_END_SECONDS = 3.0
_PASSING = (Status.PASS, Status.WARN)


@dataclass(frozen=True, kw_only=True)
class RoundProgress:
    """The progress of a round: see `OrderReport`."""

    message: str = ""
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """What rounds on this node need."""

    node: str
    """The name of this node in the fleet."""
    host: Host
    limits: Mapping[str, Limit]
    lnc: Callable[[], int | None] = lambda: None
    """The logical core configuration of the node's cores by the last survey; None where it is not known."""


OnProgress = Callable[[RoundProgress], None]


class NccomRound:
    """The round of one order; `run` is called once."""

    def __init__(
        self, order: CollectiveOrder, settings: RoundSettings, on_progress: OnProgress, *, seconds: float
    ) -> None:
        """`seconds` is the time that is left to the order. `on_progress` gets the check under way and the findings."""
        self._order = order
        self._settings = settings
        self._on_progress = on_progress
        self._deadline = time.monotonic() + seconds

    async def run(self) -> RoundProgress:
        """Run to the end of the group, as far as this node sees it. Raises RefusedError; no process is left."""
        order, nccom = self._order, self._order.nccom
        if nccom is None:
            raise RefusedError("it is not an order for nccom-test")
        node = own_node(order, nccom)
        if node is None or node != self._settings.node:
            raise RefusedError(
                f"group {order.group}: the order is for {node or 'no node'}, but this is {self._settings.node}"
            )
        if not order.checks:
            raise RefusedError("it names no check")
        if node == nccom.nodes[0]:
            return RoundProgress(findings=await self._run_checks(nccom))
        # The aggregator withdraws the order when the main node has ended, which cancels this.
        await asyncio.sleep(max(0.0, self._deadline - time.monotonic()))
        return RoundProgress(message="was still waiting for the main node when the order's time was over")

    async def _run_checks(self, nccom: NccomGroup) -> dict[str, tuple[Finding, ...]]:
        """The findings of each check up to the first that did not pass."""
        order, host = self._order, self._settings.host
        found: dict[str, tuple[Finding, ...]] = {}
        try:
            program = find_tool(host)
            abilities = await asyncio.to_thread(learn_abilities, host, program)
        except HostError as error:
            return {order.checks[0]: (_unknown(error.reason, str(error)),)}
        for check in order.checks:
            self._on_progress(RoundProgress(message=check, findings=dict(found)))
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # no other user can read it
            try:
                found[check] = await self._run_check(check, nccom, program, abilities, folder)
            except ValueError as error:
                found[check] = (_unknown("CheckError", f"{check} over {len(nccom.hosts)} nodes: {error}"),)
            except OSError as error:
                text = f"{check} over {len(nccom.hosts)} nodes cannot be started: {error.strerror or error}"
                found[check] = (_unknown("StartFailed", text),)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            self._on_progress(RoundProgress(message=check, findings=dict(found)))
            if any(one.status not in _PASSING for one in found[check]):
                break
        return found

    async def _run_check(
        self, check: str, nccom: NccomGroup, program: str, abilities: Abilities, folder: Path
    ) -> tuple[Finding, ...]:
        """One process of nccom-test, judged. Raises ValueError for an order that makes no sense, and OSError."""
        order = self._order
        whole = order.join_seconds + order.timeout_seconds
        seconds = min(whole, self._deadline - time.monotonic())
        if seconds < _LEAST_SECONDS:
            return (_unknown("Timeout", f"{check} was not run: the order's time was over"),)
        step = step_over_nodes(check, order.size)
        plan = plan_over_nodes(
            mode=nccom.mode,
            hosts=nccom.hosts,
            main=order.main,
            step=step,
            abilities=abilities,
            report=str(folder / "report.json"),
            comm_port=order.port,
            collector_port=free_ports(1)[0],
            kernel=os.uname().release,
            slurm_job_id=_slurm_job(order.workload),
            lnc=self._settings.lnc(),
        )
        environment = _environment(plan, nccom, program, folder)
        if shutil.which(plan.launcher, path=environment["PATH"]) is None:
            text = f"{check} needs {plan.launcher}, which is not in PATH or {MPI_PREFIX}/bin; install it, or set "
            return (_unknown("MissingTool", f"{text}nccom_launch of [policy] to off"),)
        ran = await self._run_step([program, *plan.argv], environment, step, folder, seconds)
        checked = bool(abilities.check)
        limits = self._settings.limits
        return tuple(judge_step(check, ran, limits, checked=checked, cut_short=seconds < whole, deep=False)) or (
            _unknown("NoData", f"{check} ended without a finding"),
        )

    async def _run_step(
        self, argv: Sequence[str], environment: Mapping[str, str], step: Step, folder: Path, seconds: float
    ) -> Ran:
        began = time.monotonic()
        code = await _run_guarded(argv, environment, folder, seconds)
        output = _read_text(folder / "output")
        named = log_path(output)
        return Ran(
            step=step,
            returncode=code,
            output=output,
            report=_read_text(folder / "report.json") or None,
            log=named,
            log_text=read_log(self._settings.host, named),
            seconds=time.monotonic() - began,
            timeout_seconds=seconds,
        )


def own_node(order: CollectiveOrder, nccom: NccomGroup) -> str | None:
    """Which of the nodes an order is for; None where that makes no sense."""
    index, rest = divmod(order.first_rank, order.ranks) if order.ranks > 0 else (-1, 0)
    whole = order.size == order.ranks * len(nccom.nodes) and len(nccom.nodes) == len(nccom.hosts)
    return nccom.nodes[index] if whole and not rest and 0 <= index < len(nccom.nodes) else None


def _environment(plan: OverNodes, nccom: NccomGroup, program: str, folder: Path) -> dict[str, str]:
    """
    HOME is the round's own: nccom-test would take hosts from a file in it, and Open MPI its parameters. ssh does not
    look there: it finds the keys of the daemon's user by the system's list of users.
    """
    places = (os.path.dirname(program), f"{MPI_PREFIX}/bin", os.environ.get("PATH", os.defpath))
    found = {
        **plan.environment,
        "PATH": os.pathsep.join((*places, "/opt/aws/neuron/bin")),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C",
    }
    if nccom.mode == "slurm":
        # A group is a part of the job's nodes: without a list srun would take any of them.
        names = folder / "nodes"
        names.write_text("".join(f"{name}\n" for name in nccom.hosts))
        found |= {"SLURM_HOSTFILE": str(names), "SLURM_DISTRIBUTION": "arbitrary"}
    return found


async def _run_guarded(argv: Sequence[str], environment: Mapping[str, str], folder: Path, seconds: float) -> int | None:
    """
    Run a program under the guard; the exit code as a shell says it (127: it could not be started), or None when it did
    not end in time. What it prints goes to the file `output` of its folder: the end of a pipe that a grandchild holds
    is never waited for. Returns, also when cancelled, when nothing of it is left or known to be stuck in the kernel.

    Call it in the main thread: the guard ends with the thread that started it. OSError when nothing can be started.
    """
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "-1", str(folder), "--", *argv]
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment_of(os.environ, environment),
            cwd=folder,
            start_new_session=True,
        )
    finally:
        os.close(output)
    try:
        code = await _ended(process, seconds)
        return 128 - code if code is not None and code < 0 else code
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if await _ended(process, _END_SECONDS) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _ended(process, _END_SECONDS)


async def _ended(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The exit code; None when it does not end in time."""
    try:
        async with asyncio.timeout(seconds):
            return await process.wait()
    except TimeoutError:
        return None


def _read_text(path: Path) -> str:
    """The first megabyte of a file of ours; empty where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _unknown(reason: str, text: str) -> Finding:
    return Finding(status=Status.UNKNOWN, reason=reason, message=" ".join(text.split()), target="node")


def _slurm_job(workload: str | None) -> int | None:
    """`slurm:123`; None for what is no job of Slurm."""
    kind, _, number = (workload or "").partition(":")
    return int(number) if kind == "slurm" and number.isdecimal() and len(number) < 16 else None
