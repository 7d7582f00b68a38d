"""The ranks of a preflight find the main node, and see that all were started alike, before any asks the gate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from healthd.aggregator.controller.roll_call import MOST_ASKED, RollCallAnswer
from healthd.core import wire
from healthd.core.errors import HealthdError, UnreachableError
from healthd.core.http.aggregator_client import USAGE as REFUSED_FOR_GOOD
from healthd.core.http.aggregator_client import Endpoint, RefusedError
from healthd.core.http.gate_client import GateClient
from healthd.core.node_name import NO_NAMES, can_name
from healthd.core.threads import in_thread
from healthd.hooks.preflight import Task, ranks_in

T = TypeVar("T")

# After so long without the main node a person is told what is waited for.
PATIENCE_SECONDS = 5.0
NOT_FOUND = 404
"""What another program at the main node's port answers: ours may yet come."""


class DifferenceError(HealthdError):
    """The ranks were not started alike; every one of them is told so."""


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
    }
    return {name: str(value) for name, value in found.items() if value is not None}


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


def check(task: Task, aggregator: GateClient) -> RollCallAnswer:
    """As `ask`; DifferenceError when not all were started alike."""
    answer = ask(task, aggregator)
    if answer.difference is not None:
        raise DifferenceError(answer.difference)
    return answer


async def reach_main(task: Task) -> float:
    """
    Until the main node has come: how many seconds its gate holds. The processes of a job do not start together.

    DifferenceError when not all ranks were started alike; RefusedError for a token that may not ask.
    """
    loop = asyncio.get_running_loop()
    began, said, why = loop.time(), False, ""
    while True:
        try:
            answer = await call(task, lambda aggregator: check(task, aggregator))
            if answer.wait_seconds is not None:
                return answer.wait_seconds
            why = "its aggregator is there, and rank 0 has not come yet"
        except RefusedError as error:
            if error.status in REFUSED_FOR_GOOD - {NOT_FOUND}:
                raise
            why = str(error)
        except UnreachableError as error:
            why = str(error)
        waited = loop.time() - began
        if waited > task.wait_seconds:
            raise UnreachableError(f"the main node did not answer in {task.wait_seconds:g} s: {why}") from None
        if waited > PATIENCE_SECONDS and not said:
            said = True
            sys.stderr.write(f"healthd: waiting for rank 0 at {task.main}:{task.port} ({why})\n")
        await asyncio.sleep(min(1.0, 0.1 + waited / 10))


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
            answer = await call(task, lambda aggregator: ask(task, aggregator))
            if answer.all_told:
                break
            await asyncio.sleep(0.1)


async def call(task: Task, work: Callable[[GateClient], T]) -> T:
    """Speak to the aggregator in a thread that nobody waits for."""

    def speak() -> T:
        with GateClient(Endpoint(url=task.url, token=task.token, ca_file=None)) as aggregator:
            return work(aggregator)

    return await in_thread("line to the main node", speak)
