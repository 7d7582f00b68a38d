"""
The sidecar: completes the gate beside the hook, instructs the hook, and stays as long as other nodes need it.

Also here:

- the aggregator of one preflight: a child of the main node's sidecar, in memory, gone with the gate;
- the ranks of a preflight find the main node, and see that all were started alike, before any asks the gate;
- the two-step end of a preflight from the side of one rank: see `healthd.aggregator.gate.rendezvous`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from healthd.aggregator.engine import MOST_ASKED, RollCallAnswer
from healthd.core import wire
from healthd.core.errors import HealthdError, UnreachableError
from healthd.core.http.client import BAD_REQUEST, HOLD_SECONDS, NO_TOKEN, WRONG_TOKEN, Endpoint, RefusedError
from healthd.core.http.client import USAGE as REFUSED_FOR_GOOD
from healthd.core.http.gates import GateClient
from healthd.core.model import Decision, GateTerm, HandshakeAnswer, HandshakeEvent, Verdict
from healthd.core.node_name import NO_NAMES, can_name
from healthd.core.tasks import OnEnd, Tasks
from healthd.core.threads import in_thread
from healthd.hooks.member import GateLine, check_node
from healthd.hooks.preflight.hook import (
    IMPOSSIBLE,
    NOT_ADMITTED,
    USAGE,
    Outcome,
    Plain,
    Task,
    node_name,
    ranks_in,
    with_hosts,
)
from healthd.hooks.stopping import NUMBERS, TAKE_BACK_SECONDS

# Nodes of a preflight ask this often and count as silent after this long: a node that died must not be waited for.
ASK_SECONDS = 5.0
SILENT_SECONDS = 20.0
STOP_SECONDS = 6.0
_PR_SET_PDEATHSIG = 1

# After so long without the main node a person is told what is waited for.
PATIENCE_SECONDS = 5.0
NOT_FOUND = 404
"""What another program at the main node's port answers: ours may yet come."""

# How often a rank that waits looks whether all were started alike: so many seconds, and more for very many ranks.
ROLL_CALL_SECONDS = 3.0
RANKS_PER_SECOND = 200.0
# Processes of other local ranks fetch the outcome by themselves and are not counted by the handshake.
OTHER_RANKS_SECONDS = 1.5
# Of a bad end: as long as `healthd run` waits for a verdict; and until those who were held have read it.
NOTES_SECONDS = 75.0
ANSWERED_SECONDS = 2.0

Prepare = Callable[[Outcome], bool]


async def keep(
    task: Task,
    run_executor: Callable[[], Awaitable[None]],
    prepare: Prepare,
    report: Callable[[Outcome], None],
    folder: Path,
) -> None:
    """
    Bring the gate to its end, tell the hook through `report`, and stay for as long as the others need this node.

    `prepare` tells the hook of an admission before that is confirmed, and returns whether it could print it and write
    what its command needs: what fails there must keep the others from starting.
    `run_executor` is the node daemon; it has ended before the command is started, so that the devices are free. What
    goes wrong is an outcome with code 75, or 2 where the token is wrong; nothing is raised.
    """
    tasks, stopped = Tasks(), asyncio.Event()
    for number in NUMBERS:  # to the end, since who stops a hook may signal the sidecar too, and more than once
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    parent = tasks.start("watch over the hook", _parent_ended(task.parent, stopped))
    told = False
    try:
        async with main_node(task, folder, tasks) as main:
            try:
                outcome = await _gate(task, run_executor, main, parent, prepare)
            except DifferenceError as error:
                outcome = Outcome(kind="exit", code=USAGE, message=str(error))
            report(outcome)
            told = True
            async with _watching(main) as watch:
                await watch.first(_stay(task, outcome, parent))
    except ParentEndedError:
        return
    except HealthdError as error:
        if not told:
            report(Outcome(kind="exit", code=_code_of(error), message=str(error)))
    finally:
        await tasks.stop(None)


