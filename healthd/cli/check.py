"""`healthd check`: run checks here, now, with no daemon."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checks.contract import SEVERITY, Status, Tier, worst
from healthd.cli.completion import complete_checks
from healthd.cli.profiles import new_folder, show_profiles
from healthd.cli.settings.options import Command, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.core.errors import ConfigError
from healthd.core.model import NodeState

if TYPE_CHECKING:
    from checks.contract import CheckInfo
    from checks.worker.faults import Fault
    from healthd.core.model import CheckResult, Inventory
    from healthd.node.state.saving import ProfileFolder
    from healthd.runner.runner import Runner
    from healthd.runner.settings import RunProgress

PRINTER_SECONDS = 0.005  # after the run has begun: its commands have been sent by then

# plain: as every command, 2 is usage alone. A node with warnings may run jobs.
# plugin: monitoring plug-ins of Nagios and Icinga; the worst status, not the largest code.
# npd: the node-problem-detector's plugins say 0 OK, 1 not OK, 2 and above unknown. slurm: a prolog's node is fit or
# not, and one that nobody knows anything about is not. Neither knows warnings: a node with them may run jobs.
STYLES = {
    "plain": {Status.PASS: 0, Status.WARN: 0, Status.FAIL: 1, Status.UNKNOWN: 3},
    "plugin": {Status.PASS: 0, Status.WARN: 1, Status.FAIL: 2, Status.UNKNOWN: 3},
    "npd": {Status.PASS: 0, Status.WARN: 0, Status.FAIL: 1, Status.UNKNOWN: 2},
    "slurm": {Status.PASS: 0, Status.WARN: 0, Status.FAIL: 1, Status.UNKNOWN: 1},
}


@click.command(
    cls=Command,
    examples=(
        "healthd check                     # the quick tier on every device",
        "healthd check --tier passive      # only reads; harmless beside a job",
        "healthd check matmul digest       # two checks",
    ),
)
@common_options
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_checks)
@click.option("--tier", default=None, help="Tier to run: passive, quick (default), deep or soak.")
@click.option(
    "--fault", multiple=True, metavar="FAULT", help="Inject a fault: CHECK[@TARGET]=KIND[:VALUE]; repeatable."
)
@click.option("--profile", is_flag=True, help="Profile one more repetition of each timed operation.")
@click.option(
    "--profile-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for the profiles (default: a new directory here).",
)
@click.option(
    "--localize", is_flag=True, help="If a collective fails, find the rank at fault (always on in the deep tier)."
)
@click.option(
    "--exit-style",
    type=click.Choice(list(STYLES)),
    default="plain",
    help="Exit codes and one line of output for Nagios (plugin), node-problem-detector (npd) or a Slurm prolog.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the node's state, as JSON.")
@click.option("--past", hidden=True, help="The gate of the job that has died here: its lease does not make this busy.")
def check(
    names: tuple[str, ...],
    tier: str | None,
    profile: bool,
    profile_dir: Path | None,
    localize: bool,
    exit_style: str,
    as_json: bool,
    past: str | None,
    **options: Any,
) -> int:
    """
    Check this node now: all checks of a tier, or those named.

    Exit code: 0 pass or warn, 1 fail, 2 usage or configuration, 3 unknown. With --exit-style plugin: 0 pass, 1 warn, 2
    fail, 3 unknown or usage; npd: 0 pass or warn, 1 fail, 2 and above unknown; slurm: 0 pass or warn, else not 0.
    """
    settings = load_settings(options, section="node")
    wanted = _tier(tier)
    profiles = new_folder(settings.node, profile_dir) if profile or profile_dir is not None else None
    state = asyncio.run(
        examine(
            settings, names, wanted, quiet=as_json, localize=localize, profiles=profiles, profile=profile, past=past
        )
    )
    if not names:
        for name in unused_limits(settings.limits, state):
            click.echo(f"healthd: {settings.where('limits', name)}: limits.{name} matched no measurement", err=True)
    if as_json:
        from healthd.core import wire

        sys.stdout.write(wire.encode(state).decode() + "\n")
    elif exit_style != "plain":
        click.echo(one_line(state))
    else:
        from healthd.cli.terminal import render

        console = render.out()
        render.show(console, render.node_report(state))
    if profiles is not None:
        show_profiles(profiles, everything=profile)
    return STYLES[exit_style][worst([reason.status for reason in state.reasons] or [Status.PASS])]


def one_line(state: NodeState) -> str:
    """The node's health and its worst reason: what fits into a node condition or a drain reason."""
    worst_first = sorted(state.reasons, key=lambda reason: -SEVERITY[reason.status])
    why = f": {worst_first[0].code} {' '.join(worst_first[0].message.split())}" if worst_first else ""
    return f"{state.health.value}{why}"


