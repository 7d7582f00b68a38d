"""`healthd preflight -- command ...`: node and fleet in one hook, with no standing service."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from healthd.cli.settings import Settings, common_options, load_settings
from healthd.errors import ConfigError, HealthdError
from healthd.launchers import Place, find_place
from healthd.model import GateRequest

NOT_ADMITTED = 75
JOB = "preflight"


@click.command(context_settings={"ignore_unknown_options": False})
@common_options
@click.option("--nnodes", type=int, metavar="N", help="How many nodes the job has (else from the launcher).")
@click.option("--node-rank", type=int, metavar="R", help="Which of them this is, from 0.")
@click.option("--main", metavar="HOST[:PORT]", help="Where rank 0 is; its aggregator listens there.")
@click.option("--job", metavar="J", help="The job's name.")
@click.option("--attempt", type=int, metavar="A", help="Which attempt of the job this is.")
@click.option("--min-nodes", type=int, metavar="M", help="Start with so many good nodes; the others park.")
@click.option("--tier", help="What evidence is asked: passive, quick, deep.")
@click.option("--max-age", metavar="T", help="How old evidence may be.")
@click.option("--wait", metavar="T", help="How long to hold before giving up.")
@click.option("--mode", help="enforce or observe.")
@click.option("--fault", multiple=True, metavar="FAULT", help="Inject a fault here: CHECK[@TARGET]=KIND[:VALUE].")
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON before the command starts.")
@click.option("--keeper", type=int, hidden=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def preflight(keeper: int | None, as_json: bool, command: tuple[str, ...], **options: Any) -> int:
    """
    Check the nodes of a job together, then start COMMAND on all of them, or on none.

    Started on every node. Rank 0 runs the aggregator for as long as the gate lasts. Exit code: the command's, once it
    has started; 75: not admitted; 1: impossible as asked; 2: usage.
    """
    settings = load_settings(options, section="preflight")
    place = find_my_place(settings)
    if not command:
        raise ConfigError("no command to start: write it after --, as in 'healthd preflight ... -- python train.py'")
    if keeper is not None:
        _run_keeper(settings, place, keeper)
        return 0
    return _run_hook(place, command, as_json=as_json)


def find_my_place(settings: Settings) -> Place:
    """What the options say, else the launcher; ConfigError names what is missing or makes no sense."""
    asked = settings.preflight
    explicit = {"--nnodes": asked.nnodes, "--node-rank": asked.node_rank, "--main": asked.main}
    given = [name for name, value in explicit.items() if value is not None]
    if not given:
        place = find_place(os.environ)
        if place is None:
            raise ConfigError("no launcher's variables found: say --nnodes N --node-rank R --main HOST")
    elif len(given) < 3:
        missing = next(name for name in explicit if name not in given)
        raise ConfigError(f"{missing} is missing: --nnodes, --node-rank and --main go together")
    else:
        size, rank, main = asked.nnodes or 0, asked.node_rank or 0, asked.main or ""
        place = Place(
            job=None, attempt=0, rank=rank, size=size, main=main, local_rank=0, local_size=1, source="options"
        )
    if place.size < 1:
        raise ConfigError(f"--nnodes must be at least 1, not {place.size}")
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"--node-rank {place.rank} is not one of 0 to {place.size - 1}")
    if asked.min_nodes is not None and not 1 <= asked.min_nodes <= place.size:
        raise ConfigError(f"--min-nodes must be between 1 and {place.size}, not {asked.min_nodes}")
    return place


def _run_hook(place: Place, command: tuple[str, ...], *, as_json: bool) -> int:
    """Start the keeper, wait for its word, and become the command, park, or end."""
    from healthd import wire
    from healthd.preflight import Outcome

    read_end, write_end = os.pipe()
    arguments = [sys.executable, "-m", "healthd", *sys.argv[1:]]
    arguments[4:4] = ["--keeper", str(write_end)]
    keeper = subprocess.Popen(arguments, pass_fds=(write_end,), stdin=subprocess.DEVNULL)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        line = pipe.readline()
    if not line:
        keeper.wait()
        raise HealthdError("the keeper of this node ended without a word; not admitted")
    outcome = wire.decode(line, Outcome, what="the keeper's word")
    _show(place, outcome, as_json=as_json)
    if outcome.kind == "park":
        sys.stderr.write("healthd: this node was left out; waiting for the job to end\n")
        keeper.wait()
        return 0
    if outcome.kind == "exit" or outcome.decision is None:
        keeper.wait()
        return outcome.code or NOT_ADMITTED
    if not outcome.decision.excluded:
        keeper.wait()  # nobody is parked, so the keeper has nothing left to keep
    environment = job_environment(place, outcome)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - the hook becomes the job's command
    except OSError as error:
        raise HealthdError(f"{command[0]}: cannot be started: {error.strerror}") from None


def job_environment(place: Place, outcome: Any) -> dict[str, str]:
    """What the command is told: its number among the admitted, and the launcher's own variables to match."""
    environment = dict(os.environ)
    environment.update(HEALTHD_RANK=str(outcome.rank), HEALTHD_NNODES=str(outcome.size), HEALTHD_MAIN=str(outcome.main))
    if place.source == "torchrun":
        from healthd.launchers import torchrun

        environment.update(torchrun.renumber(os.environ, rank=outcome.rank, size=outcome.size, main=outcome.main))
    with tempfile.NamedTemporaryFile("w", prefix="healthd-hosts-", suffix=".txt", delete=False) as hosts:
        hosts.write("".join(f"{host}\n" for host in outcome.hosts))
    environment["HEALTHD_HOSTFILE"] = hosts.name
    return environment


