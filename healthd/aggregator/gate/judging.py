"""What the evidence of a node says of a tier, and a cache of such verdicts."""

from __future__ import annotations

import math

from checks.contract import Tier
from healthd.aggregator.model import FleetNode, Judged
from healthd.core.evidence import aged, judge_tier, reason
from healthd.core.model import Health


def judge(node: FleetNode, tier: Tier, max_age_seconds: float, require: tuple[str, ...]) -> Judged:
    """The strict verdict on a node as of now; a node without a state is unknown."""
    if node.state is None:
        return Judged(
            health=Health.UNKNOWN,
            reasons=(reason("NotYetRun", "nothing reported yet", node=node.node),),
            age_seconds=None,
        )
    health, reasons, age = judge_tier(aged(node.state, node.behind_seconds), tier, max_age_seconds, require=require)
    return Judged(health=health, reasons=reasons, age_seconds=age)


class JudgeCache:
    """
    `judge` with a cache: the same answers at the price of a look-up, as long as the evidence of a node is the same.

    It judges a state once without a bound of age. While the oldest result is young enough, that verdict is also the
    strict one. The age of the verdict is then that of the oldest result, which may belong to a heavier tier, so it is
    never younger than the truth. A full cache is dropped as a whole.
    """

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._assess_known: dict[tuple[str, Tier, tuple[str, ...]], tuple[int, Judged, float]] = {}

    def __call__(self, node: FleetNode, tier: Tier, max_age_seconds: float, require: tuple[str, ...]) -> Judged:
        """As `judge`."""
        if node.state is None:
            return judge(node, tier, max_age_seconds, require)
        if node.oldest_seconds is not None and not require and tier in node.judged:
            oldest = node.oldest_seconds + node.behind_seconds
            if not oldest <= max_age_seconds:
                return judge(node, tier, max_age_seconds, require)
            found = node.judged[tier]
            if found.age_seconds is None:
                return found
            return Judged(health=found.health, reasons=found.reasons, age_seconds=oldest)
        key = (node.node, tier, require)
        known = self._assess_known.get(key)
        if known is None or known[0] != node.version:
            if len(self._assess_known) >= self._limit:
                self._assess_known.clear()
            health, reasons, age = judge_tier(node.state, tier, math.inf, require=require)
            oldest = max((r.age_seconds for r in node.state.results), default=0.0)
            oldest = math.inf if any(math.isnan(r.age_seconds) for r in node.state.results) else oldest
            known = (node.version, Judged(health=health, reasons=reasons, age_seconds=age), oldest)
            self._assess_known[key] = known
        judged, counted = known[1], node.oldest_seconds is not None
        oldest = (known[2] if node.oldest_seconds is None else node.oldest_seconds) + node.behind_seconds
        # Results of heavier tiers may be older than the bound; then only the strict verdict can tell.
        if not oldest <= max_age_seconds:
            return judge(node, tier, max_age_seconds, require)
        age = judged.age_seconds
        if age is not None:
            age = oldest if counted else age + node.behind_seconds
        return Judged(health=judged.health, reasons=judged.reasons, age_seconds=age)
