"""`healthd preflight -- command ...`: node and fleet in one hook, with no standing service."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from healthd.aggregator.policy import Policy
from healthd.cli.settings.options import Command, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.log import log_to_stderr
from healthd.cli.terminal.output import told
from healthd.core.config import key_of
from healthd.core.errors import ConfigError
from healthd.core.model import GateRequest
from healthd.hooks.launchers import Place, address_towards, describe, find_place, traces
from healthd.hooks.preflight.hook import NOT_ADMITTED
from healthd.hooks.stopping import Stopped, stoppable

if TYPE_CHECKING:
    from healthd.hooks.preflight.hook import Outcome, Plain, Start, Task

JOB = "preflight"
SECRET_CHARACTERS = 16
LOOPBACK = "127.0.0.1"
ALONE = "nobody"
"""`Place.source` where no launcher and no option says that there is another node."""
# Fields of the policy that the aggregator of a preflight takes from the main node's configuration.
POLICY = (
    "require",
    "admit_degraded",
    "runtime_seconds",
    "run_seconds",
    "collective_checks",
    "collective_deep_checks",
    "nccom_launch",
    "collective_ports",
    "collective_start_seconds",
    "collective_join_seconds",
    "collective_timeout_seconds",
    "validation_seconds",
    "topology_labels",
)


SECTIONS = {
    "The job and its nodes": ("job", "attempt", "nnodes", "node_rank", "main", "min_nodes"),
    "The request": ("tier", "max_age", "collective", "wait", "mode", "fault"),
    "The answer": ("as_json",),
    "The end of the job": ("run", "exit_style"),
}


@click.command(
    cls=Command,
    sections=SECTIONS,
    examples=(
        "healthd preflight --nnodes 4 --node-rank $RANK --main $HEAD -- python train.py",
        "healthd preflight -- python train.py      # the launcher provides ranks and addresses",
    ),
    context_settings={"ignore_unknown_options": False},
    short_help="Check a job's nodes together, then start COMMAND.",
)
@common_options
@click.option("--nnodes", type=int, metavar="N", help="Number of nodes (default: from the launcher; 1 without one).")
@click.option("--node-rank", type=int, metavar="R", help="Rank of this node, from 0 (default: from the launcher).")
@click.option("--main", metavar="HOST[:PORT]", help="Address of rank 0, where the job's aggregator listens.")
@click.option("--job", metavar="J", help="Name of the job.")
@click.option("--attempt", type=int, metavar="A", help="Number of this attempt of the job.")
@click.option(
    "--min-nodes",
    type=int,
    metavar="M",
    help="Minimum number of healthy nodes to start on (default: all); excluded nodes wait for the job's end.",
)
@click.option("--tier", help="Evidence to require: passive, quick (default) or deep.")
@click.option("--max-age", metavar="T", help="Maximum age of the evidence, such as 10m (default 1h).")
@click.option(
    "--collective/--no-collective",
    default=None,
    help="Run collectives over the nodes together first (default: on for more than one node).",
)
@click.option(
    "--wait",
    metavar="T",
    help=("Maximum time to wait for the admission, such as 5m (default 10m); the value of rank 0 applies."),
)
@click.option("--mode", help="enforce or observe.")
@click.option(
    "--run", is_flag=True, default=None, help="Stay as the command's parent and explain why the job died (healthd run)."
)
@click.option(
    "--exit-style",
    type=click.Choice(["command", "verdict"]),
    help="With --run: exit with the command's code (default) or with a retry code (75, 76, 70, 79).",
)
@click.option(
    "--fault", multiple=True, metavar="FAULT", help="Inject a fault on this node: CHECK[@TARGET]=KIND[:VALUE]."
)
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON before the command starts.")
@click.option("--sidecar", hidden=True, help="Internal, for the hook: descriptor, process id, start and folder.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def preflight(sidecar: str | None, as_json: bool, command: tuple[str, ...], **options: Any) -> int:
    """
    Check the nodes of a job together, then start COMMAND on all of them, or on none.

    Start it on every node; without a launcher or options, the job is this machine alone. Rank 0 runs the aggregator
    while the gate is open. Exit code: the command's, once it has started; 75: not admitted, or stopped by a signal
    before that; 1: impossible as requested; 2: usage.
    """
    settings = load_settings(options, section="preflight")
    place = find_my_place(settings)
    if not command:
        raise ConfigError("no command to start: put it after --, as in 'healthd preflight ... -- python train.py'")
    if sidecar is not None:
        _run_sidecar(settings, place, sidecar)
        return 0
    from healthd.hooks.preflight.hook import become, run_hook

    _main_address(place.main, settings.preflight.port)
    _read_secret(settings.preflight.token_file)
    settings.runner()
    if place.source == ALONE:
        if settings.preflight.nnodes is None:
            sys.stderr.write(
                "healthd: no launcher's variables found, so this machine is the whole job (one node, as with "
                "torchrun --standalone); for several nodes use --nnodes N --node-rank R --main HOST\n"
            )
    elif place.source != "options" and place.local_rank == 0:
        sys.stderr.write(f"healthd: {describe(place)}\n")
    arguments = sys.argv[sys.argv.index("preflight") + 1 :]
    try:
        with stoppable() as signals:
            end = run_hook(
                place,
                command,
                arguments,
                lambda outcome: _show(place, outcome, as_json=as_json),
                signals,
                keeps_notes=settings.preflight.run and place.rank == 0,
            )
    except Stopped as stop:
        click.echo(f"healthd: stopped by {stop}; not admitted", err=True)
        return NOT_ADMITTED
    return end if isinstance(end, int) else become(_command(settings, place, end), end.environment)


def _command(settings: Settings, place: Place, start: Start) -> tuple[str, ...]:
    """What the hook becomes: the command, or `healthd run`, which tells the aggregator of this gate of a bad end."""
    from healthd.hooks.preflight.hook import node_name

    if not settings.preflight.run:
        return start.command
    asked = settings.preflight
    job, attempt = job_of(settings, place)
    tell = ("--job", job, "--attempt", str(attempt), "--node", node_name(place.rank), "--aggregator", start.aggregator)
    token = () if asked.token_file is None else ("--token-file", str(asked.token_file))
    isolated = "-I" if sys.flags.isolated else "-P"
    run = (sys.executable, isolated, "-m", "healthd", "run", *tell, *token, "--exit-style", asked.exit_style)
    return (*run, "--", *start.command)


def job_of(settings: Settings, place: Place) -> tuple[str, int]:
    """The job's name and its attempt."""
    asked = settings.preflight
    return asked.job or place.job or JOB, asked.attempt if asked.attempt is not None else place.attempt


