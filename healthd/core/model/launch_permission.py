"""
Which launches a round of nccom-test over several nodes may ask for: pure, and judged alike wherever one passes.

mpirun on the main node wants its daemon started on each other node. Its words go from the main node's daemon to the
aggregator and from there to the node, and each of the three asks `judge` by the order of the group as it knows it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from checks.collective.nccom.launch import Plan
from checks.collective.nccom.plan import OPERATIONS, Step, plan_steps
from checks.collective.nccom.vector import Accepted, Refused, accepts
from checks.contract import Tier
from healthd.core.model import CollectiveOrder, Launch, LaunchOrder, NccomGroup

PREFIX = "nccom_nodes_"
"""Of the names of checks that are rounds over nodes: those on one node have limits of their own."""

MAX_LAUNCH_CHARACTERS = 96 * 1024
"""Of all launches that a main node reports at a time: they are a part of its sync request, which is bounded."""


def checks_over_nodes(names: Iterable[str]) -> tuple[str, ...]:
    """The collectives that nccom-test can run, as it is told to: `all_reduce` -> `nccom_nodes_all_reduce`."""
    return tuple(PREFIX + name for name in names if f"nccom_{name}" in OPERATIONS)


def step_of(order: CollectiveOrder, check: str) -> Step:
    """What nccom-test is to do for a check of an order: the sizes of the quick tier over all ranks of the group."""
    (step,) = plan_steps(f"nccom_{check.removeprefix(PREFIX)}", Tier.QUICK, ranks=order.size, counts=())
    return step


def round_of(order: CollectiveOrder, check: str) -> str:
    """The name of the round of one check of a group, in the letters that may be in one."""
    return re.sub(r"[^A-Za-z0-9_.-]", ".", f"{order.group}.{order.checks.index(check)}")[-64:]


def own_node(order: CollectiveOrder, nccom: NccomGroup) -> str | None:
    """Which of the nodes an order is for; None where that makes no sense."""
    index, rest = divmod(order.first_rank, order.ranks) if order.ranks > 0 else (-1, 0)
    whole = order.size == order.ranks * len(nccom.nodes) and len(nccom.nodes) == len(nccom.hosts)
    return nccom.nodes[index] if whole and not rest and 0 <= index < len(nccom.nodes) else None


def plan_of(order: CollectiveOrder, nccom: NccomGroup, check: str, *, job_id: str | None = None) -> Plan:
    """The plan of a check's round as far as the launches of it are concerned: what the main node runs is left out."""
    return Plan(
        round=round_of(order, check),
        mode=nccom.mode,
        hosts=nccom.hosts,
        main_addresses=(order.main,),
        argv=(),
        environment={"NEURON_RT_ROOT_COMM_ID": meeting_point(order)},
        job_id=job_id,
    )


def meeting_point(order: CollectiveOrder) -> str:
    """Where the Neuron runtime of the first rank waits for the others."""
    return f"[{order.main}]:{order.port}" if ":" in order.main else f"{order.main}:{order.port}"


def judge(order: CollectiveOrder, launch: Launch, known: Sequence[Launch]) -> Accepted | Refused:
    """
    Whether a launch is the planned one. `known` are those of the group that were accepted before it.

    The first of a check says which job of mpirun it is; each node gets one daemon in it, the main node none.
    """
    nccom = order.nccom
    if nccom is None:
        return Refused(reason=f"group {order.group} is not run by nccom-test")
    if launch.check not in order.checks:
        return Refused(reason=f"{launch.check[:64]!r} is no check of group {order.group}")
    if launch.node not in nccom.nodes[1:]:
        return Refused(reason=f"{launch.node[:64]!r} is no node of group {order.group} that is started by another")
    host = nccom.hosts[nccom.nodes.index(launch.node)]
    plan = plan_of(order, nccom, launch.check)
    before: list[Accepted] = []
    for one in known:
        if one.check != launch.check or one == launch:
            continue
        if one.node == launch.node:
            return Refused(reason=f"{launch.node} was told to start something else for {launch.check} already")
        found = _known(plan.round, plan.mode, plan.hosts, plan.main_addresses, one.argv)
        if isinstance(found, Accepted):
            before.append(found)
    if before:
        plan = dataclasses.replace(plan, job_id=before[0].job_id)
    found = accepts(plan, launch.argv, me=host)
    if isinstance(found, Accepted) and found.daemon in [one.daemon for one in before]:
        return Refused(reason=f"daemon {found.daemon} of job {found.job_id} is another node's")
    return found


@functools.lru_cache(maxsize=1024)
def _known(
    name: str, mode: str, hosts: tuple[str, ...], main_addresses: tuple[str, ...], argv: tuple[str, ...]
) -> Accepted | Refused:
    """Of a launch that was judged before: each new one asks for all of them, and words take a millisecond to read."""
    plan = Plan(round=name, mode=mode, hosts=hosts, main_addresses=main_addresses, argv=(), environment={})
    return accepts(plan, argv)


def launch_of(order: CollectiveOrder, check: str, argv: Sequence[str]) -> Launch | Refused:
    """Whose launch it is, by the host that mpirun names first."""
    nccom = order.nccom
    if nccom is None or not argv or argv[0] not in nccom.hosts:
        host = argv[0][:64] if argv else ""
        return Refused(reason=f"{host!r} is no host of group {order.group}")
    return Launch(check=check, node=nccom.nodes[nccom.hosts.index(argv[0])], argv=tuple(argv))


def as_launch(order: LaunchOrder, node: str) -> Launch:
    """An order as what the main node asked for."""
    return Launch(check=order.check, node=node, argv=order.argv)
