"""The hand of an aggregator, put together from its settings and what it sees of the fleet."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from healthd.aggregator.drain.controller import DrainController, Note
from healthd.aggregator.drain.model import Actuator
from healthd.aggregator.drain.plan import Candidate, Observed, PoolSize, RejectedNode
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.model import FleetNode, LeaseRow
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantines import Breaker
from healthd.core.errors import ConfigError
from healthd.core.model import Quarantine

# Each module has `make(settings: ActuatorSettings) -> Actuator`; loaded only where it is chosen, for what it imports.
MODULES = {
    "kubernetes": "healthd.aggregator.drain.kubernetes",
    "slurm": "healthd.aggregator.drain.slurm",
    "batch": "healthd.aggregator.drain.batch",
}


class Source(Protocol):
    """What the hand is told of the fleet by the engine."""

    policy: Policy
    """How many nodes of a pool may be out."""

    def quarantines(self) -> Mapping[str, Quarantine]:
        """All, by node."""

    def leases(self) -> Sequence[LeaseRow]:
        """All that are not closed."""

    def breakers(self) -> Mapping[str, Breaker]:
        """Breakers of the rules that have tripped, by pool; "" are nodes without one."""

    def pool_of(self, node: str) -> str | None:
        """The pool of a node as it said last."""

    def present(self, node: str) -> bool:
        """Whether the node was heard within a day."""

    def unsure(self) -> bool:
        """Whether nodes may be out for reasons that are not known, or not yet."""

    def now(self) -> float:
        """Seconds since the epoch by the clock that quarantines go by."""

    async def note(self, subject: str, kind: str, message: str) -> None:
        """A line of a node's history."""


class Nodes(Protocol):
    """What the hand asks the registry."""

    def node(self, name: str) -> FleetNode | None:
        """The node as of now."""

    def names(self) -> Sequence[str]:
        """All known names."""

    def pool(self, pool: str) -> Sequence[str]:
        """The names of a pool."""


def make_actuator(settings: ActuatorSettings) -> Actuator | None:
    """The one that is configured; None where none is. ConfigError says what is missing for it."""
    if settings.kind == "none":
        return None
    name = MODULES[settings.kind]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigError(f"actuator.kind: {settings.kind} needs the package {error.name}; install it") from None
        raise ConfigError(f"actuator.kind: this healthd has no {settings.kind}") from None
    make = cast("Callable[[ActuatorSettings], Actuator]", module.make)
    return make(settings)


def make_drain_controller(settings: ActuatorSettings, source: Source, nodes: Nodes) -> DrainController | None:
    """None where nothing outside of healthd is to be touched."""
    actuator = make_actuator(settings)
    if actuator is None:
        return None
    note: Note = source.note
    return DrainController(
        actuator, settings, look=lambda rejected: observe(source, nodes, rejected), note=note, wall=source.now
    )


def observe(source: Source, nodes: Nodes, rejected: Mapping[str, RejectedNode]) -> Observed:
    """The fleet as of now; a healthy one costs nothing."""

    def known(name: str) -> bool:
        return nodes.node(name) is not None

    quarantines = source.quarantines()
    unsure = source.unsure()
    names = sorted({*quarantines, *rejected})
    if not names:
        return Observed(suspects=(), pools={}, breakers=frozenset(), unsure=unsure, knows=known)
    leased = {row.node for row in source.leases()}
    suspects = []
    for name in names:
        node = nodes.node(name)
        state = node.state if node is not None else None
        suspects.append(
            Candidate(
                node=name,
                aliases=state.aliases if state is not None else (),
                instance_id=state.instance_id if state is not None else None,
                pool=source.pool_of(name) or "",
                quarantine=quarantines.get(name),
                rejected=rejected.get(name),
                faults=bool(state is not None and state.faults),
                # Of a node that nobody has heard of nobody knows: when in doubt, a job has it.
                allocated=state is None or bool(state.allocated or state.leases) or name in leased,
                gone=not source.present(name),
            )
        )
    sizes: dict[str, int] = {
        pool: sum(source.present(name) for name in nodes.pool(pool))
        for pool in {suspect.pool for suspect in suspects}
        if pool
    }
    if any(not suspect.pool for suspect in suspects):
        sizes[""] = sum(source.pool_of(name) is None and source.present(name) for name in nodes.names())
    pools = {pool: PoolSize(size, source.policy.most_out(size)) for pool, size in sizes.items()}
    return Observed(
        suspects=tuple(suspects), pools=pools, breakers=source.breakers().keys(), unsure=unsure, knows=known
    )