def find_my_place(settings: Settings) -> Place:
    """What the options say, and the launcher where they do not; ConfigError names what is missing or makes no sense."""
    asked = settings.preflight
    where = LOOPBACK if asked.main is None and asked.nnodes == 1 else asked.main  # nobody else has to find it
    explicit = {"--nnodes": asked.nnodes, "--node-rank": asked.node_rank, "--main": where}
    missing = [name for name, value in explicit.items() if value is None]
    found = find_place(os.environ, size=asked.nnodes, main=asked.main) if missing and asked.node_rank is None else None
    if found is not None:
        place = found
    elif len(missing) == len(explicit):
        if some := traces(os.environ):
            raise ConfigError(
                f"no launcher's variables found, but {some[0]} is set, so this may be one process of several: use "
                "--nnodes N --node-rank R --main HOST, or --nnodes 1 if this machine is the whole job"
            )
        place = _this_machine_alone()
    elif missing == ["--node-rank"] and asked.nnodes == 1:
        place = _this_machine_alone(where or LOOPBACK)
    elif missing:
        raise ConfigError(
            f"{missing[0]} is missing: without a launcher, --nnodes, --node-rank and --main are all required"
        )
    else:
        size, rank, main = asked.nnodes or 0, asked.node_rank or 0, where or ""
        place = Place(
            job=None, attempt=0, rank=rank, size=size, main=main, local_rank=0, local_size=1, source="options"
        )
    if place.size < 1:
        raise ConfigError(f"--nnodes must be at least 1, not {place.size}")
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"--node-rank {place.rank} must be from 0 to {place.size - 1}")
    if asked.min_nodes is not None and not 1 <= asked.min_nodes <= place.size:
        raise ConfigError(f"--min-nodes must be between 1 and {place.size}, not {asked.min_nodes}")
    return place


def _this_machine_alone(main: str = LOOPBACK) -> Place:
    return Place(job=None, attempt=0, rank=0, size=1, main=main, local_rank=0, local_size=1, source=ALONE)


def _show(place: Place, outcome: Outcome, *, as_json: bool) -> None:
    from healthd.cli.terminal import decisions, render
    from healthd.core import wire
    from healthd.hooks.preflight.hook import with_hosts

    if as_json and outcome.decision is not None:
        with told(needed=True):
            sys.stdout.write(wire.encode(outcome.decision).decode() + "\n")
    elif outcome.decision is not None:
        console = render.err()
        report = decisions.decision_report(outcome.decision)
        render.show(console, [with_hosts(line, outcome.hosts_of) for line in report])
    if outcome.message:
        sys.stderr.write(f"healthd: rank {place.rank}: {with_hosts(outcome.message, outcome.hosts_of)}\n")


