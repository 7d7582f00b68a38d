"""
The fleet as cells of a grid: one small record a node, kept until something about the node changes.

Most of a state is bytes in the registry, and opening it costs; so the reasons of a node that is not healthy are read
once for each new state, and at most so many in one go.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from healthd.aggregator.fleet import Fleet, identities_in
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.page.rendering import HEALTH_SIGNS, WORST_FIRST, brief, natural
from healthd.core.model import Health, Reason

# States opened in one go to read their reasons: some 0.3 ms each, on the loop that answers syncs.
MOST_OPENED = 150
# Label names that a grid can be grouped by, and how long a value may be to head a group.
MOST_LABELS = 20
LONGEST_VALUE = 80
# Of what a search looks through, for each node: sixteen serial numbers and some labels.
LONGEST_FOUND_BY = 2000
NO_VALUE = "(none)"


class FleetGrid:
    """Cells by node, on the event loop alone."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._kept: dict[str, tuple[tuple[object, ...] | None, Cell]] = {}
        """By node, each with what it was made of; None: its reasons are still to be read."""
        self._opened = 0

    def begin(self) -> None:
        """A new go: so many states may be opened again."""
        self._opened = 0

    def cell(self, name: str) -> Cell | None:
        """The node as it is now; None when it is not known (any more)."""
        node = self._fleet.node(name)
        if node is None:
            self._kept.pop(name, None)
            return None
        health = self._fleet.health_of(name)
        key = _key(node, health)
        before, last = self._kept.get(name, (None, None))
        if last is not None and before == key:
            return last
        reasons: Sequence[Reason] = ()
        whole = health is Health.HEALTHY or self._opened < MOST_OPENED
        if whole and health is not Health.HEALTHY:
            self._opened += 1
            view = self._fleet.view(name)
            reasons = () if view is None else view.reasons
        cell = _cell(node, health, reasons)
        if not whole and last is not None and last.health is health:
            # Its turn comes; until then, what was read last.
            cell = dataclasses.replace(
                cell,
                reason=last.reason,
                message=last.message,
                action=last.action,
                drill=last.drill,
                codes=last.codes,
            )
        self._kept[name] = (key if whole else None, cell)
        return cell

    def cells(self, names: Iterable[str]) -> list[Cell]:
        """The cells of these nodes; those that are not known are left out."""
        self.begin()
        return [cell for cell in map(self.cell, names) if cell is not None]


def choices(cells: Sequence[Cell], topology: Sequence[str]) -> list[tuple[str, str]]:
    """What the grid can be grouped by, as value and words; topology as the policy knows it comes first."""
    names: Counter[str] = Counter()
    for cell in cells:
        names.update(cell.labels.keys())
    known = [name for name in topology if name in names]
    others = sorted(name for name, _ in names.most_common(MOST_LABELS) if name not in known and name != "pool")
    found = [(f"label:{name}", brief(name, LONGEST_VALUE)) for name in (*known, *others)]
    return [*found, ("pool", "pool"), ("type", "instance type"), ("health", "health"), ("none", "nothing")]


def default_choice(cells: Sequence[Cell], topology: Sequence[str]) -> str:
    """Topology where nodes have any, else pools or instance types where there are several."""
    for name in topology:
        if any(name in cell.labels for cell in cells):
            return f"label:{name}"
    if len({cell.pool for cell in cells}) > 1:
        return "pool"
    return "type" if len({cell.instance_type for cell in cells}) > 1 else "none"


def grouped(cells: Sequence[Cell], by: str) -> list[Group]:
    """Groups in the order of their names as people count; without a value last, by health the worst first."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(_value(cell, by), []).append(cell)
    if by == "health":
        names: list[str] = [health.value for health in WORST_FIRST if health.value in found]
    else:
        names = sorted(found, key=lambda name: (name == NO_VALUE, natural(name)))
    return [
        Group(
            name=name,
            cells=tuple(sorted(found[name], key=lambda cell: natural(cell.node))),
            bad=sum(cell.health in (Health.UNHEALTHY, Health.UNKNOWN) for cell in found[name]),
        )
        for name in names
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The cells that share a value; `bad` counts those that no job should get."""

    name: str
    cells: tuple[Cell, ...]
    bad: int


def troubles(cells: Iterable[Cell]) -> list[Trouble]:
    """
    What is wrong, by reason: the worst first, then what most nodes have, drills last; in each, those kept out last.
    """
    found: dict[tuple[bool, str], list[Cell]] = {}
    for cell in cells:
        if cell.health is not Health.HEALTHY:
            found.setdefault((cell.drill, cell.reason), []).append(cell)
    made = []
    for (drill, reason), alike in found.items():
        alike.sort(key=lambda cell: (cell.quarantined, WORST_FIRST.index(cell.health), natural(cell.node)))
        made.append(
            Trouble(
                reason=reason,
                drill=drill,
                action=alike[0].action,
                health=min((cell.health for cell in alike), key=WORST_FIRST.index),
                cells=tuple(alike),
                message=next((cell.message for cell in alike if cell.message), ""),
            )
        )
    made.sort(key=lambda one: (one.drill, WORST_FIRST.index(one.health), -len(one.cells), one.reason))
    return made