async def examine(
    settings: Settings,
    names: tuple[str, ...],
    tier: Tier | None,
    *,
    quiet: bool,
    localize: bool = False,
    profiles: ProfileFolder | None = None,
    profile: bool = False,
    past: str | None = None,
) -> NodeState:
    """
    Run and report: a NodeState whose health answers strictly what was asked.

    `profiles` keeps the profiles of what is slow; with `profile` everything that is timed is profiled. The lease of the
    gate `past` is no obstacle.

    Raises ConfigError for a name that matches nothing or a fault that makes no sense.
    """
    from healthd.runner.runner import Runner

    wanted = dataclasses.replace(settings.runner(), past=past)
    runner = Runner(dataclasses.replace(wanted, profile="always") if profile else wanted)
    runner.on_profile = profiles.keep if profiles is not None else None
    devices = not names and tier is not Tier.PASSIVE
    async with runner.prestarted(devices=devices):  # from here on children import at the same time as this process
        return await _examine(runner, settings, names, tier, quiet=quiet, localize=localize)


async def _examine(
    runner: Runner, settings: Settings, names: tuple[str, ...], tier: Tier | None, *, quiet: bool, localize: bool
) -> NodeState:
    from healthd.core.evidence import judge_tier
    from healthd.node.checks.catalogue import enabled_checks
    from healthd.node.clock import system_clock
    from healthd.node.state.store import NodeStore
    from healthd.runner.settings import Plan

    host_alone = tier is Tier.PASSIVE and not (
        names or settings.node.checks or settings.node.disabled or settings.node.faults
    )
    catalogue = await runner.catalogue(Tier.PASSIVE if host_alone else Tier.SOAK)  # names are looked for among all
    specs = enabled_checks(catalogue, settings.node)
    for name in names:
        if name not in catalogue:
            import difflib

            near = difflib.get_close_matches(name, catalogue, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "'healthd checks' lists all"
            raise ConfigError(f"no such check: {name!r}; {hint}")
    if names:
        chosen = dataclasses.replace(settings.node, checks=names, disabled=())
        specs = enabled_checks(catalogue, chosen)
    else:
        specs = tuple(spec for spec in specs if spec.tier.rank <= (tier or Tier.QUICK).rank)
    heaviest = max((spec.tier for spec in specs), key=lambda t: t.rank, default=Tier.PASSIVE)
    run_tier = tier or Tier.QUICK
    if names:
        # What was named is run and judged as what it is: a check that failed must not be left out of the verdict.
        run_tier = max((tier or heaviest, heaviest), key=lambda t: t.rank)
    faults = parse_faults(settings.node.faults, catalogue)
    book = NodeStore(settings.node, specs, clock=system_clock(), boot_id=None)
    chosen_names = tuple(spec.name for spec in specs)
    active = any(spec.tier is not Tier.PASSIVE for spec in specs)
    taken = await given_away(settings) if active else None
    plan = Plan(tier=run_tier, checks=chosen_names, executor="check", localize=localize, allocated=taken)
    with _progress(len(specs), run_tier, quiet=quiet) as (on_result, on_progress):

        def record(result: CheckResult) -> None:
            book.record(result)
            on_result(result)

        # What prints the result is loaded while the children work.
        printer = "msgspec" if quiet else "healthd.cli.terminal.render"
        asyncio.get_running_loop().call_later(PRINTER_SECONDS, importlib.import_module, printer)
        await runner.run(plan, faults=faults, on_result=record, on_progress=on_progress)
    if runner.latest is not None:
        _check_targets(faults, runner.latest.inventory)
        book.set_survey(runner.latest)
        book.boot_id = runner.latest.boot_id
    state = book.snapshot()
    asked = min((run_tier, heaviest), key=lambda t: t.rank)
    health, reasons, _ = judge_tier(state, asked, float("inf"))
    return dataclasses.replace(state, health=health, reasons=reasons)


async def given_away(settings: Settings) -> str | None:
    """
    Why the devices are a job's by the word of the host's schedulers; None where they have given nothing away.

    A job that was just placed holds no device yet. The job that this process runs in is none of those.
    """
    from healthd.node.clock import system_clock
    from healthd.node.occupancy.occupancy import Schedulers

    schedulers = Schedulers(settings.node.allocations, settings.node.host_root, clock=system_clock())
    for reading in (await schedulers.look()).readings:
        if reading.workloads:
            first, *others = reading.workloads
            uses = f" ({first.uses})" if first.uses else ""
            more = f" and {len(others)} more" if others else ""
            text = f"{reading.scheduler} has given this node to {first.name}{uses}{more}"
            return f"{text}; wait until it ends, or list it in node.allocations.ignore if it never uses the devices"
    return None


def unused_limits(limits: Mapping[str, object], state: NodeState) -> tuple[str, ...]:
    """Limits that judged nothing in a whole run: a name that is misspelt would otherwise go unnoticed."""
    if not limits:
        return ()
    from checks.collective.nccom.launch import PREFIX
    from healthd.runner.settings import BETWEEN_NODES

    measured = {m.name for result in state.results for finding in result.findings for m in finding.measurements}
    inside = (name for name in limits if not name.startswith((BETWEEN_NODES, PREFIX)))
    return tuple(name for name in inside if name.partition("@")[0].partition("/")[0] not in measured)


def parse_faults(texts: tuple[str, ...], catalogue: Mapping[str, CheckInfo]) -> tuple[Fault, ...]:
    """The faults that texts mean, on checks that there are; ConfigError for any other."""
    from checks.worker.faults import parse_fault

    scopes = {name: info.scope.value for name, info in catalogue.items()}
    try:
        return tuple(parse_fault(text, scopes) for text in texts)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


def _check_targets(faults: Sequence[Fault], inventory: Inventory) -> None:
    """A drill that strikes nothing must not look like a pass."""
    from checks.worker.faults import check_target

    devices = [device.target for device in inventory.devices]
    try:
        for fault in faults if devices else ():
            check_target(fault, devices, inventory.workers)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


def _tier(text: str | None) -> Tier | None:
    try:
        return None if text is None else Tier(text)
    except ValueError:
        raise ConfigError(f"--tier {text!r}: choose one of: {', '.join(tier.value for tier in Tier)}") from None


Callbacks = tuple[Callable[["CheckResult"], None], Callable[["RunProgress"], None] | None]


@contextlib.contextmanager
def _progress(count: int, tier: Tier, *, quiet: bool) -> Iterator[Callbacks]:
    """A line that moves on a terminal: how many are done, what runs now."""
    if quiet or not sys.stderr.isatty() or tier is Tier.PASSIVE:
        yield (lambda result: None), None
        return
    from healthd.cli.terminal import render

    done: list[str] = []
    running: dict[tuple[str, str], None] = {}
    with render.err().status("starting") as line:

        def on_result(result: CheckResult) -> None:
            done.append(result.check)
            show()

        def on_progress(progress: RunProgress) -> None:
            key = (progress.check, progress.target)
            if progress.event == "started":
                running[key] = None
            elif progress.event == "ended":
                running.pop(key, None)
            show()

        def show() -> None:
            now = ", ".join(f"{name} on {target}" for name, target in list(running)[-3:])
            line.update(f"{tier.value} tier: {len(done)} of {count} checks done" + (f"; {now}" if now else ""))

        yield on_result, on_progress