def _run_sidecar(settings: Settings, place: Place, sidecar: str) -> None:
    """In the child: the executor of this node and its line to the main one."""
    from healthd.aggregator.identity.tokens import is_loopback
    from healthd.core import wire
    from healthd.core.threads import in_thread
    from healthd.hooks.preflight.sidecar import ASK_SECONDS, keep
    from healthd.node.daemon import run_node

    descriptor, parent, began, name = sidecar.split(":", 3)
    folder = Path(name)
    task = build_task(settings, place, parent=int(parent), began=float(began))
    token_file = None
    if task.token is not None:
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(task.token, encoding="ascii")
    runner = settings.runner(in_job=True, in_fleet=place.size > 1)
    if is_loopback(task.main):
        # All "nodes" are this machine: they must not take each other's probes for jobs.
        runner = dataclasses.replace(runner, run_dir=folder)
    log_to_stderr(logging.WARNING)

    line = socket.socket(fileno=int(descriptor))

    async def execute() -> None:
        # Not before the main node was reached: until then its name may have no address, and the way to it is not known.
        address = await in_thread("look-up of the main node", lambda: address_towards(task.main, task.port))
        node = settings.executor(
            task.node, (task.url,), folder, address=address, ask_seconds=ASK_SECONDS, token_file=token_file
        )
        await run_node(node, runner, signals=False)

    def prepare(outcome: Outcome) -> bool:
        try:
            line.sendall(wire.encode(outcome) + b"\n")
            return line.recv(1) != b""
        except OSError:
            return False

    def report(outcome: Outcome) -> None:
        _leave_terminal()
        line.sendall(wire.encode(outcome) + b"\n")
        line.close()

    try:
        asyncio.run(keep(task, execute, prepare, report, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_task(settings: Settings, place: Place, *, parent: int, began: float) -> Task:
    """What the sidecar is to do, for a hook that was started at `began` (CLOCK_MONOTONIC)."""
    from healthd.hooks.preflight.hook import Task, node_name

    asked = settings.preflight
    host, port = _main_address(place.main, asked.port)
    if place.source == ALONE and place.main == LOOPBACK:
        port = _free_port()  # nobody else has to know it, and another job may check on this machine at the same time
    job, attempt = job_of(settings, place)
    request = GateRequest(
        job=job,
        attempt=attempt,
        nodes=tuple(node_name(rank) for rank in range(place.size)),
        min_nodes=asked.min_nodes,
        tier=asked.tier,
        max_age_seconds=asked.max_age_seconds,
        wait_seconds=asked.wait_seconds,
        mode=asked.mode,
        collective=asked.collective,
    )
    return Task(
        rank=place.rank,
        size=place.size,
        main=host,
        port=port,
        local_rank=place.local_rank,
        local_size=place.local_size,
        request=request,
        wait_seconds=asked.wait_seconds,
        began=began,
        acknowledge_seconds=asked.acknowledge_seconds,
        gone_seconds=asked.gone_seconds,
        linger_seconds=asked.linger_seconds,
        token=_read_secret(asked.token_file),
        parent=parent,
        main_counts=place.main_counts,
        keeps_notes=asked.run,
        policy=policy_of(settings.policy),
    )


def policy_of(policy: Policy) -> dict[str, Plain]:
    """
    What of `[policy]` concerns one gate's checks and validation, by its keys, as a file has it.

    How long it waits and what it asks are `[preflight]`'s. What is about a standing fleet (rules, quarantines, what is
    kept, limits on other gates) has no meaning for an aggregator that lives for one job's start.
    """
    found: dict[str, Plain] = {}
    for name in POLICY:
        value = getattr(policy, name)
        if isinstance(value, Mapping):
            value = {key.value: seconds for key, seconds in value.items()}
        found[key_of(name)] = list(value) if isinstance(value, tuple) else value
    return found


def _read_secret(file: Path | None) -> str | None:
    """The shared secret of the job's nodes: one word of some length. ConfigError names the file."""
    from healthd.core.http.client import read_token

    if file is None:
        return None
    secret = read_token(file)
    if len(secret) < SECRET_CHARACTERS:
        raise ConfigError(f"{file}: must contain one word of at least {SECRET_CHARACTERS} letters and digits")
    return secret


def _leave_terminal() -> None:
    """A launcher that waits for the end of the job's output must not wait for a sidecar."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _main_address(main: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port`; a bare IPv6 address is a host."""
    host, colon, port = main.rpartition(":")
    if main.startswith("["):
        bare, _, rest = main[1:].partition("]")
        host, port = bare, rest.removeprefix(":") or str(default_port)
    elif not colon or main.count(":") > 1:
        host, port = main, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--main {main!r} is not HOST or HOST:PORT")
    return host, int(port)