@contextlib.asynccontextmanager
async def main_node(task: Task, folder: Path, tasks: Tasks) -> AsyncIterator[MainNode | None]:
    """The aggregator, from entry to exit, where this process leads; None elsewhere."""
    if not task.leads:
        yield None
        return
    settings = folder / "aggregator.toml"
    _write_private(settings, settings_of(task, folder))
    # It reads this file and nothing else: variables and files of this host are about other aggregators.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHD_")}
    command = [sys.executable, "-P", "-m", "healthd", "aggregator", "--config", str(settings)]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=_die_with_parent,
    )
    running = MainNode(process, tasks)
    try:
        yield running
    finally:
        await running.stop()


class MainNode:
    """A running aggregator."""

    def __init__(self, process: asyncio.subprocess.Process, tasks: Tasks) -> None:
        self._process = process
        self._last: deque[str] = deque(maxlen=5)
        self._ended = tasks.start("last output of the aggregator of this gate", self._watch())

    async def until_ended(self) -> None:
        """Wait until it is gone; raises a HealthdError with its last words."""
        await asyncio.shield(self._ended)

    async def _watch(self) -> None:
        """Drain what it says, so that it never waits for us, and raise its last words when it ends."""
        stream = self._process.stderr
        while stream is not None and (chunk := await stream.read(65536)):
            self._last.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())
        code = await self._process.wait()
        words = self._last[-1].removeprefix("healthd: ") if self._last else f"exit code {code}"
        raise HealthdError(f"the aggregator of this gate has exited: {words}")

    async def stop(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait({self._ended})
        with contextlib.suppress(HealthdError, asyncio.CancelledError):
            self._ended.result()


def settings_of(task: Task, folder: Path) -> str:
    """TOML: in memory, with no fleet to recover, waiting for nodes as long as the gate does."""
    aggregator: dict[str, Plain] = {
        "listen": f"{_any_address(task.main)}:{task.port}",
        "database": "sqlite://",
        "state_dir": str(folder),
        "preflight": True,
        "insecure": True,
        "max_nodes": task.size,
        "handshake": f"{task.acknowledge_seconds}s",
    }
    if task.token is not None:
        tokens = folder / "tokens.toml"
        digest = hashlib.sha256(task.token.encode()).hexdigest()
        _write_private(tokens, f'[[token]]\nname = "preflight"\nscopes = ["sync", "gate"]\nsha256 = "{digest}"\n')
        aggregator["token_table"] = str(tokens)
    # What lives for one job's start has nothing to remember, and nobody could release what it latched.
    policy: dict[str, Plain] = {
        **task.policy,
        "rules": False,
        "recovery": "0s",
        "node_grace": f"{task.wait_seconds}s",
        "silent": f"{SILENT_SECONDS}s",
    }
    # Whoever starts a preflight chooses its terms; the token only keeps others out.
    gate: dict[str, Plain] = {"callers_may": list(get_args(GateTerm))}
    tables: dict[str, Mapping[str, Plain]] = {"aggregator": aggregator, "policy": policy, "gate": gate}
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


async def reach_main(task: Task) -> float:
    """
    Until the main node has come: how many seconds its gate holds. The processes of a job do not start together.

    DifferenceError when not all ranks were started alike; RefusedError for a token that may not ask.
    """
    loop, line = asyncio.get_running_loop(), line_to_main(task)
    began, said, why = loop.time(), False, ""
    while True:
        try:
            answer = await line.call(lambda aggregator: check(task, aggregator))
            if answer.wait_seconds is not None:
                return answer.wait_seconds
            why = "its aggregator responds, but rank 0 has not registered yet"
        except RefusedError as error:
            if error.status in REFUSED_FOR_GOOD - {NOT_FOUND}:
                raise
            why = str(error)
        except UnreachableError as error:
            why = str(error)
        waited = loop.time() - began
        if waited > task.wait_seconds:
            raise UnreachableError(f"the main node did not respond in {task.wait_seconds:g} s: {why}") from None
        if waited > PATIENCE_SECONDS and not said:
            said = True
            sys.stderr.write(f"healthd: waiting for rank 0 at {task.main}:{task.port} ({why})\n")
        await asyncio.sleep(min(1.0, 0.1 + waited / 10))


def check(task: Task, aggregator: GateClient) -> RollCallAnswer:
    """As `ask`; DifferenceError when not all were started alike."""
    answer = ask(task, aggregator)
    if answer.difference is not None:
        raise DifferenceError(answer.difference)
    return answer


class DifferenceError(HealthdError):
    """The ranks were not started alike; every one of them is told so."""


def hosts_in(task: Task, text: str, aggregator: GateClient) -> Mapping[str, str]:
    """The hosts of the nodes that a text names, by rank; for people, so that not knowing them is no error."""
    asked = ranks_in(text)[:MOST_ASKED]
    if not asked:
        return {}
    try:
        return ask(task, aggregator, asked=asked).hosts
    except HealthdError:
        return {}


async def tell_difference(task: Task) -> None:
    """On the main node: stay until all who have come know that they were not started alike, within bounds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + task.linger_seconds

    with contextlib.suppress(HealthdError):
        while loop.time() < end:
            answer = await line_to_main(task).call(lambda aggregator: ask(task, aggregator))
            if answer.all_told:
                break
            await asyncio.sleep(0.1)


def ask(task: Task, aggregator: GateClient, *, asked: Sequence[int] = ()) -> RollCallAnswer:
    """Say once (more) that this process is there; `asked` are ranks whose hosts it wants to know."""
    host = socket.gethostname()
    waited = time.monotonic() - task.began
    body = {
        "node": task.node,
        "rank": task.rank,
        "local_rank": task.local_rank,
        "options": options_of(task),
        "wait_seconds": max(0.0, task.wait_seconds - waited) if task.leads else None,
        "host": host if can_name(host) and host not in NO_NAMES else "",
        "asked": list(asked),
    }
    found = aggregator.call("POST", "/v1/preflight/ranks", body=body, hold_seconds=0.0)
    return wire.decode(found, RollCallAnswer, what="answer to the roll call")


def options_of(task: Task) -> dict[str, str]:
    """What all ranks must be started with alike, by the names that people know it by."""
    asked = task.request
    found = {
        "--nnodes": task.size,
        "--job": asked.job,
        "--attempt": asked.attempt,
        "--min-nodes": asked.min_nodes,
        "--tier": None if asked.tier is None else asked.tier.value,
        "--max-age": asked.max_age_seconds,
        "--mode": None if asked.mode is None else asked.mode.value,
        "--collective": asked.collective,
        "--run": True if task.keeps_notes else None,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


async def acknowledge(task: Task, decision: Decision) -> HandshakeAnswer:
    """Whether all go, and who did not acknowledge. Asked until it is settled: the main node's aggregator lingers."""
    included = task.probes and task.node in {node.node for node in decision.nodes}
    seconds = task.acknowledge_seconds + task.linger_seconds
    line = line_to_main(task)
    event: HandshakeEvent = "acknowledge" if included else "wait"
    answer = await line.confirm(decision.id, task.node, seconds=seconds, event=event)
    await _told(task, decision)  # settled is settled
    return answer


async def withdraw(task: Task, decision: Decision) -> None:
    """
    Have nobody start without this node, or this process of it, unless all have been told that they go.

    Unlike the other steps every local rank takes this one: each has a command to start.
    """
    with contextlib.suppress(HealthdError, TimeoutError):
        async with asyncio.timeout(TAKE_BACK_SECONDS):
            await line_to_main(task).handshake(decision.id, task.node, "withdraw", wait_seconds=0.0)


def line_to_main(task: Task) -> GateLine:
    return GateLine(Endpoint(urls=(task.url,), token=task.token, ca_file=None), gone_seconds=task.gone_seconds)


class ParentEndedError(HealthdError):
    """The hook is gone, so nobody asks any more."""


def _toml(value: Plain) -> str:
    """A JSON string, number, truth or list is one of TOML too; a table is not."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _any_address(main: str) -> str:
    """Where the aggregator listens: loopback for a job on one machine, else every address of the main's family."""
    if main in ("localhost", "127.0.0.1", "::1"):
        return "[::1]" if main == "::1" else "127.0.0.1"
    return "[::]" if ":" in main else "0.0.0.0"  # noqa: S104 - the peers come from other machines


def _die_with_parent() -> None:
    """In the child: a sidecar that is killed must not leave an aggregator behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _told(task: Task, decision: Decision) -> None:
    """Say that this node knows the outcome. It stands without that: a main node that is gone has nothing to learn."""
    if task.probes:
        with contextlib.suppress(HealthdError):
            await line_to_main(task).handshake(decision.id, task.node, "told")


@contextlib.asynccontextmanager
async def _watching(main: MainNode | None, parent: asyncio.Task[None] | None = None) -> AsyncIterator[Tasks]:
    """What the block does with these tasks' `first` ends when the aggregator of this gate does, or the hook."""
    tasks = Tasks()
    if main is not None:
        tasks.supervise("aggregator of this gate", main.until_ended, OnEnd.FATAL)
    if parent is not None:
        tasks.supervise("hook", lambda: _hook_gone(parent), OnEnd.FATAL)
    try:
        yield tasks
    finally:
        await tasks.stop(None)


async def _hook_gone(parent: asyncio.Task[None]) -> None:
    await asyncio.wait({parent})
    raise ParentEndedError("the hook has ended")


def _code_of(error: HealthdError) -> int:
    """A question that cannot be meant, or a token that may not ask it: to try again would help nobody."""
    unwanted = isinstance(error, RefusedError) and error.status in (BAD_REQUEST, NO_TOKEN, WRONG_TOKEN)
    return USAGE if unwanted else NOT_ADMITTED


async def _gate(
    task: Task,
    run_executor: Callable[[], Awaitable[None]],
    main: MainNode | None,
    parent: asyncio.Task[None],
    prepare: Prepare,
) -> Outcome:
    """
    From the first word with the main node to the last; the executor runs in between and no longer.

    Whatever is raised takes an acknowledgement back first, because to stop the executor takes time.
    """
    admissions = list[Decision]()
    async with _watching(main, parent) as tasks:
        wait_seconds = await tasks.first(reach_main(task))
        if task.probes:
            tasks.supervise("checks of this node", lambda: check_node(run_executor), OnEnd.FATAL)
        try:
            return await tasks.first(_settle(task, wait_seconds, admissions, prepare))
        except Exception:
            for decision in admissions:
                await withdraw(task, decision)
            raise


async def _settle(task: Task, wait_seconds: float, admissions: list[Decision], prepare: Prepare) -> Outcome:
    """Ask, acknowledge, and say what this node is to do. What is to be acknowledged is put into `admissions` before."""
    decision, hosts_of = await _ask(task, wait_seconds)
    included = [node.node for node in decision.nodes]
    if decision.decision is not Verdict.ADMIT:
        await _told(task, decision)
        code = NOT_ADMITTED if decision.retryable else IMPOSSIBLE
        return Outcome(kind="exit", code=code, decision=decision, hosts_of=hosts_of)
    if task.main_counts and node_name(0) not in included:
        # Everybody comes to this by the same decision, so nobody starts.
        await _told(task, decision)
        text = (
            "the main node was left out, and its exit code is the job's; it could not learn how the other nodes end. "
            "Not started, so that a retry gets another main node"
        )
        return Outcome(kind="exit", code=NOT_ADMITTED, decision=decision, message=text, hosts_of=hosts_of)
    admissions.append(decision)
    outcome = Outcome(kind="park", code=0, decision=decision, hosts_of=hosts_of)
    if task.node in included:
        hosts = tuple(node.address or node.node for node in decision.nodes)
        rank, size = included.index(task.node), len(included)
        outcome = dataclasses.replace(
            outcome, kind="run", rank=rank, size=size, main=hosts[0], hosts=hosts, aggregator=task.url
        )
        if not await in_thread("line to the hook", lambda: prepare(outcome)):
            raise ParentEndedError("the hook has ended")
    settled = await acknowledge(task, decision)
    if not settled.go:
        text = f"not all admitted nodes confirmed the start: missing {', '.join(settled.missing) or 'unknown'}"
        return Outcome(kind="exit", code=NOT_ADMITTED, decision=decision, message=text, hosts_of=hosts_of)
    return outcome


async def _ask(task: Task, wait_seconds: float) -> tuple[Decision, Mapping[str, str]]:
    """
    The decision of the gate, and the hosts of the nodes that it names.

    DifferenceError when a rank comes meanwhile that was started otherwise.
    """
    request = dataclasses.replace(task.request, wait_seconds=wait_seconds)
    say = _say_hold(task)

    def ask(aggregator: GateClient) -> tuple[Decision, Mapping[str, str]]:
        def hold(decision: Decision) -> None:
            say(decision, aggregator)
            with contextlib.suppress(UnreachableError):  # the next question finds out
                check(task, aggregator)

        seconds = min(HOLD_SECONDS, ROLL_CALL_SECONDS + task.size / RANKS_PER_SECOND)
        found = aggregator.ask(request, on_hold=hold, gone_seconds=task.gone_seconds, hold_seconds=seconds)
        return found, hosts_in(task, wire.encode(found).decode(), aggregator)

    return await line_to_main(task).call(ask)


def _say_hold(task: Task) -> Callable[[Decision, GateClient], None]:
    """Says why the gate holds when that changes: on the main node, once for the whole job."""
    said: list[str] = []

    def say(decision: Decision, aggregator: GateClient) -> None:
        text = "; ".join(reason.message for reason in decision.reasons[:3])
        if task.leads and text and said[-1:] != [text]:
            said.append(text)
            sys.stderr.write(f"healthd: holding: {with_hosts(text, hosts_in(task, text, aggregator))}\n")

    return say


async def _stay(task: Task, outcome: Outcome, parent: asyncio.Task[None]) -> None:
    """What this node still owes the others after its hook was told."""
    decision = outcome.decision
    if decision is None and task.leads:
        await tell_difference(task)
    if decision is None or not task.probes:
        return
    parks = outcome.kind != "exit" and bool(decision.excluded)
    if outcome.kind == "run" and task.keeps_notes and task.leads:
        await _notes_judged(task, decision)
    if outcome.kind == "run" and parks:
        await asyncio.wait({parent})
        with contextlib.suppress(HealthdError):
            await line_to_main(task).handshake(decision.id, task.node, "ended", wait_seconds=0.0)
    elif outcome.kind == "park":
        async with _watching(None, parent) as watch:
            await watch.first(_job_ended(task, decision))
    if task.leads:
        await _others_told(task, decision, until_over=parks)


async def _notes_judged(task: Task, decision: Decision) -> None:
    """
    On the main node: until its command and the parent of that have ended, whatever signals come; and where somebody
    told of a bad end then, until that has been judged and answered.
    """
    await _exited(task.parent)
    loop = asyncio.get_running_loop()
    end = loop.time() + NOTES_SECONDS
    path, line = f"/v1/gates/{decision.id}/postmortem", line_to_main(task)
    with contextlib.suppress(HealthdError):
        while loop.time() < end:
            try:
                found = await line.call(lambda aggregator: aggregator.get(path))
            except RefusedError as error:
                if error.status != NOT_FOUND:
                    raise
                end = min(end, loop.time() + task.linger_seconds)  # its own end was a good one
            else:
                if found["postmortem"]["phase"] == "final":
                    break
            await asyncio.sleep(0.5)
    await asyncio.sleep(ANSWERED_SECONDS)


async def _job_ended(task: Task, decision: Decision) -> None:
    """Until the job is over on all nodes that run it, or the main node is gone."""
    with contextlib.suppress(HealthdError):
        while True:
            answer = await line_to_main(task).handshake(decision.id, task.node, "wait", wait_seconds=20.0)
            if answer.over:
                return
            await asyncio.sleep(0.05)  # an aggregator that is stopping holds nobody


async def _others_told(task: Task, decision: Decision, *, until_over: bool) -> None:
    """The last to leave: everybody must have heard the outcome, and the parked that the job is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + task.linger_seconds
    with contextlib.suppress(HealthdError):
        while loop.time() < end:
            answer = await line_to_main(task).handshake(decision.id, task.node, "wait", wait_seconds=1.0)
            if answer.all_told and (not until_over or answer.over):
                break
            await asyncio.sleep(0.02)
    if until_over:
        await asyncio.sleep(1.0)  # the parked ask once more and read that it is over
    elif task.local_size > 1:
        await asyncio.sleep(OTHER_RANKS_SECONDS)


async def _parent_ended(parent: int, ended: asyncio.Event) -> None:
    """Until the process that is the hook, or that the hook has become, has ended, or `ended` says that it ends."""
    await _exited(parent, ended)


async def _exited(parent: int, ended: asyncio.Event | None = None) -> None:
    """Until the process that was our parent at the start has ended, or `ended` is set."""
    ended = asyncio.Event() if ended is None else ended
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        if os.getppid() == parent:  # else it ended before, and another process may have its number
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
