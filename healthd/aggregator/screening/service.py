"""
Screens free nodes: looks at what nodes report, plans, orders, and remembers what passed.

A screening has no claim on its nodes. The engine withdraws its orders in the same pass in which a gate, a lease, a
quarantine or a rule takes a node (`FleetState.end_screening`). Checks that had passed by then count, so the next
screening of the node continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from checks.contract import Blame, Status, Tier
from healthd.aggregator.engine import Engine
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import Accuse
from healthd.aggregator.policy import Policy
from healthd.aggregator.screening import look, plan
from healthd.aggregator.screening.records import Candidate, Listed, Screened, Standing, Start
from healthd.aggregator.screening.risk import NEW_DAYS, risk
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.aggregator.store import FencedError, Kind, PutEvent, PutRecord, Store, reading
from healthd.aggregator.validation import advance, begin, consequence, lacking, orders_of
from healthd.aggregator.validation.records import Validation
from healthd.core.errors import StoreError
from healthd.core.model import (
    FINAL_STATUSES,
    Order,
    OrderKind,
    OrderReport,
    OrderStatus,
    RunOrder,
    ValidationKind,
)
from healthd.core.tasks import LogOnce, wait_for
from healthd.core.text import span

log = logging.getLogger(__name__)

PLAN_SECONDS = 30.0
"""How often is planned; for a short `every` (tests), more often."""
LOOK_SECONDS = 300.0
"""How often a node that runs nothing for us is looked at: risk changes over days."""
TURN_SECONDS = 0.1
"""The shortest pause between two turns: gates come first."""
LOOKS_EACH_TURN = 20
"""Nodes that are looked at before the event loop goes on; a look opens a packed state."""
PLANS_EACH_REST = 60
RETRY_RATIO = 1 / 84
"""The part of `every` for which a node rests whose screening ended without a pass: six hours of three weeks."""
BUSY_SECONDS = 60.0
"""A node that was in use is not asked again for so long."""
RANKED_SECONDS = 3600.0
"""How long a risk stands if nothing new is heard: it grows by the day."""
RANKS_EACH_PLAN = 500
"""Risks that are computed again in one turn: the event loop waits for them."""
LATE_SECONDS = 120.0
"""Beyond its time, a node that says nothing of its order any more is given up."""
NEIGHBOUR_LABELS = ("switch", "delivery")
"""Labels of nodes that fail for a common cause."""
MOST_POOLS = 100
"""Pools with metrics of their own; the others are counted together."""
OTHER_POOLS = "other"
DAY_SECONDS = 86400.0


@dataclasses.dataclass(slots=True)
class Known:
    """What is known of a node now. `ranked_at` is when its risk was computed."""

    screened: Screened
    pool: str | None
    wanted: tuple[str, ...]
    kind: str | None
    corrected: float | None
    versions: Mapping[str, str]
    groups: tuple[tuple[str, str], ...]
    version: int | None
    looked_at: float
    standing: Standing | None = None
    ranked_at: float = -math.inf
    not_before: float = 0.0


@dataclasses.dataclass(slots=True)
class Running:
    """
    A screening under way on `nodes`: a run of the tier by `order`, or collectives by `validation`. `before` is what was
    known of the node of a run when it began.
    """

    nodes: tuple[str, ...]
    pool: str
    started_at: float
    ends_at: float
    order: Order | None = None
    before: Screened | None = None
    validation: Validation | None = None

    def work(self, node: str) -> str:
        """What a node runs."""
        others = [name for name in self.nodes if name != node]
        if self.order is not None and self.order.run is not None:
            return self.order.run.tier.value
        return f"collectives with {', '.join(others)}"


class Screening:
    """Make it with the parts of a leader, and run `run()` as a task where the settings switch it on."""

    def __init__(self, engine: Engine, fleet: Fleet, store: Store, policy: Policy, settings: ScreeningSettings) -> None:
        self.settings = settings
        self._engine, self._fleet, self._store, self._policy = engine, fleet, store, policy
        self._tier = Tier.SOAK if settings.tier == "soak" else Tier.DEEP
        self._known: dict[str, Known] = {}
        self._loaded: dict[str, Screened] = {}
        self._running: list[Running] = []
        self._ours: frozenset[str] = frozenset()  # the nodes of `_running`, as of the last turn
        self._queue: deque[str] = deque()
        self._queued: set[str] = set()
        self._unwritten: dict[str, Screened] = {}
        self._events: list[PutEvent] = []
        self._accused: tuple[Accuse, ...] = ()
        self._failed: dict[tuple[str, str], dict[str, float]] = {}  # by label and value: when which node failed last
        self._pause = min(PLAN_SECONDS, settings.every_seconds / PLANS_EACH_REST)
        self._plan_at = -math.inf
        self._first_at = engine.now()
        self._wake = asyncio.Event()
        self._trouble = LogOnce(log)
        if settings.on:
            fleet.listen(self._hear, quiet=self._hear)

    async def run(self) -> None:
        """Screen for ever. Ends by cancellation."""
        await self.load()
        while True:
            await asyncio.sleep(TURN_SECONDS)
            if not self._queue:
                await wait_for(self._wake, min(self._pause, self._due_in()))
            try:
                await self.turn()
                self._trouble.clear()
            except FencedError:
                raise
            except StoreError as error:
                self._trouble.say(f"screenings wait for the database: {error}")
                await asyncio.sleep(self._pause)

    async def load(self) -> None:
        """Read what is remembered. What the aggregator before has ordered is over once its nodes have heard of this."""
        self._loaded = await self._store.read(reading.read_screened)
        self._first_at = min((one.known_at for one in self._loaded.values()), default=self._engine.now())
        self._plan_at = self._engine.now() + self._policy.tuning.settle_seconds

    async def turn(self) -> None:
        """Look at some nodes that reported, go on with what runs, plan when it is time, and write what is new."""
        now = self._engine.now()
        heard: set[str] = set()
        for _ in range(min(LOOKS_EACH_TURN, len(self._queue))):
            node = self._queue.popleft()
            self._queued.discard(node)
            self._look(node, now)
            heard.add(node)
        due = now >= self._plan_at
        orders, accused = self._go_on(now, None if due else heard)
        if due and not self._engine.unsure():
            self._plan_at = now + self._pause
            for start in self._plan(now):
                orders |= self._begin(start, now)
        written = list(self._unwritten.values())
        self._accused = (*self._accused, *accused)
        if orders or self._accused or self._events:
            events, found = tuple(self._events), self._accused
            try:
                await self._engine.screen(orders, events, found)
            except StoreError:
                self._running.clear()  # what was ordered is not known: what stands is withdrawn in the next turn
                raise
            del self._events[: len(events)]
            self._accused = self._accused[len(found) :]
        self._drop_unwanted()
        if written:
            await self._store.write([PutRecord(kind=Kind.SCREENED, key=one.node, record=one) for one in written])
            for one in written:
                if self._unwritten.get(one.node) is one:
                    del self._unwritten[one.node]

    # --- what is heard ------------------------------------------------------------------------------------------------

    def _hear(self, node: str) -> None:
        """A node has reported. It is looked at when it is new, runs something for us, or was not for a while."""
        known = self._known.get(node)
        if node in self._ours or known is None or self._engine.now() - known.looked_at >= LOOK_SECONDS:
            if node not in self._queued:
                self._queued.add(node)
                self._queue.append(node)
            self._wake.set()

    def _look(self, name: str, now: float) -> None:
        """Take in what a node reports; nothing of one that may be two, or whose ages are not known."""
        node, known = self._fleet.node(name), self._known.get(name)
        if known is not None:
            known.looked_at = now
        if node is None or node.duplicate or not node.confirmed:
            return
        if known is not None and known.version == self._fleet.version(name):
            return
        state = node.current()
        if state is None:
            return
        before = known.screened if known is not None else self._loaded.pop(name, None)
        screened = look.look(now, before, state, self._tier)
        if screened != before:
            self._unwritten[name] = screened
        runs = state.inventory is not None and state.inventory.rank_targets and state.peer_address is not None
        names = {spec.name for spec in state.checks}
        runs = runs and any(check in names for check in self._policy.collective_checks)
        groups = tuple((label, state.labels[label]) for label in NEIGHBOUR_LABELS if label in state.labels)
        found = self._known[name] = Known(
            screened=screened,
            pool=state.labels.get("pool"),
            wanted=look.wanted_checks(state, self._tier),
            kind=state.inventory.accelerator if runs and state.inventory is not None else None,
            corrected=look.corrected_in(state),
            versions=look.drivers_in(state),
            groups=groups,
            version=self._fleet.version(name),
            looked_at=now,
            not_before=known.not_before if known is not None else 0.0,
        )
        if screened.failed_at is not None:
            for group in groups:
                self._failed.setdefault(group, {})[name] = screened.failed_at
        found.standing, found.ranked_at = self._standing(name, found, now), now

    # --- what runs ----------------------------------------------------------------------------------------------------

    def _go_on(
        self, now: float, heard: Container[str] | None
    ) -> tuple[dict[str, tuple[Order, ...] | None], list[Accuse]]:
        """
        What changes of the screenings under way: orders (None: it is over on that node), and accusations. `heard` are
        the nodes that something is new of; None: all are looked at.
        """
        orders: dict[str, tuple[Order, ...] | None] = {}
        accused: list[Accuse] = []
        standing = self._engine.screenings()
        for one in list(self._running):
            lost = [name for name in one.nodes if name not in standing]
            waits = heard is not None and not any(name in heard for name in one.nodes)
            if waits and not lost and (one.validation is None or now < one.ends_at):
                continue
            if one.order is not None:
                if self._run_ended(one, one.order, now, lost=bool(lost)):
                    self._end(one, orders)
            elif lost:
                for name in one.nodes:
                    self._note_yield(one, name, now, "the node is" if name in lost else f"{', '.join(lost)} is")
                self._end(one, orders)
            elif one.validation is not None:
                accused += self._go_on_together(one, one.validation, now, orders)
        ours = {name for one in self._running for name in one.nodes}
        orders |= dict.fromkeys(standing.keys() - ours)
        return orders, accused

    def _end(self, one: Running, orders: dict[str, tuple[Order, ...] | None]) -> None:
        self._running.remove(one)
        orders |= dict.fromkeys(one.nodes)
        self._plan_at = min(self._plan_at, self._engine.now() + min(1.0, self._pause))

    def _run_ended(self, one: Running, order: Order, now: float, *, lost: bool) -> bool:
        """Whether the run of a tier is over; takes in what came of it. `lost`: somebody wants the node."""
        (name,) = one.nodes
        node = self._fleet.node(name)
        report = None if node is None else node.orders.get(order.id)
        over = report is not None and report.status in FINAL_STATUSES
        if not over and not lost and now < one.ends_at + LATE_SECONDS:
            return False
        self._look(name, now)
        if (known := self._known.get(name)) is None:
            return True  # it was forgotten
        checks = order.run.checks if order.run is not None else ()
        rest = _left(one, known, checks)
        failed = one.before is not None and known.screened.failures > one.before.failures
        if not rest:
            self._note(name, now, "screened", f"{one.work(name)} passed in {span(now - one.started_at)}")
        elif lost and not failed:
            self._note_yield(one, name, now, "the node is", f" after {len(checks) - len(rest)} of {len(checks)} checks")
        else:
            kind, what = (
                ("screening failed", "failed") if failed else ("screening incomplete", "could not be completed")
            )
            self._note(name, now, kind, f"{one.work(name)} {what}: {_why(report)}")
            self._rest(name, now)
        return True

    def _note_yield(self, one: Running, name: str, now: float, who: str, done: str = "") -> None:
        """A node is wanted, or quarantined. What passed on it counts."""
        self._note(name, now, "screening yields", f"{one.work(name)}{done}: {who} needed by a job, or quarantined")

    def _rest(self, name: str, now: float) -> None:
        """A screening has ended without a pass: the node is not tried again at once."""
        known = self._known[name]
        known.screened = dataclasses.replace(known.screened, tried_at=now)
        known.standing = None
        self._unwritten[name] = known.screened

    def _note(self, node: str, now: float, kind: str, message: str) -> None:
        self._events.append(PutEvent(at=now, subject=node, kind=kind, message=message))

    # --- collectives --------------------------------------------------------------------------------------------------

    def _go_on_together(
        self, one: Running, validation: Validation, now: float, orders: dict[str, tuple[Order, ...] | None]
    ) -> list[Accuse]:
        """Take the collectives of a pair as far as they can go; what they say of nodes at fault."""
        nodes = self._views(one.nodes)

        def partners(count: int) -> tuple[str, ...]:
            found = self._partners(one, count)
            nodes.update(self._views(found))
            return found

        step = advance(now, validation, nodes, self._policy, partners)
        one.validation, one.ends_at = step.validation, step.wake_at
        one.nodes = (*step.validation.members, *step.validation.partners)
        if step.validation.verdict is None:
            for name in one.nodes:
                wanted = orders_of(step.validation, name, self._policy, workload=None)
                if self._engine.screenings().get(name) != wanted:
                    orders[name] = wanted
            return []
        found = consequence(step.validation)
        rest = step.validation.verdict.rest if step.validation.verdict.rest_passed else ()
        for name in one.nodes:
            known = self._known.get(name)
            if known is None:
                continue
            if name in rest and name not in found.out:
                known.screened = dataclasses.replace(known.screened, paired_at=now)
                self._unwritten[name], known.standing = known.screened, None
                self._note(name, now, "screened", f"{one.work(name)} passed in {span(now - one.started_at)}")
                continue
            why = found.out.get(name) or next(iter(found.reasons), None)
            text = why.message if why is not None else "undecided"
            self._note(name, now, "screening failed", f"{one.work(name)}: {text}")
            self._rest(name, now)
        self._end(one, orders)
        return [
            Accuse(node=node, reason=why)
            for node, why in found.out.items()
            if why.blame is Blame.NODE and why.status is Status.FAIL
        ]

    def _views(self, names: Iterable[str]) -> dict[str, FleetNode]:
        return {name: node for name in names if (node := self._fleet.node(name)) is not None}

    def _partners(self, one: Running, count: int) -> tuple[str, ...]:
        """Free nodes of the pool for the search for who is at fault, within the share."""
        kinds = {known.kind for name in one.nodes if (known := self._known.get(name)) is not None}
        busy, wanted = self._pools_running(), self._engine.pools_wanted()
        room = plan.limit(self.settings, self._sizes().get(one.pool, 0)) - sum(p == one.pool for p in busy.values())
        found: list[str] = []
        for name, known in self._known.items():
            if len(found) >= min(count, room):
                break
            if (known.pool or "") != one.pool or known.kind not in kinds or name in busy or known.pool in wanted:
                continue
            if self._is_free(name):
                found.append(name)
        return tuple(found)

    # --- what starts --------------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> tuple[Start, ...]:
        for gone in self._known.keys() - set(self._fleet.names()):
            del self._known[gone]
        wanted = self._engine.pools_wanted()

        def is_free(name: str) -> bool:
            known = self._known[name]
            if known.pool not in wanted and self._is_free(name):
                return True
            known.not_before = now + min(BUSY_SECONDS, self._pause)
            if known.standing is not None:
                known.standing = dataclasses.replace(known.standing, not_before=known.not_before)
            return False

        return plan.plan(now, self._sizes(), self._standings(now), self._pools_running(), self.settings, is_free)

    def _standings(self, now: float) -> Iterator[Standing]:
        """All nodes that may be screened, with their risk; of some it is computed again."""
        left = RANKS_EACH_PLAN
        for name, known in self._known.items():
            if not self._is_screened(known):
                continue
            if known.standing is None or (now - known.ranked_at > RANKED_SECONDS and left > 0):
                left -= known.standing is not None
                known.standing, known.ranked_at = self._standing(name, known, now), now
            yield known.standing

    def _standing(self, name: str, known: Known, now: float) -> Standing:
        screened = known.screened
        tried = -math.inf if screened.tried_at is None else screened.tried_at
        return Standing(
            node=name,
            pool=known.pool or "",
            risk=risk(self._candidate(name, known, now)).total,
            tier_at=look.passed_at(screened, known.wanted),
            pair_at=-math.inf if screened.paired_at is None else screened.paired_at,
            kind=known.kind,
            changed=look.is_changed(screened, known.versions),
            not_before=max(known.not_before, tried + RETRY_RATIO * self.settings.every_seconds),
        )

    def _candidate(self, name: str, known: Known, now: float) -> Candidate:
        screened = known.screened
        passed = look.passed_at(screened, known.wanted)
        since = now - self.settings.every_seconds
        age_days = (now - screened.known_at) / DAY_SECONDS
        # What was there when screening was switched on may be old.
        since_first = screened.known_at - self._first_at < DAY_SECONDS
        return Candidate(
            node=name,
            pool=known.pool,
            days_since_pass=None if math.isinf(passed) else (now - passed) / DAY_SECONDS,
            corrected_per_hour=known.corrected,
            corrected_before_per_hour=screened.corrected_per_hour,
            failures=screened.failures,
            quarantines=self._engine.quarantined_times(name),
            age_days=None if since_first and age_days < NEW_DAYS else age_days,
            changed=look.is_changed(screened, known.versions) if screened.versions else None,
            neighbour_failed=any(
                at >= since
                for group in known.groups
                for other, at in self._failed.get(group, {}).items()
                if other != name
            )
            if known.groups
            else None,
        )

    def _is_free(self, name: str) -> bool:
        """Whether nobody has or wants the node, and it is in touch."""
        if not self._engine.is_idle(name):
            return False
        node = self._fleet.node(name)
        if node is None or node.state is None or not node.confirmed or node.duplicate or node.heard_seconds is None:
            return False
        state = node.state
        held = state.allocated or state.leases or state.maintenance is not None
        return not held and node.heard_seconds <= self._policy.silent_seconds

    def _begin(self, start: Start, now: float) -> dict[str, tuple[Order, ...] | None]:
        """The orders of a screening that starts."""
        name, known = f"screening:{secrets.token_hex(6)}", self._known[start.node]
        if start.partner is None:
            checks = look.left(known.screened, known.wanted, self._fresh_since(known, now))
            node = self._fleet.node(start.node)
            bound = self._policy.run_seconds[self._tier] + (0.0 if node is None else node.compile_seconds)
            work = RunOrder(tier=self._tier, checks=checks)
            order = Order(id=f"{name}:{start.node}", kind=OrderKind.RUN, deadline_seconds=bound, run=work)
            self._running.append(
                Running(
                    nodes=(start.node,),
                    pool=known.pool or "",
                    started_at=now,
                    ends_at=now + bound,
                    order=order,
                    before=known.screened,
                )
            )
            return {start.node: (order,)}
        members = (start.node, start.partner)
        nodes = self._views(members)
        checks = self._policy.checks_over_nodes(ValidationKind.COLLECTIVES, self._tier)
        unknown = lacking(checks, members, nodes, self._policy)
        validation = begin(
            now,
            name,
            members,
            nodes,
            self._policy,
            deadline=now + self._policy.validation_seconds,
            checks=tuple(check for check in checks if check not in unknown),
        )
        self._running.append(
            Running(nodes=members, pool=known.pool or "", started_at=now, ends_at=now, validation=validation)
        )
        return dict.fromkeys(members, ())

    def _fresh_since(self, known: Known, now: float) -> float:
        """Checks that passed since then need not run again: a screening that was interrupted continues."""
        if look.is_changed(known.screened, known.versions):
            return max(known.screened.passed.values(), default=now)
        return now - plan.REST_RATIO * self.settings.every_seconds

    def _drop_unwanted(self) -> None:
        """Screenings that the engine did not begin, because somebody was faster."""
        standing = self._engine.screenings()
        self._running = [one for one in self._running if all(name in standing for name in one.nodes)]
        self._ours = frozenset(name for one in self._running for name in one.nodes)

    # --- what is asked ------------------------------------------------------------------------------------------------

    def _sizes(self) -> Mapping[str, int]:
        """How many nodes each pool has that may be screened; "" are those without one."""
        return Counter(known.pool or "" for known in self._known.values() if self._is_screened(known))

    def _is_screened(self, known: Known) -> bool:
        """Whether the node is one of those that are screened: it has active checks, and the settings name its pool."""
        pools = self.settings.pools
        return bool(known.wanted) and (not pools or known.pool in pools)

    def _pools_running(self) -> dict[str, str]:
        return {name: one.pool for one in self._running for name in one.nodes}

    def _due_in(self) -> float:
        """Seconds until a validation is to be looked at."""
        ends = (one.ends_at for one in self._running if one.validation is not None)
        return max(0.05, min(ends, default=math.inf) - self._engine.now())

    def listed(self, pool: str | None = None) -> tuple[Listed, ...]:
        """All nodes that are screened, those with the highest risk first."""
        now = self._engine.now()
        work = {name: one.work(name) for one in self._running for name in one.nodes}
        found: list[Listed] = []
        for name, known in self._known.items():
            if not self._is_screened(known) or (pool is not None and known.pool != pool):
                continue
            candidate = self._candidate(name, known, now)
            passed = look.passed_at(known.screened, known.wanted)
            found.append(
                Listed(
                    candidate=candidate,
                    risk=risk(candidate),
                    passed_at=None if math.isinf(passed) else passed,
                    paired_at=known.screened.paired_at,
                    due=now - self._since(known) >= self.settings.every_seconds,
                    work=work.get(name),
                )
            )
        return tuple(sorted(found, key=lambda one: (-one.risk.total, one.candidate.node)))

    def _since(self, known: Known) -> float:
        """When the node passed last; of one that never has, since when it is known."""
        return max(look.passed_at(known.screened, known.wanted), known.screened.known_at)

    def figures(self) -> dict[str, tuple[float, int, int]]:
        """
        By pool: the age of the oldest screening in seconds, how many nodes are due, and how many run now. Nodes that
        are quarantined or gone do not count.
        """
        now, running, kept = self._engine.now(), Counter(self._pools_running().values()), self._engine.quarantines()
        found: dict[str, tuple[float, int, int]] = {}
        for name, known in self._known.items():
            if not self._is_screened(known) or name in kept or not self._engine.present(name):
                continue
            pool = known.pool or ""
            if pool not in found and len(found) >= MOST_POOLS:
                pool = OTHER_POOLS
            age = now - self._since(known)
            oldest, due, busy = found.get(pool, (0.0, 0, running[pool]))
            found[pool] = (max(oldest, age), due + (age >= self.settings.every_seconds), busy)
        return found


class ScreeningCollector(Collector):
    """How far the screenings are, by pool; nothing where they are off."""

    def __init__(self, screening: Screening) -> None:
        self._screening = screening

    def collect(self) -> Iterator[Metric]:
        if not self._screening.settings.on:
            return
        oldest = GaugeMetricFamily(
            "healthd_screening_oldest_seconds",
            "Seconds since the node of the pool that was screened longest ago passed; of one that never was, since it "
            "is known.",
            labels=("pool",),
        )
        due = GaugeMetricFamily(
            "healthd_screening_due_nodes",
            "Nodes of the pool that were not screened within `screening.every`.",
            labels=("pool",),
        )
        running = GaugeMetricFamily(
            "healthd_screening_running_nodes", "Nodes of the pool that are being screened.", labels=("pool",)
        )
        for pool, (age, late, busy) in self._screening.figures().items():
            oldest.add_metric((pool,), age)
            due.add_metric((pool,), late)
            running.add_metric((pool,), busy)
        yield from (oldest, due, running)


def _left(one: Running, known: Known, checks: Sequence[str]) -> tuple[str, ...]:
    """The checks of a run that have not passed in it. Times do not tell: those of nodes are seconds older here."""
    before = {} if one.before is None else one.before.passed
    passed = known.screened.passed
    return tuple(one for one in checks if passed.get(one, -math.inf) <= before.get(one, -math.inf))


def _why(report: OrderReport | None) -> str:
    """What the node said of its order."""
    if report is None:
        return "the node has not reported"
    refused = report.status in (OrderStatus.REFUSED, OrderStatus.CANCELLED)
    return report.message or ("no reason given" if refused else report.status.value)
