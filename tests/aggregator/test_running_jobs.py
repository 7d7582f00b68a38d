"""Nodes tell of steps, and no integration compares them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from healthd.aggregator.fleet import running_jobs
from healthd.aggregator.identity.tokens import key_hash
from healthd.core.model import StepBlock
from tests.aggregator.parts import KEY, Clock, Node, fleet, state


def test_without_an_integration_steps_are_taken_in_and_nothing_is_said_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_jobs, "INTEGRATIONS", ())
    registry = fleet(Clock())
    told = StepBlock(job="train", size=2, ranks=(0,), first_step=0, own_seconds=(0.1,) * 50)
    request = dataclasses.replace(Node(registry, Clock()).request(state("n1")), steps=(told,), step_jobs=("train",))
    asyncio.run(registry.sync("n1", key_hash(KEY), request, 0.0))
    jobs = registry.peers.jobs
    assert asyncio.run(jobs.judge()) | jobs.forget_old() == set()
    assert (len(jobs.jobs), len(jobs.slow_nodes), jobs.shown(10)) == (0, 0, ((), ()))
    assert jobs.findings("n1", tuple) == {}
