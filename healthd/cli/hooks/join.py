"""
`healthd gate --join`: the hook of one member of a group, which knows only itself.

Also here:

- `healthd gate --execute`: the hook runs the ordered checks of its node itself while it waits for the answer.
"""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from healthd.cli.hooks import answer
from healthd.cli.settings.gate import GateSettings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.log import log_to_stderr
from healthd.core.errors import ConfigError, HealthdError, OutputError, UnreachableError
from healthd.core.http.client import RefusedError
from healthd.core.http.gates import GateClient, NotAdmittedError
from healthd.core.model import Decision, GateRequest, Join, Verdict
from healthd.core.tasks import OnEnd, Tasks
from healthd.core.threads import in_thread
from healthd.core.workload import with_start
from healthd.hooks.launchers import Place, describe, find_place, find_places
from healthd.hooks.member import GateLine, check_node
from healthd.hooks.stopping import TAKE_BACK_SECONDS, Signals, Stopped, stoppable

LONGEST_WAIT_SECONDS = 7 * 86400.0
"""The aggregator ends a gate at its deadlines; this is for one that never would."""

GONE_SECONDS = 600.0
"""How long the aggregator may be away where `--wait` says nothing."""

MOST_ROUNDS = 3
"""How often a group comes together again because somebody was lost between the answer and the start."""

SETTLE_SECONDS = 90.0
"""Within which all admitted members have confirmed the start, or have not."""

PLACE = Path("/tmp")  # short: a socket lies below
PREFIX = "healthd-gate-"
LEFT_SECONDS = 86400.0
"""How old a folder must be to be one that was left behind; a hook that just starts has not locked its own yet."""
ASK_SECONDS = 5.0
"""How long the aggregator holds an answer to the executor: short, since the gate waits for it."""


def run(settings: Settings, *, as_json: bool) -> int:
    """The whole hook; its exit code."""
    from healthd.cli.terminal.progress import Progress

    def say(line: str) -> None:
        if not as_json:
            click.echo(line, err=True)

    hook = member_of(settings, os.environ, say=say)
    if settings.gate.execute:
        settings.runner(in_job=True)  # what is wrong in its settings is said before anybody waits for this member
        log_to_stderr(logging.WARNING)
    progress = Progress(quiet=as_json)

    def show(decision: Decision) -> None:
        progress.end()
        answer.show(decision, settings.gate, as_json=as_json)

    def away(error: UnreachableError) -> None:
        say(f"healthd: {error}; trying again until it is back")

    try:
        with progress, stoppable() as signals, signals.deferred():
            decision = asyncio.run(follow(hook, signals, on_hold=progress.hold, on_away=away, show=show))
    except UnreachableError as error:
        if answer.may_start(settings.gate, hook.request, error):
            return answer.ADMITTED
        say(f"healthd: {leave(hook)}")
        return answer.NOT_ADMITTED
    except (NotAdmittedError, OutputError) as error:
        raise type(error)(f"{error}; {hook.left or leave(hook)}") from None
    except Stopped as stop:
        click.echo(f"healthd: stopped by {stop}; {hook.left or leave(hook)}", err=True)
        return answer.NOT_ADMITTED
    why = left_out(decision, hook.join)
    if why is not None:
        click.echo(f"healthd: {why}", err=True)
        return answer.NOT_ADMITTED if settings.gate.exit_style == "plain" else answer.IMPOSSIBLE
    return answer.exit_code(decision, settings.gate)


def member_of(settings: Settings, environ: Mapping[str, str], *, say: Callable[[str], None]) -> Hook:
    """The member that the settings, else the launcher, describe. ConfigError names what is missing."""
    asked = settings.gate
    for name, given in (("--pool", asked.pool), ("--count", asked.count), ("--hostfile", asked.hostfile)):
        if given is not None:
            raise ConfigError(f"{name} cannot be combined with --join: a member names only its own node")
    if len(asked.node) > 1:
        raise ConfigError("--join takes exactly one --node: the node of this hook")
    place = find_place(environ, size=asked.size) if asked.size is None or asked.rank is None else None
    if place is not None:
        say(f"healthd: {describe(place)}")
    size, rank = _number(asked.size, place, "size"), _number(asked.rank, place, "rank")
    if not 0 <= rank < size:
        raise ConfigError(f"--rank {rank} must be from 0 to {size - 1}")
    if asked.min_nodes is not None and not 1 <= asked.min_nodes <= size:
        raise ConfigError(f"--min-nodes must be between 1 and {size}, not {asked.min_nodes}")
    leading: list[str] = []
    if asked.min_nodes is not None:
        with contextlib.suppress(ConfigError):  # what is half set matters only to who needs it
            leading = [one.source for one in find_places(environ) if one.main_counts]
    if leading and asked.min_nodes != size:
        # If rank 0 were the one that is left out, its end would be the job's, while the others are at work.
        raise ConfigError(
            f"--min-nodes cannot be combined with {leading[0]}, where the job ends when rank 0 ends; leave it out"
        )
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


