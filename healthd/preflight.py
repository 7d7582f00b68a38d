"""
A gate for one job with no standing service: what runs beside each node's command.

The keeper is a child of the hook. It runs this node's checks on order (the node daemon without its HTTP port), on the
main node starts an aggregator that lives for this gate, asks the gate, and ends in two steps: once the decision is
there every included node acknowledges, and only when all have is any told to go. The hook then becomes the job's
command. Nodes are named `rank-R`, because a hook knows only itself and the number of its peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthd.client import Aggregator, Endpoint
from healthd.errors import HealthdError, UnreachableError
from healthd.model import Decision, GateRequest, Verdict

NOT_ADMITTED, IMPOSSIBLE = 75, 1

# How long those who wait for the others' acknowledgement, and the main node for the last to fetch its answer, go on.
ACKNOWLEDGE_SECONDS = 30.0
LINGER_SECONDS = 15.0
# The aggregator of a parked node is gone when it has not answered for so long: the main node's job has ended.
GONE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the keeper is to do. `port` is the aggregator's; `parent` the hook's process id."""

    rank: int
    size: int
    main: str
    port: int
    local_rank: int
    request: GateRequest
    wait_seconds: float
    token_file: Path | None
    parent: int

    @property
    def node(self) -> str:
        """The name of this node in the gate."""
        return node_name(self.rank)

    @property
    def url(self) -> str:
        """The aggregator's URL."""
        host = f"[{self.main}]" if ":" in self.main else self.main
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """
    What the hook is to do: `run` the command as number `rank` of `size` with `main` and `hosts`, `park` until the
    keeper ends, or `exit` with `code`. `decision` is shown.
    """

    kind: str
    code: int
    rank: int | None = None
    size: int | None = None
    main: str | None = None
    hosts: tuple[str, ...] = ()
    decision: Decision | None = None
    message: str = ""


def node_name(rank: int) -> str:
    """`rank-3`: how a preflight names its nodes."""
    return f"rank-{rank}"


async def keep(task: Task, run_executor: Callable[[], Awaitable[None]], report: Callable[[Outcome], None]) -> None:
    """
    Bring the gate to its end, tell the hook through `report`, and stay for as long as the others need this node.

    `run_executor` is the node daemon. Raises nothing: what goes wrong is an outcome with code 75.
    """
    aggregator = await _start_aggregator(task) if task.rank == 0 and task.local_rank == 0 else None
    executor = asyncio.ensure_future(run_executor()) if task.local_rank == 0 else None
    told = False
    try:
        outcome = await _settle(task, executor)
        report(outcome)
        told = True
        await _stay(task, outcome)
    except HealthdError as error:
        if not told:
            report(Outcome(kind="exit", code=NOT_ADMITTED, message=str(error)))
    finally:
        if executor is not None:
            executor.cancel()
            with contextlib.suppress(asyncio.CancelledError, HealthdError):
                await executor
        if aggregator is not None and aggregator.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                aggregator.send_signal(signal.SIGTERM)
            await aggregator.wait()


async def _settle(task: Task, executor: asyncio.Future[None] | None) -> Outcome:
    """Ask, acknowledge, and say what this node is to do; an executor that ends meanwhile ends the wait."""
    asking = asyncio.ensure_future(_ask(task))
    waiting: set[asyncio.Future[Any]] = {asking} if executor is None else {asking, executor}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not asking.done():
        asking.cancel()
        assert executor is not None
        executor.result()  # raises what ended it
        raise HealthdError("the checks of this node ended before the gate did")
    decision = asking.result()
    included = [node.node for node in decision.nodes]
    if decision.decision is not Verdict.ADMIT:
        await _handshake(task, decision, "told")
        return Outcome(kind="exit", code=NOT_ADMITTED if decision.retryable else IMPOSSIBLE, decision=decision)
    go, missing = await _acknowledge(task, decision)
    if not go:
        text = f"not all admitted nodes confirmed the start: {', '.join(missing) or 'unknown which'} did not"
        return Outcome(kind="exit", code=NOT_ADMITTED, decision=decision, message=text)
    if task.node not in included:
        return Outcome(kind="park", code=0, decision=decision)
    hosts = tuple(node.address or node.node for node in decision.nodes)
    return Outcome(
        kind="run",
        code=0,
        rank=included.index(task.node),
        size=len(included),
        main=hosts[0],
        hosts=hosts,
        decision=decision,
    )


async def _ask(task: Task) -> Decision:
    def ask() -> Decision:
        with Aggregator(_endpoint(task)) as aggregator:
            return aggregator.ask(task.request, wait_seconds=task.wait_seconds, on_hold=_say_hold())

    return await asyncio.to_thread(ask)


