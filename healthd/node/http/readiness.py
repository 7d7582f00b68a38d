"""
`GET /readyz`: whether the node is fit for a job now, and if not, why; rendered from the one snapshot: pure.

A hook that uses the node's own verdict asks with the name by which it knows the node, with the name of its job at the
host's scheduler, and with the evidence that its gate wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checks.contract import Status
from checks.printable import printable_line
from healthd.core.errors import BadInputError
from healthd.core.model import Health, NodeState, Reason
from healthd.core.node_name import is_called
from healthd.node.http.health import Demand, parse_demand, verdict
from healthd.node.occupancy.model import Workload, describe, foreign

PARAMETERS = ("verbose", "exclude", "node", "workload", "tier", "max_age")
SIGNS = "[+] met  [-] not met: not ready because of it  [!] not well, and no obstacle  [ ] does not count here"
_DEMAND = ("tier", "max_age")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a node."""

    verbose: bool = False
    excluded: frozenset[str] = frozenset()
    """Conditions that do not count."""
    node: str | None = None
    """The name by which the client knows this node; None where it does not say."""
    workload: str | None = None
    """The client's own job as the host's schedulers name it (`slurm:7`): what is allocated to it is no obstacle."""
    demand: Demand | None = None
    """The evidence that is wanted; None for the node's own rules."""


def parse_question(query: Mapping[str, Sequence[str]]) -> Question:
    """The question in a query. BadInputError names the parameter and what would be right."""
    if unknown := query.keys() - set(PARAMETERS):
        raise BadInputError(f"unknown query parameter {min(unknown)!r}; /readyz has: {', '.join(PARAMETERS)}")
    for name in ("node", "workload"):
        if len(query.get(name, ())) > 1 or query.get(name) == [""]:
            raise BadInputError(f"{name} is given empty or several times; give it once")
    return Question(
        verbose="verbose" in query,
        excluded=frozenset(name for value in query.get("exclude", ()) for name in value.split(",")),
        node=next(iter(query.get("node", ())), None),
        workload=next(iter(query.get("workload", ())), None),
        demand=parse_demand({name: list(values) for name, values in query.items() if name in _DEMAND}),
    )


def readiness(
    state: NodeState,
    question: Question | None = None,
    *,
    workloads: Sequence[Workload] = (),
    quarantine_unknown: str = "",
    unwritable: str = "",
) -> dict[str, str]:
    """
    The conditions of being fit for a job now, each with the reason why it is not met (empty: it is met).

    `workloads` are those of the host's schedulers. `quarantine_unknown` says why it is not known whether the node is
    quarantined; empty where it is known. It counts only for a client that names the node and so relies on the node
    alone: otherwise all nodes would be drained while the aggregator is away. `unwritable` says why no lease can be
    stored, so that each gate would be refused here; empty where it can.
    """
    asked = question or Question()
    conditions = dict.fromkeys((spec.name for spec in state.checks), "")
    conditions["health"] = ""
    for demand in (asked.demand, None) if asked.demand is not None else (None,):
        health, reasons = verdict(state, demand)
        if health in (Health.UNKNOWN, Health.UNHEALTHY):
            _note(conditions, reasons)
    claims = foreign(state.allocated, workloads, {asked.workload} if asked.workload else ())
    conditions["allocated"] = f"taken by {describe(claims)}" if claims else ""
    conditions["leases"] = unwritable
    quarantine = state.quarantine
    conditions["quarantine"] = "" if quarantine is None else f"{quarantine.owner}: {quarantine.reason}"
    if quarantine is None and asked.node is not None:
        conditions["quarantine"] = quarantine_unknown
    if asked.node is not None:
        conditions["node"] = "" if is_called(state, asked.node) else f"this is {state.node}, not {asked.node[:80]}"
    return conditions


def _note(conditions: dict[str, str], reasons: Sequence[Reason]) -> None:
    """Add each reason against the node to the condition of its check."""
    for reason in reversed(reasons):  # the worst is written last
        if reason.status.value in ("unknown", "fail"):
            name = reason.check if reason.check in conditions else "health"
            conditions[name or "health"] = reason.message


def _shown(state: NodeState) -> dict[str, str]:
    """The line of each check that is no obstacle: met where it has passed, and nowhere else."""
    results = {result.check: result for result in state.results}
    lines = {}
    for spec in state.checks:
        result = results.get(spec.name)
        if result is None:
            lines[spec.name] = f"[ ] {spec.name} has not run"
        elif result.status is not Status.PASS:
            said = next((finding for finding in result.findings if finding.status is result.status), None)
            code = (said.reason if said is not None else None) or result.status.value
            word = "not applicable" if code == "NotApplicable" else f"{result.status.value} {code}"
            sign = " " if result.status is Status.SKIP else "!"
            lines[spec.name] = f"[{sign}] {spec.name} {word}: {said.message if said is not None else result.error}"
    return lines


def document(state: NodeState, conditions: Mapping[str, str], question: Question) -> tuple[bool, str]:
    """Whether the node is ready, and the text that says so. BadInputError for an excluded condition that is none."""
    for name in sorted(question.excluded - conditions.keys()):
        raise BadInputError(f"exclude={name[:60]!r} is no condition; there are: {', '.join(conditions)}")
    failed = {name: why for name, why in conditions.items() if why and name not in question.excluded}
    lines = []
    if question.verbose:
        shown = _shown(state)
        for name, why in conditions.items():
            if name in question.excluded:
                line = f"[ ] {name} excluded"
            else:
                line = f"[-] {name} failed: {why}" if why else shown.get(name, f"[+] {name} ok")
            lines.append(line)
    else:
        lines = [f"{name}: {why}" for name, why in failed.items()]
    lines.append(f"{state.node} is {'not ready' if failed else 'ready'}")
    if question.verbose:
        lines.append(SIGNS)
    return not failed, "".join(f"{printable_line(line)}\n" for line in lines)