def _show(place: Place, outcome: Any, *, as_json: bool) -> None:
    from healthd import wire
    from healthd.cli import render

    if as_json and outcome.decision is not None:
        sys.stdout.write(wire.encode(outcome.decision).decode() + "\n")
        sys.stdout.flush()
    elif outcome.decision is not None:
        console = render.err()
        for line in render.decision_report(outcome.decision):
            console.print(line)
    if outcome.message:
        sys.stderr.write(f"healthd: rank {place.rank}: {outcome.message}\n")


def _run_keeper(settings: Settings, place: Place, descriptor: int) -> None:
    """In the child: the executor of this node and its line to the main one."""
    from healthd import wire
    from healthd.fleet.auth import is_loopback
    from healthd.node.daemon import run_node
    from healthd.preflight import Outcome, Task, keep, node_name

    asked = settings.preflight
    host, port = _main_address(place.main, asked.port)
    request = GateRequest(
        job=asked.job or place.job or JOB,
        attempt=asked.attempt if asked.attempt is not None else place.attempt,
        nodes=tuple(node_name(rank) for rank in range(place.size)),
        min_nodes=asked.min_nodes,
        tier=asked.tier,
        max_age_seconds=asked.max_age_seconds,
        wait_seconds=asked.wait_seconds,
        mode=asked.mode,
    )
    task = Task(
        rank=place.rank,
        size=place.size,
        main=host,
        port=port,
        local_rank=place.local_rank,
        request=request,
        wait_seconds=asked.wait_seconds,
        token_file=asked.token_file,
        parent=os.getppid(),
    )

    def report(outcome: Outcome) -> None:
        os.write(descriptor, wire.encode(outcome) + b"\n")
        os.close(descriptor)

    with tempfile.TemporaryDirectory(prefix="healthd-preflight-") as folder:
        node = settings.executor(task.node, task.url, Path(folder), address=_own_address(host, port))
        runner = settings.runner()
        if runner.run_dir is not None and is_loopback(host):
            # All "nodes" are this machine: they must not take each other's probes for jobs.
            runner = dataclasses.replace(runner, run_dir=runner.run_dir / task.node)
        asyncio.run(keep(task, lambda: run_node(node, runner), report))


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


def _own_address(main: str, port: int) -> str:
    """The address by which the main node's network sees this one; the host name where that cannot be told."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(main, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket sends nothing here: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
