"""Finds the events of a plan that matter: those without which no promise is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.simulation.plan import Plan
from tests.simulation.world import Outcome, simulate

MOST_TRIES = 300
"""Simulations that may be spent on one plan: some minutes."""


def shrunk(plan: Plan, broken: Outcome, on_try: Callable[[int], None]) -> tuple[Plan, Outcome]:
    """
    A plan with as few events as were found to break a promise still, whichever it is; at best none can go.

    `on_try` is told how many simulations were tried so far.
    """
    tries, size = 0, max(1, len(plan.events) // 2)
    while tries < MOST_TRIES:
        at, smaller = 0, False
        while at < len(plan.events) and tries < MOST_TRIES:
            less = dataclasses.replace(plan, events=plan.events[:at] + plan.events[at + size :])
            outcome = simulate(less)
            tries += 1
            on_try(tries)
            if outcome.broken:
                plan, broken, smaller = less, outcome, True
            else:
                at += size
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return plan, broken