async def follow(
    hook: Hook,
    signals: Signals,
    *,
    on_hold: Callable[[Decision], None],
    on_away: Callable[[UnreachableError], None],
    show: Callable[[Decision], None],
) -> Decision:
    """
    Ask until there is a last word that all admitted members have confirmed. `show` prints each before it is confirmed.

    Where one of them is lost before, the group comes together again: the hook asks anew, as another member. A decision
    that admits and was not confirmed by all in the end is a NotAdmittedError. Raises as `GateClient.ask`,
    NotAdmittedError when a signal comes or the checks of its node end, and OutputError where the host file or the
    decision cannot be written: that is found before the start is confirmed.
    """
    for _ in range(MOST_ROUNDS):
        tasks = Tasks()
        tasks.supervise("signals", lambda: _stopped(signals), OnEnd.FATAL)
        try:
            if hook.join.execute:
                tasks.supervise("checks of this node", lambda: check_node(lambda: _run_executor(hook)), OnEnd.FATAL)
            decision = await tasks.first(_answer(hook, on_hold, on_away, show))
        except (UnreachableError, ConfigError):
            raise  # the rule for the first may start the job all the same, and the second was no member
        except HealthdError as error:
            hook.left = await in_thread("leaving the group", lambda: leave(hook))  # first: checks take time to end
            raise error if isinstance(error, OutputError) else NotAdmittedError(str(error)) from None
        finally:
            await tasks.stop(None)
        if decision is not None:
            return decision
        await in_thread("leaving the group", lambda: leave(hook))
        hook.join = dataclasses.replace(hook.join, member=secrets.token_hex(8))
        hook.request = dataclasses.replace(hook.request, join=hook.join)
        click.echo(
            f"healthd: {', '.join(hook.unconfirmed) or 'a member'} did not confirm the start; the group gathers again",
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
        "it came after the group had started",
    )
    return f"rank {join.rank} on {join.node} is left out; the others start without it: {why}"


def leave(hook: Hook) -> str:
    """Tell the gate that this member ends; what came of it, as the end of a sentence."""
    try:
        endpoint = hook.settings.endpoint()
        with GateClient(endpoint, slack_seconds=TAKE_BACK_SECONDS) as aggregator:
            gate = hook.gate or aggregator.newest_gate(hook.request.job)
            if gate is None:
                return "no gate was open yet"
            aggregator.leave(gate, hook.join.member)
    except HealthdError as error:
        return f"its group could not be informed ({error})"
    return "its group is informed"


@dataclass
class Hook:
    """
    One member under way: `gate` is its gate as far as it was heard of. `unconfirmed` are the nodes that did not confirm
    the last start, and `left` what came of telling the group that this member ends, None before.
    """

    settings: Settings
    request: GateRequest
    join: Join
    gate: str | None = None
    unconfirmed: tuple[str, ...] = ()
    left: str | None = None


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


def _number(given: int | None, place: Place | None, name: str) -> int:
    if given is not None:
        return given
    if place is None:
        raise ConfigError(f"--{name} is missing, and no launcher's variables provide it")
    return place.size if name == "size" else place.rank


def _request(asked: GateSettings, place: Place | None, join: Join, environ: Mapping[str, str]) -> GateRequest:
    return dataclasses.replace(
        asked.request(asked.job or join.group),
        attempt=asked.attempt or (place.attempt if place is not None else 0),
        min_nodes=asked.min_nodes,
        workload=with_start(asked.workload) if asked.workload else answer.own_workload(environ, None),
        join=join,
    )


async def _stopped(signals: Signals) -> None:
    await signals.heard()
    raise HealthdError("stopped by a signal")


async def _answer(
    hook: Hook,
    on_hold: Callable[[Decision], None],
    on_away: Callable[[UnreachableError], None],
    show: Callable[[Decision], None],
) -> Decision | None:
    """
    The answer to this member, None where it admits and not all confirm that.

    NotAdmittedError where that cannot be told, also because the aggregator went away: others may know that none goes.
    """
    asked = hook.settings.gate
    line = GateLine(hook.settings.endpoint(), gone_seconds=SETTLE_SECONDS)

    def hold(decision: Decision) -> None:
        hook.gate = decision.id
        on_hold(decision)

    def ask(aggregator: GateClient) -> Decision:
        return aggregator.ask(
            hook.request,
            longest_seconds=LONGEST_WAIT_SECONDS,
            on_hold=hold,
            on_away=on_away,
            gone_seconds=asked.wait_seconds or GONE_SECONDS,
        )

    def tell() -> None:
        if left_out(decision, hook.join) is None:  # who must not start is given no hosts
            answer.write_hosts(decision, asked)
        show(decision)

    try:
        decision = await line.call(ask)
    except RefusedError as error:
        raise error.told from None
    hook.gate = decision.id
    await in_thread("reporting the answer", tell)
    if not _starts(decision, hook.join):
        return decision
    try:
        settled = await line.confirm(decision.id, hook.join.node, seconds=SETTLE_SECONDS)
    except UnreachableError as error:
        raise NotAdmittedError(
            f"group {hook.join.group} was admitted, but its start is not confirmed: {error}"
        ) from None
    hook.unconfirmed = settled.missing
    return decision if settled.go else None


def _starts(decision: Decision, join: Join) -> bool:
    """Whether the answer is one that this member must confirm: an admission that includes it and others."""
    included = any(node.node == join.node for node in decision.nodes)
    return decision.decision is Verdict.ADMIT and decision.would is None and included and len(decision.nodes) > 1


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """What the executor writes in. The kernel lets go of its lock however we end: `sweep` looks for that."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


async def _run_executor(hook: Hook) -> None:
    """The node's daemon as executor: it works on order alone, and speaks beside the node's own daemon."""
    from healthd.hooks.launchers import own_address
    from healthd.node.daemon import run_node

    settings, join = hook.settings, hook.join
    with _folder() as folder:
        node = settings.executor(
            join.node,
            settings.endpoint().urls,
            folder,
            address=own_address(),
            ask_seconds=ASK_SECONDS,
            token_file=settings.gate.token_file,
        )
        sync = dataclasses.replace(
            node.sync, executor=join.member, ca_file=settings.gate.ca_file, backoff_max_seconds=1.0
        )
        node = dataclasses.replace(node, sync=sync, executor=f"hook:{hook.request.job}")
        await run_node(node, settings.runner(in_job=True, in_fleet=join.size > 1), signals=False)
