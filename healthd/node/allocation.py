"""Who has the devices: pure. What cannot be seen counts as taken."""

from __future__ import annotations

from collections.abc import Sequence

from healthd.model import Allocation, Lease

# Holders listed one by one; on a node with 64 devices one job is otherwise 64 lines in every outlet.
MAX_HOLDERS = 8


def allocations(
    *,
    surveyed: bool,
    holders: Sequence[str] | None,
    leases: Sequence[Lease],
    scheduled: Sequence[str] = (),
    doubt: str = "",
) -> tuple[Allocation, ...]:
    """
    All claims on the devices; empty means free.

    `surveyed` is false until the devices have been looked at for the first time. `holders` are processes other than our
    own probes, None where they cannot be seen. `scheduled` are allocations that the host's scheduler reports.
    `doubt` is why there may be leases that are not known here; empty when there are none.
    """
    found: list[Allocation] = []
    if not surveyed:
        found.append(Allocation(by="unseen", holder="the devices have not been looked at yet"))
    elif holders is None:
        found.append(Allocation(by="unseen", holder="it cannot be seen who holds the devices"))
    else:
        found += [Allocation(by="process", holder=holder) for holder in holders[:MAX_HOLDERS]]
        if len(holders) > MAX_HOLDERS:
            found.append(Allocation(by="process", holder=f"and {len(holders) - MAX_HOLDERS} more"))
    found += [Allocation(by="scheduler", holder=holder) for holder in scheduled]
    found += [
        Allocation(by="lease", holder=f"job {lease.job} attempt {lease.attempt} (gate {lease.gate})")
        for lease in leases
    ]
    if doubt:
        found.append(Allocation(by="unseen", holder=doubt))
    return tuple(found)


def describe(claims: Sequence[Allocation]) -> str:
    """The first claim and how many more there are, for one line."""
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return f"{claims[0].holder}{more}" if claims else "nobody"
