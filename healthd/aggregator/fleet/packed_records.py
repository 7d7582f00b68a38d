"""
A node's state, kept packed as it arrived and only opened when its evidence is needed, because there are many nodes
and their states are mostly alike. Its ages advance meanwhile, and comparisons with other nodes are added.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from checks.contract import Finding, worst
from healthd.core import wire
from healthd.core.evidence import aged, sorted_reasons
from healthd.core.model import CheckResult, Health, Lease, NodeState, Reason, Use

R = TypeVar("R", CheckResult, Lease)

# Most of a state, and rarely read.
EVIDENCE = ("inventory", "reasons", "checks", "results")


@dataclass(frozen=True, kw_only=True)
class Since:
    """
    What became of a state after it came: every age is `moved_seconds` more, but for results with a newer one in `ages`,
    by check; and then all are `behind_seconds` more. `added` are findings, by check, and `reasons` what they say.
    """

    health: Health
    moved_seconds: float = 0.0
    behind_seconds: float = 0.0
    ages: Mapping[str, float] = field(default_factory=dict)
    added: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    use: Use | None = None
    """Who uses the node now, where that changed since the state came; its leases are as old as they were then."""

    def evidence(self, state: NodeState) -> Mapping[str, Any]:
        """The members of `EVIDENCE` now, of the state that came."""
        moved, ages, behind, added = self.moved_seconds, self.ages, self.behind_seconds, self.added
        results = (with_age(r, ages.get(r.check, r.age_seconds + moved) + behind) for r in state.results)
        return {
            "inventory": state.inventory,
            "reasons": sorted_reasons((*self.reasons, *state.reasons)) if added else state.reasons,
            "checks": state.checks,
            "results": tuple(_amended(r, added.get(r.check)) for r in results) if added else tuple(results),
        }


class KeptState(NodeState):
    """A NodeState whose evidence is opened when it is first read. Made by `kept_state`; a copy of it is whole."""

    _packed: bytes
    _since: Since

    def __getattr__(self, name: str) -> Any:
        if name not in EVIDENCE or "_packed" not in self.__dict__:
            raise AttributeError(name)
        state = wire.decode(zlib.decompress(self._packed), NodeState, what="kept state")
        self.__dict__.update(self._since.evidence(state))
        return self.__dict__[name]


def pack(state: NodeState) -> bytes:
    """What `kept_state` opens again."""
    return zlib.compress(wire.encode(state), 1)


def kept_state(packed: bytes, rest: Mapping[str, Any], since: Since) -> NodeState:
    """The state that was packed; `rest` has the members that are no evidence, as they came."""
    moved = since.moved_seconds + since.behind_seconds
    leases = tuple(with_age(lease, lease.age_seconds + moved) for lease in rest["leases"])
    state = object.__new__(KeptState)
    state.__dict__.update(rest, health=since.health, leases=leases, _packed=packed, _since=since)
    return state


def later(state: NodeState, seconds: float) -> NodeState:
    """As `aged`; one that is kept is not opened for it."""
    if not isinstance(state, KeptState) or "_packed" not in state.__dict__:
        return aged(state, seconds)
    since = dataclasses.replace(state._since, behind_seconds=state._since.behind_seconds + seconds)
    made = object.__new__(KeptState)
    rest = {name: value for name, value in state.__dict__.items() if name not in EVIDENCE}
    leases = tuple(with_age(lease, lease.age_seconds + seconds) for lease in state.leases)
    made.__dict__.update(rest, leases=leases, _since=since)
    return made


def with_age(record: R, age_seconds: float) -> R:
    """A copy with another age, at a fifth of the cost of dataclasses.replace, because every look-up makes some."""
    copy: R = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, age_seconds=age_seconds)
    return copy


def _amended(result: CheckResult, added: tuple[Finding, ...] | None) -> CheckResult:
    if not added:
        return result
    status = worst((result.status, *(one.status for one in added)))
    return dataclasses.replace(result, status=status, findings=(*result.findings, *added))


@dataclass(frozen=True, kw_only=True)
class _Stored(NodeState):
    """A state with one member more, which older code ignores."""

    since: Since | None = None


def pack_all(states: Sequence[NodeState]) -> bytes:
    """States for the database. Those that are kept are not opened for it: a gate may have thousands."""
    return zlib.compress(wire.encode([_stored(state) for state in states]), 1)


def _stored(state: NodeState) -> NodeState | msgspec.Raw:
    if not isinstance(state, KeptState) or "_packed" not in state.__dict__:
        return state
    return msgspec.Raw(b'%s,"since":%s}' % (zlib.decompress(state._packed)[:-1], wire.encode(state._since)))


def unpack_all(packed: bytes, *, what: str) -> tuple[NodeState, ...]:
    """The states again, whole. BadInputError names `what`."""
    return tuple(map(_now, wire.decode(zlib.decompress(packed), tuple[_Stored, ...], what=what)))


def _now(stored: _Stored) -> NodeState:
    state = NodeState(**{one.name: getattr(stored, one.name) for one in dataclasses.fields(NodeState)})
    since = stored.since
    if since is None:
        return state
    moved = since.moved_seconds + since.behind_seconds
    if (use := since.use) is not None:
        state = dataclasses.replace(state, allocated=use.allocated, leases=use.leases, running=use.running)
    leases = tuple(with_age(lease, lease.age_seconds + moved) for lease in state.leases)
    return dataclasses.replace(state, health=since.health, leases=leases, **since.evidence(state))
