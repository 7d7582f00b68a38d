"""`healthd warm`: compile the probes ahead."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checks.accelerators import compiles, descriptors
from checks.contract import Scope, Status, Tier
from checks.host import python_packages
from checks.host.running import TimeUpError, run_program
from checks.json_text import parse_json
from healthd.cli.settings.options import common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.core.errors import ConfigError, HealthdError

if TYPE_CHECKING:
    from checks.contract import CheckInfo
    from healthd.core.model import CheckResult
    from healthd.runner.runner import Runner
    from healthd.runner.settings import RunProgress

MAX_ANSWER_BYTES = 1 << 20  # of an interpreter that is asked what it has
# A device check that ended in one of these did not run to its end, so its graphs may not be compiled.
_NOT_COMPILED = frozenset({Status.UNKNOWN, Status.SKIP})
# Reasons of those that had nothing to compile here.
_NOT_ASKED = frozenset({"NotApplicable", "HostFallback", "NoData"})


class WarmError(HealthdError):
    """Nothing could be compiled; the text says why and what to do."""


@click.command(short_help="Compile the probes ahead of time (Trainium, XLA).")
@common_options
@click.option(
    "--tier", multiple=True, default=("quick",), help="Tier to compile for: quick (default), deep; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
def warm(tier: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """
    Compile the probes ahead of time, so that a check before a job finds them compiled.

    Needs idle devices. On accelerators that do not compile there is nothing to do. Exit code: 0 warm, 1 not.
    """
    settings = load_settings(options, section="node")
    say = (lambda text: None) if as_json else click.echo
    try:
        answer = asyncio.run(compile_all(settings, _tiers(tier), say, quiet=as_json))
    except OSError as error:
        raise WarmError(f"{error.filename or 'the compile cache'}: {error.strerror or error}") from None
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
    return 0 if answer["warm"] else 1


async def compile_all(
    settings: Settings, tiers: Sequence[Tier], say: Callable[[str], None], *, quiet: bool
) -> dict[str, Any]:
    """Run every enabled check that compiles, with compilation allowed; what came of it, for JSON."""
    from healthd.cli.check import given_away
    from healthd.node.checks.catalogue import enabled_checks
    from healthd.runner.runner import Runner
    from healthd.runner.settings import Plan

    runner = Runner(settings.runner())
    catalogue = await runner.catalogue()
    taken = await given_away(settings)
    survey = await runner.survey()
    accelerator = survey.inventory.accelerator
    if "error" in survey.raw:
        raise WarmError(f"the devices could not be determined: {survey.raw['error']}")
    if not compiles(accelerator):
        say(f"nothing to compile: accelerator {accelerator} does not compile")
        return {"warm": True, "accelerator": accelerator, "compiles": False, "seconds": 0.0, "checks": {}, "cold": {}}
    specs = enabled_checks(catalogue, settings.node)
    started = time.monotonic()
    cold: dict[str, str] = {}
    checks: dict[str, float] = {}
    for tier in tiers:
        names = [
            spec.name
            for spec in specs
            if spec.tier.rank <= tier.rank and _compiles(catalogue[spec.name]) and spec.tier is not Tier.PASSIVE
        ]
        plan = Plan(tier=tier, checks=tuple(names), executor="warm", warm=True, allocated=taken)
        for result in await _run(runner, plan, quiet):
            name = f"{result.check} ({tier.value})"
            checks[name] = result.compile_seconds
            why = why_cold(result)
            if why is not None:
                cold[name] = why
            say(f"{name}: {why or _took(result.compile_seconds)}")
    seconds = time.monotonic() - started
    say(f"{'not warm' if cold or not checks else 'warm'} after {seconds:.1f} s; cache {settings.compile_cache()}")
    return {
        "warm": bool(checks) and not cold,
        "accelerator": accelerator,
        "compiles": True,
        "seconds": round(seconds, 3),
        "checks": checks,
        "cold": cold,
    }


def ask_packages(python: Path, seconds: float) -> dict[str, Any]:
    """What `python_packages` prints in an interpreter of the vendors' names; `error` alone where it cannot be asked."""
    program = str(Path(python_packages.__file__).resolve())
    names = [name for one in descriptors() if one.own_index is not None for name in one.python_packages]
    try:
        # Bounded also where the kernel holds the interpreter and nothing can kill it.
        _, out, _ = run_program(
            [str(python), "-I", program, *names],
            environment=os.environ,
            timeout_seconds=seconds,
            max_bytes=MAX_ANSWER_BYTES,
        )
        said = parse_json(out)
    except TimeUpError as error:
        rest = "" if error.killed else " and cannot be killed"
        return {"error": f"{python}: did not respond within {seconds:g} s{rest}"}
    except (OSError, ValueError) as error:
        return {"error": f"{python}: {error}"}
    return said if isinstance(said, dict) else {"error": f"{python}: did not report its libraries"}


def _tiers(texts: Sequence[str]) -> list[Tier]:
    known = {tier.value: tier for tier in (Tier.QUICK, Tier.DEEP, Tier.SOAK)}
    for text in texts:
        if text not in known:
            raise ConfigError(f"--tier {text!r}: choose one of: {', '.join(known)}")
    return [known[text] for text in dict.fromkeys(texts)]


def _compiles(info: CheckInfo) -> bool:
    """Whether a check runs on devices, through torch."""
    return info.scope is not Scope.NODE


def why_cold(result: CheckResult) -> str | None:
    """Why a check's graphs may not be compiled; None when it ran to its end on every device, whatever it found."""
    # A worker that was lost leaves an error; it is a failure, not unknown, where that proves a fault of the node.
    if result.status not in _NOT_COMPILED and (result.status is not Status.FAIL or result.error is None):
        return None
    told = [f for f in result.findings if f.status in (Status.UNKNOWN, result.status) and f.reason not in _NOT_ASKED]
    finding = min(told, key=lambda one: one.status is not Status.UNKNOWN, default=None)
    return None if finding is None else f"not compiled: {finding.reason}: {finding.message}"


def _took(seconds: float) -> str:
    return f"compiled in {seconds:.1f} s" if seconds >= 0.05 else "compiled"


async def _run(runner: Runner, plan: Any, quiet: bool) -> tuple[CheckResult, ...]:
    """One plan, with a line on a terminal that says what is being compiled."""
    if quiet or not sys.stderr.isatty():
        return await runner.run(plan)
    from healthd.cli.terminal import render

    started = time.monotonic()
    with render.err().status(f"compiling for the {plan.tier.value} tier") as line:

        def on_progress(progress: RunProgress) -> None:
            what = progress.text if progress.event == "step" else progress.check
            line.update(f"{plan.tier.value} tier, {time.monotonic() - started:.0f} s: {what} on {progress.target}")

        return await runner.run(plan, on_progress=on_progress)
