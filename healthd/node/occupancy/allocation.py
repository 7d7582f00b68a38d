"""Who has the devices: pure. What cannot be seen counts as taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from healthd.core.model import Allocation, Lease
from healthd.node.occupancy.record import Workload

# Holders listed one by one; on a node with 64 devices one job is otherwise 64 lines in every outlet.
MAX_HOLDERS = 8


def allocations(
    *,
    surveyed: bool,
    holders: Sequence[str] | None,
    leases: Sequence[Lease],
    scheduled: Sequence[str] = (),
    blind: str = "",
    doubt: str = "",
) -> tuple[Allocation, ...]:
    """
    All claims on the devices; empty means free.

    `surveyed` is false until the devices have been looked at for the first time. `holders` are processes other than our
    own probes, None where they cannot be seen. `scheduled` are workloads that the host's schedulers have here, by the
    names that gates and leases use; `blind` is why there may be more of them, empty when all are seen. `doubt` is why
    there may be leases that are not known here; empty when there are none.
    """
    found: list[Allocation] = []
    if not surveyed:
        found.append(Allocation(by="unseen", holder="the devices have not been looked at yet"))
    elif holders is None:
        why = f"; nor what a scheduler has given away: {blind}" if blind else ""
        found.append(Allocation(by="unseen", holder=f"it cannot be seen who holds the devices{why}"))
    else:
        found += _bounded("process", holders)
    found += _bounded("scheduler", scheduled)
    found += [
        Allocation(by="lease", holder=f"job {lease.job} attempt {lease.attempt} (gate {lease.gate})")
        for lease in leases
    ]
    if doubt:
        found.append(Allocation(by="unseen", holder=doubt))
    return tuple(found)


def foreign(
    claims: Sequence[Allocation], workloads: Sequence[Workload], asking: Collection[str | None]
) -> tuple[Allocation, ...]:
    """
    The claims without those by which the host's schedulers have given the devices to the jobs that ask, by their names:
    a hook runs inside of its job's allocation.
    """
    own = {workload.name for workload in workloads if not set(asking).isdisjoint(workload.names)}
    return tuple(claim for claim in claims if not (claim.by == "scheduler" and claim.holder in own))


def _bounded(by: str, holders: Sequence[str]) -> list[Allocation]:
    """One claim each, at most MAX_HOLDERS and one that says how many more."""
    found = [Allocation(by=by, holder=holder) for holder in holders[:MAX_HOLDERS]]
    if len(holders) > MAX_HOLDERS:
        found.append(Allocation(by=by, holder=f"and {len(holders) - MAX_HOLDERS} more"))
    return found


def describe(claims: Sequence[Allocation]) -> str:
    """The first claim and how many more there are, for one line."""
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return f"{claims[0].holder}{more}" if claims else "nobody"
