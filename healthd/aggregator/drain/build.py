"""The hand of an aggregator, put together from its settings and what it sees of the fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from healthd.aggregator.controller.controller import Engine
from healthd.aggregator.drain import batch, kubernetes, slurm
from healthd.aggregator.drain.controller import DrainController
from healthd.aggregator.drain.model import Actuator
from healthd.aggregator.drain.plan import Candidate, Observed, PoolSize, RejectedNode
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.inventory.registry import Fleet


def make_actuator(settings: ActuatorSettings) -> Actuator | None:
    """The one that is configured; None where none is. ConfigError says what is missing for it."""
    makers: Mapping[str, Callable[[ActuatorSettings], Actuator]] = {
        "kubernetes": kubernetes.make,
        "slurm": slurm.make,
        "batch": batch.make,
    }
    return None if settings.kind == "none" else makers[settings.kind](settings)


def make_drain_controller(settings: ActuatorSettings, source: Engine, nodes: Fleet) -> DrainController | None:
    """None where nothing outside of healthd is to be touched."""
    actuator = make_actuator(settings)
    if actuator is None:
        return None
    return DrainController(
        actuator, settings, look=lambda rejected: observe(source, nodes, rejected), note=source.note, wall=source.now
    )


def observe(source: Engine, nodes: Fleet, rejected: Mapping[str, RejectedNode]) -> Observed:
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
