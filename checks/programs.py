"""
Programs as checks: those that speak the monitoring plug-in protocol, and custom plug-ins of the node-problem-detector.

Sources: the Monitoring Plugins Development Guidelines (exit codes, performance data); node-problem-detector,
docs/custom_plugin_monitor.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from checks.contract import Check, Context, Finding, Measurement, NoParams, Program, Scope, Status
from checks.host.machine import Completed, HostError

MAX_MESSAGE_CHARACTERS = 400
MAX_PERFDATA = 32
MAX_PERFDATA_CHARACTERS = 8192

_MONITORING = {0: Status.PASS, 1: Status.WARN, 2: Status.FAIL, 3: Status.UNKNOWN}
_NPD = {0: Status.PASS, 1: Status.FAIL}

# Unit of measurement -> what to multiply with and the unit that our names end in.
_UNITS = {
    "": (1.0, ""),
    "s": (1.0, "_seconds"),
    "ms": (1e-3, "_seconds"),
    "us": (1e-6, "_seconds"),
    "%": (1e-2, "_ratio"),
    "B": (1.0, "_bytes"),
    "KB": (1e3, "_bytes"),
    "MB": (1e6, "_bytes"),
    "GB": (1e9, "_bytes"),
    "TB": (1e12, "_bytes"),
    "KiB": (2.0**10, "_bytes"),
    "MiB": (2.0**20, "_bytes"),
    "GiB": (2.0**30, "_bytes"),
    "c": (1.0, "_total"),
}
_PERFDATA = re.compile(r"(?<!\S)('(?:[^']|'')+'|[^\s=']+)=([-+0-9.eE]+|U)([A-Za-z%]*)((?:;[^;\s]*){0,4})")


def make_program_check(name: str, program: Program) -> Check:
    """A check that runs a program and reads its exit code and words. Raises ValueError for what cannot be meant."""
    if not program.command:
        raise ValueError(f"program {name!r} has no command; set programs.{name}.command")
    if not name.isidentifier():
        raise ValueError(f"program {name!r}: the name must be letters, digits and underscores: it names metrics")
    read = {"monitoring": read_monitoring, "npd": read_npd}[program.protocol]

    def run(ctx: Context[NoParams]) -> Iterator[Finding]:
        try:
            # A little less than the check's own time, so that it is the program that is named, and its group that ends.
            yield read(name, ctx.host.run(program.command, timeout_seconds=max(0.1, program.timeout_seconds - 0.5)))
        except HostError as error:
            yield Finding(status=Status.UNKNOWN, reason=error.reason, message=str(error), target="node")

    # The annotation must be there as an object: the name NoParams is looked up where the check is made.
    run.__annotations__ = {"ctx": Context[NoParams], "return": Iterator[Finding]}
    return Check(
        name=name,
        run=run,
        tier=program.tier,
        interval_seconds=program.interval_seconds,
        timeout_seconds=program.timeout_seconds,
        scope=Scope.NODE,
        doc=f"What the program {program.command[0]} says ({program.protocol} protocol).",
    )


def read_monitoring(name: str, done: Completed) -> Finding:
    """
    The finding in what a monitoring plug-in printed and how it ended.

    A code beyond 3, a signal, or a good end without a word is unknown: it says nothing of the node.
    """
    text, _, perfdata = done.stdout.partition("\n")[0].partition("|")
    status = _MONITORING.get(done.returncode)
    measurements = parse_perfdata(name, perfdata)
    if status is None:
        return _broken(done)
    if not text.strip() and not measurements:
        return _silent(done)
    return _finding(status, text.strip(), measurements)


def read_npd(name: str, done: Completed) -> Finding:
    """
    The finding in what a custom plug-in of the node-problem-detector printed: 0 good, 1 a problem, else unknown.

    Without a word neither counts: a script that dies of an error of its own ends with 1 as well.
    """
    if done.returncode < 0:
        return _broken(done)
    status = _NPD.get(done.returncode, Status.UNKNOWN)
    text = " ".join(done.stdout.split())
    if not text and done.returncode in _NPD:
        return _silent(done)
    return _finding(status, text or f"exit code {done.returncode}", ())


def parse_perfdata(name: str, text: str) -> tuple[Measurement, ...]:
    """
    `'label'=value[UOM];warn;crit;min;max` into measurements `<program>_<label>_<unit>`.

    U (the plug-in's word for unknown) and what is no number become None. The critical range is shown as the limit; it
    was judged by the plug-in, whose word alone counts.
    """
    found = []
    for label, number, unit, rest in _PERFDATA.findall(text[:MAX_PERFDATA_CHARACTERS])[:MAX_PERFDATA]:
        factor, suffix = _UNITS.get(unit, (1.0, f"_{re.sub('[^a-z0-9]', '', unit.lower())}" if unit else ""))
        plain = re.sub(r"[^a-z0-9]+", "_", label.strip("'").lower()).strip("_") or "root"
        critical = [*rest.split(";"), "", "", ""][2]  # `;warn;crit;min;max`, of which any may be left out
        lower, upper = (_scaled(bound, factor) for bound in parse_range(critical))
        found.append(
            Measurement(
                name=f"{name}_{plain}{suffix}",
                value=_scaled(number, factor),
                lower=lower,
                upper=upper,
                origin="none" if lower is None and upper is None else "program",
            )
        )
    return tuple(found)


def parse_range(text: str) -> tuple[str, str]:
    """
    What a value must be within: `10` is 0 to 10, `10:` at least 10, `~:10` at most 10, `10:20` between; empty: any.

    `@10:20`, outside of a range, is more than two bounds can say and gives none.
    """
    if not text or text.startswith("@"):
        return "", ""
    lower, colon, upper = text.partition(":")
    if not colon:
        return "0", text
    return ("" if lower == "~" else lower or "0"), upper


def _scaled(number: str, factor: float) -> float | None:
    """A number in our unit; None for what is no number."""
    try:
        value = float(number) * factor
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _finding(status: Status, text: str, measurements: tuple[Measurement, ...]) -> Finding:
    reason = {Status.PASS: None, Status.UNKNOWN: "NoData"}.get(status, "ProgramFailed")
    message = text[:MAX_MESSAGE_CHARACTERS] or "no text, only numbers"
    return Finding(status=status, reason=reason, message=message, target="node", measurements=measurements)


def _broken(done: Completed) -> Finding:
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    last = f": {said[-1][:MAX_MESSAGE_CHARACTERS]}" if said else ""
    return Finding(
        status=Status.UNKNOWN,
        reason="Crashed" if done.returncode < 0 else "NoData",
        message=f"ended with {how}, which the protocol does not define{last}",
        target="node",
    )


def _silent(done: Completed) -> Finding:
    return Finding(
        status=Status.UNKNOWN,
        reason="NoData",
        message=f"exit code {done.returncode} without output: nothing was measured",
        target="node",
    )
