"""
Recent findings of validations: nodes at fault, and faults between nodes. Shown to people beside a node's health.

A node that a validation accuses may be healthy by its own checks. The accusation is shown, also at the node's own port,
until the node passes a later validation, an operator releases it, or the accusation is too old. It decides nothing:
gates and rules have records of their own. Kept in memory, and read from the newest gates on disk at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from checks.contract import Status
from healthd.aggregator.gate.records import Gate
from healthd.core.evidence import reason
from healthd.core.model import Decision, Reason, Verdict
from healthd.localize import Outcome

CODES = frozenset({"CollectiveFault", "SlowNode", "PathFault", "TopologyFault", "Ambiguous"})
"""The reasons by which a validation speaks of single nodes, at fault or at the end of a bad path."""

MOST_GATES_READ = 200
"""Gates that are read at the start: those of some hours in a busy fleet."""


@dataclass(frozen=True, kw_only=True)
class Accusation:
    """The newest of a node. `at` is when the gate of `job` was decided, in seconds of the engine's clock."""

    node: str
    code: str
    message: str
    injected: bool
    gate: str
    job: str
    at: float


class Accusations:
    """
    On the event loop alone. `keep_seconds` is how long an accusation is shown; `clock` is the engine's. Who is in
    `on_change` hears the name of a node whose accusation is another now.
    """

    def __init__(self, *, keep_seconds: float, clock: Callable[[], float]) -> None:
        self.on_change: list[Callable[[str], None]] = []
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._found: dict[str, Accusation] = {}

    def load(self, gates: Iterable[Gate]) -> None:
        """Take in gates in the order in which they were decided."""
        for gate in sorted(gates, key=lambda gate: gate.decision.decided_at if gate.decision else 0.0):
            self.gate_decided(gate)

    def gate_decided(self, gate: Gate) -> None:
        """Take in a decision: whom it accuses, and who has passed."""
        decision = gate.decision
        if decision is None or not gate.validated:
            return
        for name in passed_in_validations(gate):
            self.clear(name)
        for node, why in _named(decision):
            self._found[node] = Accusation(
                node=node,
                code=why.code,
                message=why.message,
                injected=why.injected,
                gate=gate.id,
                job=gate.request.job,
                at=decision.decided_at,
            )
            self._changed(node)

    def clear(self, node: str) -> None:
        """Nothing is said of this node any more: it has passed, a person has released it, or it is gone."""
        if self._found.pop(node, None) is not None:
            self._changed(node)

    def _changed(self, node: str) -> None:
        for hear in self.on_change:
            hear(node)

    def warning(self, node: str) -> Reason | None:
        """The accusation that stands against a node, as its own port shows it."""
        found = self.of(node)
        if found is None:
            return None
        text = f"gate {found.gate} of job {found.job}: {found.message}"
        return reason(found.code, text, node=node, status=Status.WARN, injected=found.injected)

    def of(self, node: str) -> Accusation | None:
        """The accusation that stands against a node."""
        found = self._found.get(node)
        if found is not None and found.at < self._clock() - self._keep_seconds:
            del self._found[node]
            return None
        return found

    def all(self) -> tuple[Accusation, ...]:
        """All that stand, the newest first."""
        standing = (self.of(node) for node in list(self._found))
        return tuple(sorted((one for one in standing if one is not None), key=lambda one: (-one.at, one.node)))


def passed_in_validations(gate: Gate) -> frozenset[str]:
    """The nodes that a gate has admitted and that passed in its validations."""
    decision = gate.decision
    if decision is None or decision.decision is not Verdict.ADMIT or decision.would not in (None, Verdict.ADMIT):
        return frozenset()
    # One that was left alone, because the others fell silent, has shown nothing.
    tests = (one for run in gate.validations for one in run.history if one.outcome is Outcome.PASS)
    return frozenset(name for one in tests for name in one.members).intersection(n.node for n in decision.nodes)


def _named(decision: Decision) -> Iterator[tuple[str, Reason]]:
    """The nodes that a decision names, each with the reason that does."""
    told = [(one.node, why) for one in decision.excluded for why in one.reasons]
    told += [(why.node, why) for why in decision.reasons if why.node is not None]
    yield from ((node, why) for node, why in told if why.code in CODES)
