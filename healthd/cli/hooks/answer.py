"""
What a hook does with the answer: exit code, lines for people, host file; and without one, by the operator's rule.

Used by `healthd gate` and by hooks that join.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from checks.printable import printable_line
from healthd.cli.settings.gate import GateSettings
from healthd.cli.terminal.output import told
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, OutputError, UnreachableError, words_of
from healthd.core.model import Decision, GateRequest, Verdict
from healthd.core.text import counted, span
from healthd.core.workload import own_pod
from healthd.integrations import INTEGRATIONS

ADMITTED, IMPOSSIBLE, NOT_ADMITTED = 0, 1, 75

MAX_BYTES = 64 << 20
"""100,000 nodes with names of 20 characters, and a line for each of 32 slots."""

MAX_AGE_SECONDS = 600.0
"""How old evidence may be for the node's own verdict, where the gate does not say."""

_SLOTS = re.compile(r"^([^:]+):\d+$")  # a name and how many ranks it takes; an IPv6 address has more colons


def may_start(asked: GateSettings, request: GateRequest, error: UnreachableError) -> bool:
    """
    Whether the job may start although no aggregator answers; says on standard error by which rule, and why not.

    Raises OutputError where it may, and its nodes cannot be written to the host file.
    """
    rule = asked.on_unreachable
    names = nodes_of(request)
    why, end = "", "starting without a gate"
    if rule == "hold":
        why = "not admitted"
    elif rule == "local":
        why = own_verdict(asked, request)
        end = f"node {names[0]} reports that it is ready" if names else ""
    if not why and asked.hostfile_out is not None and not names:
        why = (
            f"{asked.hostfile_out} cannot be written because the nodes are unknown without an aggregator; not admitted"
        )
    click.echo(f"healthd: {error}; on_unreachable={rule}: {why or end}", err=True)
    if not why and asked.hostfile_out is not None:
        write_hostfile(asked.hostfile_out, names)
    return not why


def nodes_of(request: GateRequest) -> tuple[str, ...]:
    """The names of all nodes that are asked for; empty where only the aggregator knows them."""
    if request.join is not None:
        return (request.join.node,) if request.join.size == 1 else ()
    return request.nodes


def own_verdict(asked: GateSettings, request: GateRequest) -> str:
    """
    Why this node may not go by its own verdict, or what speaks against it; empty where the node is fit for the job.

    A daemon speaks for its node alone, so it must be the only one that is asked for.
    """
    names = nodes_of(request)
    if len(names) != 1:
        if request.join is not None:
            many = f"group {request.join.group} has {request.join.size} members"
        else:
            many = f"{len(names)} nodes were requested" if names else f"nodes of pool {request.pool} were requested"
        return f"{many}, but a daemon answers only for its own node; not admitted"
    query = {
        "node": names[0],
        "tier": asked.tier.value if asked.tier else "quick",
        "max_age": f"{MAX_AGE_SECONDS if asked.max_age_seconds is None else asked.max_age_seconds:g}",
    }
    if request.workload:
        query["workload"] = request.workload
    from healthd.cli.hooks.readiness import ask_readiness

    found = ask_readiness(asked.local_url, query)
    if found.fit:
        return ""
    if found.fit is None:
        return f"{found.why}; set gate.local_url to the daemon of this node"
    return f"node {names[0]} is not ready: {found.why}"


def own_workload(environ: Mapping[str, str], nodes: Sequence[str] | None) -> str | None:
    """
    What the host's scheduler calls the job that this hook runs in: its allocation is no obstacle to its own gate, and
    the lease ends with it. `nodes` are those that are asked for, None for the hook's own: a pod may ask for others,
    whose jobs have nothing to do with its end.
    """
    for variable, kind in (one.job_workload for one in INTEGRATIONS if one.job_workload is not None):
        if job := environ.get(variable):
            return f"{kind}{job}"
    here = nodes is None or (len(nodes) == 1 and environ.get("NODE_NAME") in (None, nodes[0]))
    return own_pod(environ) if here else None


def write_hosts(decision: Decision, asked: GateSettings) -> None:
    """Write the host file of an admission, by the names that were asked for. OutputError where that cannot be done."""
    if decision.decision is Verdict.ADMIT and asked.hostfile_out is not None:
        write_hostfile(asked.hostfile_out, (node.asked or node.node for node in decision.nodes))


def finish(decision: Decision, asked: GateSettings, *, as_json: bool) -> int:
    """Show a decision and say the exit code. OutputError where it cannot be shown."""
    show(decision, asked, as_json=as_json)
    return exit_code(decision, asked)


def show(decision: Decision, asked: GateSettings, *, as_json: bool) -> None:
    """Print a decision. OutputError where that cannot be done."""
    with told(needed=as_json):
        if as_json:
            from healthd.core import wire

            sys.stdout.write(wire.encode(decision).decode() + "\n")
        elif asked.exit_style != "plain":
            admitted = counted(len(decision.nodes), "node")
            why = " ".join(decision.reasons[0].message.split()) if decision.reasons else admitted
            click.echo(f"{decision.decision.value}: {why}")
        else:
            from healthd.cli.terminal import decisions, render

            render.show(render.out(), decisions.decision_report(decision))
            if text := lease_line(decision):
                click.echo(f"  {text}")


def lease_line(decision: Decision) -> str:
    """How long the nodes are the job's, for who starts it; empty where it has no lease."""
    seconds = decision.policy.get("lease_seconds")
    if (
        decision.decision is not Verdict.ADMIT
        or not decision.nodes
        or not isinstance(seconds, int | float)
        or not seconds
    ):
        return ""
    asked = decision.request is not None and decision.request.lease_seconds is not None
    return (
        f"leased until the job ends, or for {span(seconds)} if its end cannot be observed "
        f"({'as requested' if asked else 'set with --lease'})"
    )


def again_line(decision: Decision, asked_seconds: float) -> str:
    """
    How to ask anew, where a "no" is the answer to an earlier question; empty for any other decision. `asked_seconds` is
    how long ago this question was asked.
    """
    age, request = decision.decided_seconds_ago, decision.request
    if decision.decision is not Verdict.REJECT or age is None or request is None or age <= asked_seconds:
        return ""
    return f"decided {span(age)} ago; ask again with --attempt {request.attempt + 1}"


def exit_code(decision: Decision, asked: GateSettings) -> int:
    """What a decision comes to for who started this."""
    if decision.decision is not Verdict.ADMIT:
        # In other styles every "no" is 1: what is not known is never said here, but by UnreachableError (75).
        return NOT_ADMITTED if decision.retryable and asked.exit_style == "plain" else IMPOSSIBLE
    return ADMITTED


def read_hostfile(file: Path | None) -> tuple[str, ...]:
    """
    Names of nodes, one a line; what follows the name (`n1 slots=8`, `n1:8`) and comments are left out.

    A name that comes again is the same node once more: some schedulers write a line for each slot.
    """
    if file is None:
        return ()
    try:
        lines = read_file(file, MAX_BYTES).decode().splitlines()
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the host file cannot be read: {words_of(error)}") from None
    words = (line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip())
    names = tuple(dict.fromkeys(_SLOTS.sub(r"\1", word) for word in words))
    if not names:
        raise ConfigError(f"{file}: the host file is empty; write one node name per line")
    return names


def write_hostfile(file: Path, names: Iterable[str]) -> None:
    """Write the nodes of a job. OutputError where that cannot be done: then the job must not start."""
    try:
        file.write_text("".join(f"{printable_line(name)}\n" for name in names), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot write the host file: {words_of(error)}") from None
