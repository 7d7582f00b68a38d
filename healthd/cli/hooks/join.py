"""`healthd gate --join`: the hook of one member of a group, which knows only itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from healthd.cli.hooks.gate import may_start
from healthd.cli.settings.hooks import GateSettings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.output import log_to_stderr
from healthd.core.errors import ConfigError, HealthdError, OutputError, UnreachableError
from healthd.core.http.client import GateClient, NotAdmittedError, RefusedError
from healthd.core.model import Decision, GateRequest, Join, Verdict
from healthd.core.tasks import Backoff
from healthd.core.threads import in_thread
from healthd.hooks.launchers import Place, describe, find_place, find_places
from healthd.hooks.stopping import Signals, Stopped, stoppable

LONGEST_WAIT_SECONDS = 7 * 86400.0
"""The aggregator ends a gate at its deadlines; this is for one that never would."""

GONE_SECONDS = 600.0
"""How long the aggregator may be away where `--wait` says nothing."""

MOST_ROUNDS = 3
"""How often a group comes together again because somebody was lost between the answer and the start."""

RETRIES = Backoff(0.1, 5.0)

SETTLE_SECONDS = 90.0
"""Within which all admitted members have confirmed the start, or have not."""

LEAVE_SECONDS = 2.0
"""A launcher that ends a hook kills it some seconds later."""


@dataclass
class Hook:
    """One member under way: `gate` is its gate as far as it was heard of."""

    settings: Settings
    request: GateRequest
    join: Join
    gate: str | None = None
    said: list[str] = field(default_factory=list)


def member_of(settings: Settings, environ: Mapping[str, str], *, say: Callable[[str], None]) -> Hook:
    """The member that the settings, else the launcher, describe. ConfigError names what is missing."""
    asked = settings.gate
    for name, given in (("--pool", asked.pool), ("--count", asked.count), ("--hostfile", asked.hostfile)):
        if given is not None:
            raise ConfigError(f"{name} does not go with --join: who joins names its own node alone")
    if len(asked.node) > 1:
        raise ConfigError("--join takes one --node: the one that this hook runs on")
    place = find_place(environ, size=asked.size) if asked.size is None or asked.rank is None else None
    if place is not None:
        say(f"healthd: {describe(place)}")
    size, rank = _number(asked.size, place, "size"), _number(asked.rank, place, "rank")
    if not 0 <= rank < size:
        raise ConfigError(f"--rank {rank} is not one of 0 to {size - 1}")
    if asked.min_nodes is not None and not 1 <= asked.min_nodes <= size:
        raise ConfigError(f"--min-nodes must be between 1 and {size}, not {asked.min_nodes}")
    leading: list[str] = []
    if asked.min_nodes is not None:
        with contextlib.suppress(ConfigError):  # what is half set matters only to who needs it
            leading = [one.source for one in find_places(environ) if one.main_counts]
    if leading and asked.min_nodes != size:
        # If rank 0 were the one that is left out, its end would be the job's, while the others are at work.
        raise ConfigError(f"--min-nodes does not go with {leading[0]}, where the job ends as rank 0 does; leave it out")
    group = asked.join or ""
    node = asked.node[0] if asked.node else environ.get("NODE_NAME") or settings.node.name
    join = Join(
        group=group,
        size=size,
        rank=rank,
        member=asked.member or secrets.token_hex(8),
        node=node,
        execute=asked.execute,
    )
    return Hook(settings=settings, join=join, request=_request(asked, place, join, environ))


def _number(given: int | None, place: Place | None, name: str) -> int:
    if given is not None:
        return given
    if place is None:
        raise ConfigError(f"--{name} is missing, and no launcher's variables say it")
    return place.size if name == "size" else place.rank


def _request(asked: GateSettings, place: Place | None, join: Join, environ: Mapping[str, str]) -> GateRequest:
    from healthd.cli.hooks.gate import own_workload

    return dataclasses.replace(
        asked.request(asked.job or join.group),
        attempt=asked.attempt or (place.attempt if place is not None else 0),
        min_nodes=asked.min_nodes,
        workload=asked.workload or own_workload(environ, 1),
        join=join,
    )


def follow(
    hook: Hook,
    *,
    on_hold: Callable[[Decision], None],
    on_away: Callable[[UnreachableError], None],
    show: Callable[[Decision], None],
) -> Decision:
    """
    Ask until there is a last word that all admitted members have confirmed. `show` prints each before it is confirmed.

    Where one of them is lost before, the group comes together again: the hook asks anew, as another member. A decision
    that admits and was not confirmed by all in the end is a NotAdmittedError. Raises as `GateClient.ask`, and
    OutputError where the host file or the decision cannot be written: that is found before the start is confirmed.
    """
    from healthd.cli.hooks.gate import write_hosts

    gone = hook.settings.gate.wait_seconds or GONE_SECONDS
    for _ in range(MOST_ROUNDS):

        def hold(decision: Decision) -> None:
            hook.gate = decision.id
            on_hold(decision)

        with GateClient(hook.settings.endpoint(hook.settings.gate.aggregator)) as aggregator:
            try:
                decision = aggregator.ask(
                    hook.request,
                    longest_seconds=LONGEST_WAIT_SECONDS,
                    on_hold=hold,
                    on_away=on_away,
                    gone_seconds=gone,
                )
            except RefusedError as error:
                raise error.told from None
            hook.gate = decision.id
            if left_out(decision, hook.join) is None:  # who must not start is given no hosts
                write_hosts(decision, hook.settings.gate)
            show(decision)
            if not _starts(decision, hook.join) or _confirmed(aggregator, decision, hook):
                return decision
        leave(hook)
        hook.join = dataclasses.replace(hook.join, member=secrets.token_hex(8))
        hook.request = dataclasses.replace(hook.request, join=hook.join)
        click.echo(
            f"healthd: {', '.join(hook.said) or 'a member'} did not confirm the start; the group comes together again",
            err=True,
        )
    raise NotAdmittedError(f"group {hook.join.group}: not all members confirmed the start in {MOST_ROUNDS} rounds")


def left_out(decision: Decision, join: Join) -> str | None:
    """Why this member must not start although the job does; None where it may, or where the job does not start."""
    if decision.decision is not Verdict.ADMIT or decision.would is not None:
        return None  # observe mode, or a person, admits all that come
    if any(node.node == join.node for node in decision.nodes):
        return None
    why = next(
        (
            out.reasons[0].message
            for out in decision.excluded
            if out.node in (join.node, f"rank-{join.rank}") and out.reasons
        ),
        "it came when the group had started",
    )
    return f"rank {join.rank} on {join.node} is left out, the others start without it: {why}"


def leave(hook: Hook) -> str:
    """Tell the gate that this member ends; what came of it, as the end of a sentence."""
    try:
        endpoint = hook.settings.endpoint(hook.settings.gate.aggregator)
        with GateClient(endpoint, slack_seconds=LEAVE_SECONDS) as aggregator:
            gate = hook.gate or aggregator.newest_gate(hook.request.job)
            if gate is None:
                return "no gate was open yet"
            aggregator.leave(gate, hook.join.member)
    except HealthdError as error:
        return f"its group could not be told ({error})"
    return "its group is told"


def _starts(decision: Decision, join: Join) -> bool:
    """Whether the answer is one that this member must confirm: an admission that includes it and others."""
    included = any(node.node == join.node for node in decision.nodes)
    return decision.decision is Verdict.ADMIT and decision.would is None and included and len(decision.nodes) > 1


def _confirmed(aggregator: GateClient, decision: Decision, hook: Hook) -> bool:
    """
    Whether all admitted members confirmed the start, so that all go or none does.

    NotAdmittedError where that cannot be told, also because the aggregator went away: others may know that none goes.
    """
    end, failures = time.monotonic() + SETTLE_SECONDS, 0
    while time.monotonic() < end:
        try:
            go, missing = aggregator.acknowledge(decision.id, hook.join.node)
        except UnreachableError:
            failures += 1
            time.sleep(RETRIES.after(failures))
            continue
        if go is not None:
            hook.said = list(missing)
            return go
    raise NotAdmittedError(
        f"aggregator {aggregator.url} did not settle the start of group {hook.join.group} in {SETTLE_SECONDS:g} s"
    )


def run(settings: Settings, *, as_json: bool) -> int:
    """The whole hook; its exit code."""
    from healthd.cli.hooks import gate as command
    from healthd.cli.terminal.console import Progress

    def say(line: str) -> None:
        if not as_json:
            click.echo(line, err=True)

    hook = member_of(settings, os.environ, say=say)
    if settings.gate.execute:
        settings.runner(in_job=True)  # what is wrong in its settings is said before anybody waits for this member
    progress = Progress(quiet=as_json)

    def show(decision: Decision) -> None:
        progress.end()
        command.show(decision, settings.gate, as_json=as_json)

    def ask() -> Decision:
        return follow(
            hook,
            on_hold=progress.hold,
            on_away=lambda error: say(f"healthd: {error}; trying again until it is back"),
            show=show,
        )

    try:
        with stoppable() as signals, progress:
            decision = _executed(hook, ask, signals) if settings.gate.execute else ask()
    except UnreachableError as error:
        if may_start(settings.gate, hook.request, error):
            return command.ADMITTED
        say(f"healthd: {leave(hook)}")
        return command.NOT_ADMITTED
    except (NotAdmittedError, OutputError) as error:
        raise type(error)(f"{error}; {leave(hook)}") from None
    except Stopped as stop:
        click.echo(f"healthd: stopped by {stop}; {leave(hook)}", err=True)
        return command.NOT_ADMITTED
    why = left_out(decision, hook.join)
    if why is not None:
        click.echo(f"healthd: {why}", err=True)
        return command.NOT_ADMITTED if settings.gate.exit_style == "plain" else command.IMPOSSIBLE
    return command.exit_code(decision, settings.gate)


def _executed(hook: Hook, ask: Callable[[], Decision], signals: Signals) -> Decision:

    return executed(hook.settings, lambda: hook.join, hook.request.job, ask, signals=signals)


# `healthd gate --execute`: the hook runs the ordered checks of its node itself while it waits for the answer.


PLACE = Path("/tmp")  # short: a socket lies below
PREFIX = "healthd-gate-"
LEFT_SECONDS = 86400.0
"""How old a folder must be to be one that was left behind; a hook that just starts has not locked its own yet."""
ASK_SECONDS = 5.0
"""How long the aggregator holds an answer to the executor: short, since the gate waits for it."""


def executed(
    settings: Settings, join: Callable[[], Join], job: str, ask: Callable[[], Decision], *, signals: Signals
) -> Decision:
    """
    What `ask` comes to, with the executor of `join`'s node running meanwhile; it has ended when this returns.

    Call it in the main thread. Raises what `ask` raises, `Stopped` for a signal that came before this returns, and
    HealthdError where the executor cannot run.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    log_to_stderr(logging.WARNING)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the kernel lets go of it however we end: `sweep` looks for that
        with signals.deferred():
            return asyncio.run(_both(settings, join, job, ask, folder, signals))
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(place: Path = PLACE) -> None:
    """Remove what hooks of this user that were killed have left behind; nothing of one that runs, or just starts."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or no folder, or locked: its hook is alive
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(lock)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > LEFT_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


async def _both(
    settings: Settings, join: Callable[[], Join], job: str, ask: Callable[[], Decision], folder: Path, signals: Signals
) -> Decision:
    stop = asyncio.create_task(signals.heard(), name="signals")
    try:
        return await _until_answered(settings, join, job, in_thread("the gate's hook", ask), folder, stop)
    finally:
        stop.cancel()


async def _until_answered(
    settings: Settings,
    join: Callable[[], Join],
    job: str,
    answer: asyncio.Future[Decision],
    folder: Path,
    stop: asyncio.Task[None],
) -> Decision:
    member = 0
    while True:
        current = join()
        member += 1
        place = folder / str(member)
        place.mkdir(mode=0o700)
        executor = asyncio.create_task(_run(settings, current, job, place), name="executor")
        changed = asyncio.create_task(_other(join, current), name="look for a new round")
        waited: set[asyncio.Future[object]] = {answer, executor, changed, stop}  # type: ignore[arg-type]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        ended = executor.done() and not answer.done() and not stop.done()
        executor.cancel()
        await asyncio.wait({executor})
        if stop.done():
            if answer.done():
                answer.exception()  # it counts no more
            raise Stopped("a signal")
        if answer.done():
            return answer.result()
        if ended:
            raise executor.exception() or Stopped("the end of the checks of its node")


async def _other(join: Callable[[], Join], current: Join) -> None:
    """Until the hook asks as another member: the group comes together again."""
    while join().member == current.member:  # noqa: ASYNC110 - the other thread changes it, once in a long while
        await asyncio.sleep(0.2)


async def _run(settings: Settings, join: Join, job: str, folder: Path) -> None:
    """The node's daemon as executor: it works on order alone, and speaks beside the node's own daemon."""
    from healthd.hooks.launchers import own_address
    from healthd.node.daemon import run_node

    node = settings.executor(
        join.node,
        settings.gate.aggregator,
        folder,
        address=own_address(),
        ask_seconds=ASK_SECONDS,
        token_file=settings.gate.token_file,
    )
    sync = dataclasses.replace(node.sync, executor=join.member, ca_file=settings.gate.ca_file, backoff_max_seconds=1.0)
    runner = settings.runner(in_job=True, in_fleet=join.size > 1)
    await run_node(dataclasses.replace(node, sync=sync, executor=f"hook:{job}"), runner, signals=False)