def found(cells: Iterable[Cell], text: str) -> list[Cell]:
    """The cells that have every word of the text, in any of what they are found by."""
    words = text.lower().split()
    return [cell for cell in cells if all(word in cell.codes or word in cell.found_by for word in words)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """
    Nodes that have the same first reason; `message` is what one of them says, `health` the worst among them. `drill`:
    injected faults made it, on all of them.
    """

    reason: str
    drill: bool
    action: str
    health: Health
    cells: tuple[Cell, ...]
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """
    One node in the grid. `reason` and `message` are its first reason's, empty where it has none or nobody has looked
    yet. `taken` says by whom (job, process, scheduler), None: free. `injected`: faults are injected there, and `drill`:
    its first reason was made by one. `codes` (of all its reasons) and `found_by` are what a search looks through, in
    small letters.
    """

    node: str
    health: Health
    reason: str
    message: str
    action: str
    quarantined: bool
    taken: str | None
    injected: bool
    drill: bool
    pool: str
    instance_type: str
    labels: Mapping[str, str] = field(compare=False)
    codes: str = field(compare=False)
    found_by: str = field(compare=False)
    place: tuple[object, ...]

    @property
    def sign(self) -> str:
        """What stands in the cell, so that its colour is not alone."""
        return HEALTH_SIGNS[self.health]

    @property
    def tone(self) -> str:
        """The classes of the cell: its colour, and marks for what else is to be seen at a glance."""
        marks = (("quarantined", self.quarantined), ("taken", self.taken is not None), ("injected", self.injected))
        return " ".join([self.health.value, *(name for name, on in marks if on)])

    @property
    def label(self) -> str:
        """The cell in words."""
        words = [f"{self.node}: {self.health.value}"]
        words += [self.reason] if self.reason else []
        words += ["quarantined"] if self.quarantined else []
        words += [f"taken by {self.taken}"] if self.taken else []
        words += ["drill"] if self.injected else []
        return ", ".join(words)


def _key(node: FleetNode, health: Health) -> tuple[object, ...]:
    state = node.state
    leases = () if state is None else tuple(lease.id for lease in state.leases)
    # How long it is silent is in its reason: read again after one minute, two, four, and so on.
    silence = None if node.heard_seconds is None else int(node.heard_seconds // 60).bit_length()
    return (node.version, health, node.quarantine, node.duplicate, silence, leases)


def _cell(node: FleetNode, health: Health, reasons: Sequence[Reason]) -> Cell:
    state = node.state
    labels = {} if state is None else state.labels
    pool = brief(labels.get("pool", ""), LONGEST_VALUE)
    kind = brief((state.instance_type if state else None) or "", LONGEST_VALUE)
    first = reasons[0] if reasons else None
    return Cell(
        node=node.node,
        health=health,
        reason=brief(first.code, 64) if first else "",
        message=brief(first.message, 240) if first else "",
        action=first.action.value if first else "",
        quarantined=(node.quarantine or (state.quarantine if state else None)) is not None,
        taken=_taken(node),
        injected=bool(state and state.faults),
        drill=first is not None and first.injected,
        pool=pool,
        instance_type=kind,
        labels=labels,
        codes=brief(" ".join(dict.fromkeys(brief(one.code, 64) for one in reasons)), LONGEST_FOUND_BY).lower(),
        found_by=_found_by(node),
        place=(pool, kind, tuple(sorted(labels.items()))),
    )


def _found_by(node: FleetNode) -> str:
    """Its names, labels, type, jobs and serial numbers."""
    words = [node.node]
    if node.machine is not None:
        words += identities_in(node.machine, node.node)
    if (state := node.state) is not None:
        words += [state.instance_type or "", *state.aliases]
        words += [f"{name}={value}" for name, value in state.labels.items()]
        words += [lease.job for lease in state.leases] + [one.holder for one in state.allocated]
    return brief(" ".join(words), LONGEST_FOUND_BY).lower()


def _taken(node: FleetNode) -> str | None:
    state = node.state
    if state is None:
        return None
    if state.leases:
        return brief(f"job {state.leases[0].job}", LONGEST_VALUE)
    if state.allocated:
        return brief(f"{state.allocated[0].by} {state.allocated[0].holder}", LONGEST_VALUE)
    return None


def _value(cell: Cell, by: str) -> str:
    if by == "pool":
        return cell.pool or NO_VALUE
    if by == "type":
        return cell.instance_type or NO_VALUE
    if by == "health":
        return cell.health.value
    if by.startswith("label:"):
        return brief(cell.labels.get(by.removeprefix("label:"), ""), LONGEST_VALUE) or NO_VALUE
    return ""