def _say_hold() -> Callable[[Decision], None]:
    """Says why the gate holds, when that changes."""
    said: list[str] = []

    def say(decision: Decision) -> None:
        text = "; ".join(reason.message for reason in decision.reasons[:3])
        if text and said[-1:] != [text]:
            said.append(text)
            sys.stderr.write(f"healthd: holding: {text}\n")

    return say


async def _acknowledge(task: Task, decision: Decision) -> tuple[bool, tuple[str, ...]]:
    """Whether all go, and who did not acknowledge. Asked until it is settled: the main node's aggregator lingers."""
    end = asyncio.get_running_loop().time() + ACKNOWLEDGE_SECONDS + LINGER_SECONDS
    included = task.node in {node.node for node in decision.nodes}
    event = "acknowledge" if included and task.local_rank == 0 else "wait"
    while True:
        answer = await _handshake(task, decision, event)
        if answer["go"] is not None:
            if task.local_rank == 0:
                await _handshake(task, decision, "told")
            return bool(answer["go"]), tuple(answer["missing"])
        if asyncio.get_running_loop().time() > end:
            raise UnreachableError(f"aggregator {task.url} did not settle the start in time")


async def _handshake(task: Task, decision: Decision, event: str, *, wait: float = 10.0) -> dict[str, Any]:
    """One step of the handshake, tried again for a while: the line may be cut at any moment."""

    def step() -> dict[str, Any]:
        import msgspec

        with Aggregator(_endpoint(task)) as aggregator:
            path = f"/v1/gates/{decision.id}/handshake"
            body = {"node": task.node, "event": event}
            answer: dict[str, Any] = msgspec.json.decode(aggregator.call("POST", path, body=body, query={"wait": wait}))
            return answer

    for pause in (0.2, 0.5, 1.0, 2.0):
        try:
            return await asyncio.to_thread(step)
        except UnreachableError:
            await asyncio.sleep(pause)
    return await asyncio.to_thread(step)


async def _stay(task: Task, outcome: Outcome) -> None:
    """What this node still owes the others after its hook was told."""
    decision = outcome.decision
    if decision is None or task.local_rank != 0:
        return
    parked = outcome.kind != "exit" and bool(decision.excluded)
    if outcome.kind == "run" and parked:
        await _parent_ended(task.parent)
        with contextlib.suppress(HealthdError):
            await _handshake(task, decision, "ended", wait=0)
    elif outcome.kind == "park":
        await _job_ended(task, decision)
    if task.rank == 0:
        # The last to leave: everybody must have heard the outcome, and the parked that the job is over.
        await _all_told(task, decision, until_over=parked)


async def _job_ended(task: Task, decision: Decision) -> None:
    """Until the job is over on all nodes that run it, or the main node is gone."""
    loop = asyncio.get_running_loop()
    heard = loop.time()
    while loop.time() - heard < GONE_SECONDS:
        with contextlib.suppress(HealthdError):
            answer = await _handshake(task, decision, "wait", wait=20.0)
            heard = loop.time()
            if answer["over"]:
                return


async def _all_told(task: Task, decision: Decision, *, until_over: bool) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + LINGER_SECONDS
    with contextlib.suppress(HealthdError):
        while loop.time() < end or until_over:
            answer = await _handshake(task, decision, "wait", wait=1.0)
            if answer["all_told"] and (not until_over or answer["over"]):
                break
    if until_over:
        await asyncio.sleep(1.0)  # the parked ask once more and read that it is over


async def _parent_ended(parent: int) -> None:
    """Until the process that the hook has become has ended."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _start_aggregator(task: Task) -> asyncio.subprocess.Process:
    """The aggregator of this gate: in memory, with no fleet to recover; it waits for nodes as long as the gate does."""
    command = [sys.executable, "-m", "healthd", "aggregator", "--listen", f"{_any_address(task.main)}:{task.port}"]
    command += ["--database", "sqlite://", "--insecure"]
    environment = {
        **os.environ,
        "HEALTHD_POLICY_RECOVERY": "0s",
        "HEALTHD_POLICY_NODE_GRACE": f"{task.wait_seconds}s",
        "HEALTHD_AGGREGATOR_HANDSHAKE": f"{ACKNOWLEDGE_SECONDS}s",
    }
    if task.token_file is not None:
        environment["HEALTHD_AGGREGATOR_TOKEN_FILE"] = str(task.token_file)
    return await asyncio.create_subprocess_exec(*command, env=environment, stdin=asyncio.subprocess.DEVNULL)


def _any_address(main: str) -> str:
    """Where the aggregator listens: loopback for a job on one machine, else every address of the main's family."""
    if main in ("localhost", "127.0.0.1", "::1"):
        return "[::1]" if main == "::1" else "127.0.0.1"
    return "[::]" if ":" in main else "0.0.0.0"  # noqa: S104 - the peers come from other machines


def _endpoint(task: Task) -> Endpoint:
    from healthd.client import read_token

    return Endpoint(url=task.url, token=read_token(task.token_file), ca_file=None)
