"""
A node whose active checks a hook runs in the job's own container, while its gate is open: pure.

The daemon, where there is one, keeps the word on everything that it alone can know: quarantine, leases, passive
checks, what the host's scheduler has given away. The hook's executor has the word on what the job will meet: devices,
active checks, the way to the other nodes. Nobody's result is taken for the other's: each says its executor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from checks.contract import Tier
from healthd.aggregator.model.nodes import FleetNode
from healthd.core.model import NodeState, Order, OrderKind, OrderReport, OrderStatus

VERSIONS = 1 << 32
"""Versions of an executor's evidence are counted above those of its daemon's."""


def joined(daemon: FleetNode, executor: FleetNode | None) -> FleetNode:
    """
    The node as its gate is to see it; `executor` None: it is to come and has not yet, so that nothing is confirmed.

    The ages of both are as they were received, so they are brought to the same moment here.
    """
    if executor is None or executor.state is None:
        return dataclasses.replace(daemon, confirmed=False)
    if daemon.state is None:
        return dataclasses.replace(
            executor, quarantine=daemon.quarantine, duplicate=daemon.duplicate, version=_version(daemon, executor)
        )
    return dataclasses.replace(
        executor,
        state=_state(daemon, executor, daemon.state, executor.state),
        version=_version(daemon, executor),
        behind_seconds=0.0,
        oldest_seconds=None,
        judged={},
        confirmed=daemon.confirmed and executor.confirmed,
        heard_seconds=_later(daemon.heard_seconds, executor.heard_seconds),
        duplicate=daemon.duplicate,
        quarantine=daemon.quarantine,
        # Of a lease that both have, the daemon's word counts: it is the one that keeps it.
        orders={**executor.orders, **daemon.orders},
        issuer=daemon.issuer,
        machine=daemon.machine,
        failing=daemon.failing,
        event=daemon.event,
    )


def shared(
    orders: Iterable[Order] | None,
    *,
    executing: bool,
    has_daemon: bool,
    own: Mapping[str, OrderReport],
    hooks: Mapping[str, OrderReport],
) -> tuple[tuple[Order, ...] | None, tuple[Order, ...] | None]:
    """
    Which orders the daemon gets and which the executor; `own` and `hooks` are what either reported last.

    Work is the executor's. A lease is the daemon's, where there is one; but the executor takes it first, because only
    then its ranks are off the devices, where the daemon would take them for somebody else's. One that the daemon has
    spoken of stays with it until it has ended.
    """
    if orders is None:
        return None, None
    orders = tuple(orders)
    if not executing:
        return orders, ()
    leases = tuple(order for order in orders if order.kind == OrderKind.LEASE)
    if not has_daemon:
        return leases, orders
    taken = {key for key, report in hooks.items() if report.status == OrderStatus.ACCEPTED}
    return (
        tuple(order for order in leases if order.id in own or order.id in taken),
        tuple(order for order in orders if order.kind != OrderKind.LEASE or order.id in hooks or order.id not in own),
    )


def _state(daemon: FleetNode, executor: FleetNode, own: NodeState, hooks: NodeState) -> NodeState:
    own_now, hooks_now = daemon.current() or own, executor.current() or hooks
    passive = {spec.name for spec in own.checks if spec.tier is Tier.PASSIVE}
    return dataclasses.replace(
        own_now,
        inventory=hooks.inventory,
        versions={**own.versions, **hooks.versions},
        checks=(
            *(spec for spec in own.checks if spec.name in passive),
            *(spec for spec in hooks.checks if spec.name not in passive),
        ),
        results=(
            *(result for result in own_now.results if result.check in passive),
            *(result for result in hooks_now.results if result.check not in passive),
        ),
        # Processes that the daemon sees may be the executor's own workers; the executor sees those in its container.
        # The executor's lease is the one that the daemon is about to get.
        allocated=(
            *(one for one in hooks.allocated if one.by != "lease"),
            *(one for one in own.allocated if one.by == "scheduler"),
        ),
        faults=(*own.faults, *(fault for fault in hooks.faults if fault not in own.faults)),
        running=hooks.running,
        peer_address=hooks.peer_address,
        address=hooks.address,
        compile_seconds=hooks.compile_seconds,
    )


def _version(daemon: FleetNode, executor: FleetNode) -> int:
    return executor.version * VERSIONS + daemon.version


def _later(one: float | None, other: float | None) -> float | None:
    """The longer silence of the two; None where one was never heard."""
    return None if one is None or other is None else max(one, other)
