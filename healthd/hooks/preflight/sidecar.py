"""The keeper: brings the gate to its end beside the hook, tells it what to do, and stays as long as others need it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from healthd.core import wire
from healthd.core.errors import HealthdError, UnreachableError
from healthd.core.http.aggregator_client import BAD_REQUEST, HOLD_SECONDS, NO_TOKEN, WRONG_TOKEN, RefusedError
from healthd.core.http.gate_client import GateClient
from healthd.core.model import Decision, Verdict
from healthd.core.tasks import OnEnd, Tasks
from healthd.core.threads import in_thread
from healthd.hooks.preflight import IMPOSSIBLE, NOT_ADMITTED, USAGE, Outcome, Task, node_name, with_hosts
from healthd.hooks.preflight.handshake import acknowledge, handshake, withdraw
from healthd.hooks.preflight.main_node import MainNode, main_node
from healthd.hooks.preflight.roll_call import DifferenceError, call, check, hosts_in, reach_main, tell_difference
from healthd.hooks.stopping import NUMBERS

# How often a rank that waits looks whether all were started alike: so many seconds, and more for very many ranks.
ROLL_CALL_SECONDS = 3.0
RANKS_PER_SECOND = 200.0
# Processes of other local ranks fetch the outcome by themselves and are not counted by the handshake.
OTHER_RANKS_SECONDS = 1.5


Prepare = Callable[[Outcome], bool]


class ParentEndedError(HealthdError):
    """The hook is gone, so nobody asks any more."""


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
    for number in NUMBERS:  # to the end, since who stops a hook may signal the keeper too, and more than once
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
            tasks.supervise("checks of this node", lambda: _execute(run_executor), OnEnd.FATAL)
        try:
            return await tasks.first(_settle(task, wait_seconds, admissions, prepare))
        except Exception:
            for decision in admissions:
                await withdraw(task, decision)
            raise


async def _execute(run_executor: Callable[[], Awaitable[None]]) -> None:
    await run_executor()
    raise HealthdError("the checks of this node ended before the gate did")


async def _settle(task: Task, wait_seconds: float, admissions: list[Decision], prepare: Prepare) -> Outcome:
    """Ask, acknowledge, and say what this node is to do. What is to be acknowledged is put into `admissions` before."""
    decision, hosts_of = await _ask(task, wait_seconds)
    included = [node.node for node in decision.nodes]
    if decision.decision is not Verdict.ADMIT:
        if task.probes:
            # The verdict stands without it: a main node that is gone already has nothing to learn from us.
            with contextlib.suppress(HealthdError):
                await handshake(task, decision, "told")
        code = NOT_ADMITTED if decision.retryable else IMPOSSIBLE
        return Outcome(kind="exit", code=code, decision=decision, hosts_of=hosts_of)
    if task.main_counts and node_name(0) not in included:
        # Everybody comes to this by the same decision, so nobody starts.
        if task.probes:
            with contextlib.suppress(HealthdError):
                await handshake(task, decision, "told")
        text = (
            "the main node is the one that was left out, and its exit code is the job's: how the others end could not "
            "be told; not started, so that a retry gets another main node"
        )
        return Outcome(kind="exit", code=NOT_ADMITTED, decision=decision, message=text, hosts_of=hosts_of)
    admissions.append(decision)
    outcome = Outcome(kind="park", code=0, decision=decision, hosts_of=hosts_of)
    if task.node in included:
        hosts = tuple(node.address or node.node for node in decision.nodes)
        rank, size = included.index(task.node), len(included)
        outcome = dataclasses.replace(outcome, kind="run", rank=rank, size=size, main=hosts[0], hosts=hosts)
        if not await in_thread("line to the hook", lambda: prepare(outcome)):
            raise ParentEndedError("the hook has ended")
    go, missing = await acknowledge(task, decision)
    if not go:
        text = f"not all admitted nodes confirmed the start: {', '.join(missing) or 'unknown which'} did not"
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

    return await call(task, ask)


def _say_hold(task: Task) -> Callable[[Decision, GateClient], None]:
    """Says why the gate holds when that changes: on the main node, once for the whole job."""
    said: list[str] = []

    def say(decision: Decision, aggregator: GateClient) -> None:
        text = "; ".join(reason.message for reason in decision.reasons[:3])
        if task.leads and text and said[-1:] != [text]:
            said.append(text)
            sys.stderr.write(f"healthd: holding: {with_hosts(text, hosts_in(task, text, aggregator))}\n")

    return say


# --- after the hook was told ------------------------------------------------------------------------------------------


async def _stay(task: Task, outcome: Outcome, parent: asyncio.Task[None]) -> None:
    """What this node still owes the others after its hook was told."""
    decision = outcome.decision
    if decision is None and task.leads:
        await tell_difference(task)
    if decision is None or not task.probes:
        return
    parks = outcome.kind != "exit" and bool(decision.excluded)
    if outcome.kind == "run" and parks:
        await asyncio.wait({parent})
        with contextlib.suppress(HealthdError):
            await handshake(task, decision, "ended", wait=0)
    elif outcome.kind == "park":
        async with _watching(None, parent) as watch:
            await watch.first(_job_ended(task, decision))
    if task.leads:
        await _others_told(task, decision, until_over=parks)


async def _job_ended(task: Task, decision: Decision) -> None:
    """Until the job is over on all nodes that run it, or the main node is gone."""
    with contextlib.suppress(HealthdError):
        while True:
            answer = await handshake(task, decision, "wait", wait=20.0)
            if answer["over"]:
                return
            await asyncio.sleep(0.05)  # an aggregator that is stopping holds nobody


async def _others_told(task: Task, decision: Decision, *, until_over: bool) -> None:
    """The last to leave: everybody must have heard the outcome, and the parked that the job is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + task.linger_seconds
    with contextlib.suppress(HealthdError):
        while loop.time() < end:
            answer = await handshake(task, decision, "wait", wait=1.0)
            if answer["all_told"] and (not until_over or answer["over"]):
                break
            await asyncio.sleep(0.02)
    if until_over:
        await asyncio.sleep(1.0)  # the parked ask once more and read that it is over
    elif task.local_size > 1:
        await asyncio.sleep(OTHER_RANKS_SECONDS)


async def _parent_ended(parent: int, ended: asyncio.Event) -> None:
    """Until the process that is the hook, or that the hook has become, has ended, or `ended` says that it ends."""
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
