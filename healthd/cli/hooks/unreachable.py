"""What a hook does while the aggregator is away: by the rule that the operator chose, and nothing is hidden."""

from __future__ import annotations

import click

from healthd.cli.hooks.hostfile import write_hostfile
from healthd.cli.hooks.readiness import ask_readiness
from healthd.cli.settings.hooks import GateSettings
from healthd.core.errors import UnreachableError
from healthd.core.model import GateRequest

MAX_AGE_SECONDS = 600.0
"""How old evidence may be for the node's own verdict, where the gate does not say."""


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
        end = f"node {names[0]} says that it is ready" if names else ""
    if not why and asked.hostfile_out is not None and not names:
        why = f"{asked.hostfile_out} cannot be written, for without an aggregator the nodes are not known; not admitted"
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
            many = f"{len(names)} nodes are asked for" if names else f"nodes of pool {request.pool} are asked for"
        return f"{many}, and a daemon speaks for its own node alone; not admitted"
    query = {
        "node": names[0],
        "tier": asked.tier.value if asked.tier else "quick",
        "max_age": f"{MAX_AGE_SECONDS if asked.max_age_seconds is None else asked.max_age_seconds:g}",
    }
    if request.workload:
        query["workload"] = request.workload
    found = ask_readiness(asked.local_url, query)
    if found.fit:
        return ""
    if found.fit is None:
        return f"{found.why}; name the daemon of this node with gate.local_url"
    return f"node {names[0]} is not ready: {found.why}"
