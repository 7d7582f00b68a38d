"""
Runs nccom-test on the main node of a group: one process for each check, and the socket of its mpirun's agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from checks.collective.nccom.judge import judge_step
from checks.collective.nccom.launch import MPI_PREFIX, Plan, planned
from checks.collective.nccom.plan import Step
from checks.collective.nccom.report import Abilities, log_path
from checks.collective.nccom.run import Ran, find_tool, free_ports, learn_abilities, read_log
from checks.collective.nccom.vector import Refused
from checks.contract import Finding, Limit, Status
from checks.host.machine import Host, HostError
from healthd.core.model import CollectiveOrder, Launch, NccomGroup
from healthd.core.model.launch_permission import (
    MAX_LAUNCH_CHARACTERS,
    judge,
    launch_of,
    meeting_point,
    round_of,
    step_of,
)
from healthd.node.nccom.process_tree import drop_folder, make_folder, read_text, start_tree
from healthd.node.nccom.rsh import MAX_LINE_BYTES, RshError, read_request, write_answer

log = logging.getLogger(__name__)

_LEAST_SECONDS = 1.0
_REQUEST_SECONDS = 5.0
_REMEDY = "collective_carrier of [policy] to torch"
_PASSING = (Status.PASS, Status.WARN)

Findings = dict[str, tuple[Finding, ...]]
OnNews = Callable[[tuple[Launch, ...], Mapping[str, tuple[Finding, ...]], str], None]


class MainNode:
    """The main node of one order; `run` is called once. `on_news` receives launches to be made and finished checks."""

    def __init__(
        self,
        order: CollectiveOrder,
        nccom: NccomGroup,
        host: Host,
        limits: Mapping[str, Limit],
        on_news: OnNews,
        *,
        deadline: float,
        lnc: int | None = None,
    ) -> None:
        """`deadline` is monotonic; `lnc` is the logical core configuration by which the ranks were counted."""
        self._order = order
        self._nccom = nccom
        self._host = host
        self._limits = limits
        self._on_news = on_news
        self._deadline = deadline
        self._lnc = lnc
        self._check = ""
        self._launches: list[Launch] = []
        self._refused: list[str] = []
        self._findings: Findings = {}

    async def run(self) -> Findings:
        """The findings of each check up to the first that did not pass. When cancelled, nothing is left."""
        try:
            program = find_tool(self._host)
            abilities = await asyncio.to_thread(learn_abilities, self._host, program)
        except HostError as error:
            self._findings[self._order.checks[0]] = (_unknown(error.reason, str(error)),)
            return self._findings
        for check in self._order.checks:
            self._check, self._launches, self._refused = check, [], []
            self._report()
            folder = make_folder()
            try:
                findings = await self._one(check, program, abilities, folder)
            except ValueError as error:
                findings = (_unknown("CheckError", f"{check} over {len(self._nccom.hosts)} nodes: {error}"),)
            except OSError as error:
                text = f"{check} over {len(self._nccom.hosts)} nodes cannot be started: {error.strerror or error}"
                findings = (_unknown("StartFailed", text),)
            finally:
                drop_folder(folder)
            self._findings[check] = findings
            self._launches = []
            self._report()
            if any(one.status not in _PASSING for one in findings):
                break
        return self._findings

    def _report(self) -> None:
        self._on_news(tuple(self._launches), dict(self._findings), self._check)

    async def _one(self, check: str, program: str, abilities: Abilities, folder: Path) -> tuple[Finding, ...]:
        """One process of nccom-test, judged."""
        whole = self._order.join_seconds + self._order.timeout_seconds
        seconds = min(whole, self._deadline - time.monotonic())
        if seconds < _LEAST_SECONDS:
            return (_unknown("Timeout", f"{check} was not run: the time of the order was up"),)
        step = step_of(self._order, check)
        plan = self._plan(check, step, abilities, folder)
        environment = self._environment(program, plan, folder)
        launcher = "srun" if plan.mode == "slurm" else "mpirun"
        if shutil.which(launcher, path=environment["PATH"]) is None:
            text = f"{check} needs {launcher}, which is not in PATH or {MPI_PREFIX}/bin; install it, or set {_REMEDY}"
            return (_unknown("MissingTool", text),)
        server = await self._listen(plan, folder) if plan.mode == "carried" else None
        try:
            ran = await self._run([program, *plan.argv], environment, step, folder, seconds)
        finally:
            if server is not None:
                server.close()
        if self._refused:
            text = f"{check} over {len(self._nccom.hosts)} nodes: mpirun wanted to start what was not planned: "
            return (_unknown("LaunchRefused", text + self._refused[0]),)
        checked = bool(abilities.check)
        return tuple(judge_step(check, ran, self._limits, checked=checked, cut_short=seconds < whole, deep=False)) or (
            _unknown("NoData", f"{check} ended without a finding"),
        )

    async def _run(
        self, argv: Sequence[str], environment: Mapping[str, str], step: Step, folder: Path, seconds: float
    ) -> Ran:
        """Whatever comes of it, it has ended with all its processes."""
        began = time.monotonic()
        tree = await start_tree(argv, environment, folder, "output")
        try:
            code = await tree.wait(seconds)
        finally:
            await tree.end()
        output = tree.output()
        named = log_path(output)
        report = read_text(folder / "report.json")
        return Ran(
            step=step,
            returncode=code,
            output=output,
            report=report or None,
            log=named,
            log_text=read_log(self._host, named),
            seconds=time.monotonic() - began,
            timeout_seconds=seconds,
        )

    # --- what is run --------------------------------------------------------------------------------------------------

    def _plan(self, check: str, step: Step, abilities: Abilities, folder: Path) -> Plan:
        """Raises ValueError for what cannot be meant."""
        return planned(
            name=round_of(self._order, check),
            mode=self._nccom.mode,
            hosts=self._nccom.hosts,
            main_addresses=(self._order.main,),
            step=step,
            abilities=abilities,
            report=str(folder / "report.json"),
            comm_port=self._order.port,
            collector_port=free_ports(1)[0],
            kernel=os.uname().release,
            # A console script may lie anywhere; the interpreter knows where its own modules are.
            agent=f"{sys.executable} -P -m healthd.node.nccom.rsh",
            socket=str(folder / "rsh.sock"),
            slurm_job_id=_slurm_job(self._order.workload),
            lnc=self._lnc,
        )

    def _environment(self, program: str, plan: Plan, folder: Path) -> dict[str, str]:
        """HOME is the round's own: nccom-test would take hosts from a file in it, and Open MPI its parameters."""
        places = (os.path.dirname(program), f"{MPI_PREFIX}/bin", os.environ.get("PATH", os.defpath))
        found = {
            **plan.environment,
            "NEURON_RT_ROOT_COMM_ID": meeting_point(self._order),
            "PATH": os.pathsep.join((*places, "/opt/aws/neuron/bin")),
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LC_ALL": "C",
        }
        if plan.mode == "slurm":
            # A group is a part of the job's nodes: without a list srun would take any of them.
            names = folder / "nodes"
            names.write_text("".join(f"{name}\n" for name in self._nccom.hosts))
            found |= {"SLURM_HOSTFILE": str(names), "SLURM_DISTRIBUTION": "arbitrary"}
        return found

    # --- the agent ----------------------------------------------------------------------------------------------------

    async def _listen(self, plan: Plan, folder: Path) -> asyncio.Server:
        """The socket of this round, in a folder that no other user can read."""
        path = folder / "rsh.sock"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                try:
                    writer.write(await self._answer(plan, reader))
                    await writer.drain()
                finally:
                    writer.close()

        server = await asyncio.start_unix_server(serve, path, limit=MAX_LINE_BYTES)
        path.chmod(0o600)
        return server

    async def _answer(self, plan: Plan, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                request = read_request(await reader.readline())
        except (RshError, ValueError, TimeoutError) as error:  # ValueError: a line that is too long
            return write_answer(1, f"no request: {error or 'it did not come in time'}")
        if request.round != plan.round:
            return write_answer(1, f"round {request.round[:64]!r} is not under way")
        launch = launch_of(self._order, self._check, request.argv)
        found = launch if isinstance(launch, Refused) else judge(self._order, launch, self._launches)
        if isinstance(launch, Refused) or isinstance(found, Refused):
            return self._refuse(found.reason if isinstance(found, Refused) else "")
        if launch not in self._launches:
            if sum(len(word) for one in (*self._launches, launch) for word in one.argv) > MAX_LAUNCH_CHARACTERS:
                return self._refuse("too many nodes for one report; set nccom_launch of [policy] to ssh or slurm")
            self._launches.append(launch)
            self._report()
        return write_answer(0, None)

    def _refuse(self, why: str) -> bytes:
        log.warning("group %s: a launch was refused: %s", self._order.group, why)
        self._refused.append(why)
        return write_answer(1, why)


def _unknown(reason: str, text: str) -> Finding:
    return Finding(status=Status.UNKNOWN, reason=reason, message=" ".join(text.split()), target="node")


def _slurm_job(workload: str | None) -> int | None:
    """`slurm:123`; None for what is no job of Slurm."""
    kind, _, number = (workload or "").partition(":")
    return int(number) if kind == "slurm" and number.isdecimal() and len(number) < 16 else None
