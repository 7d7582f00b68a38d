"""A running job with a rank on each node: the slow one is named by comparison over nodes, and only warned of."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Status, Tier
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.identity.tokens import key_hash
from healthd.core.model import Health, NodeState, StepBlock, SyncRequest
from healthd.integrations.steps.blocks import Block
from healthd.integrations.steps.fleet import (
    FORGET_SECONDS,
    MOST_AT_ONCE,
    MOST_BLOCKS,
    MOST_JOBS,
    MOST_JOBS_OF_NODE,
    JobComparison,
)
from tests import prepared
from tests.aggregator.cluster import Cluster, ask
from tests.aggregator.parts import KEY, Clock, fleet, result, spec, state
from tests.aggregator.service import ROOT, Service, until
from tests.job import IN_A_JOB

# Says to each daemon what a rank on its node would: its own time, and that it waits for the slowest.
RANKS = (
    IN_A_JOB
    + """
import sys, time
from healthd_steps import StepReporter
run_dirs, slow = sys.argv[2:], int(sys.argv[1])
ranks = [
    StepReporter(job="train-9", rank=rank, size=len(run_dirs), path=path + "/steps.sock")
    for rank, path in enumerate(run_dirs)
]
step = 0
while True:
    for rank, reporter in enumerate(ranks):
        own = 0.05 * (1.1 if rank == slow else 1) * (1 + (step * 7 + rank * 3) % 5 / 500)
        reporter.report(step, own, 0.06 - own)
    step += 1
    time.sleep(0.02)
"""
)


class Nodes:
    """Nodes of a real registry that tell steps."""

    def __init__(self, names: int) -> None:
        self.clock = Clock()
        self.fleet: Fleet = fleet(self.clock)
        assert isinstance(self.fleet.peers.jobs, JobComparison)
        self.jobs = self.fleet.peers.jobs
        self.names = [f"n{i}" for i in range(names)]
        self._seq = 0

    def say(self, node: str, *blocks: StepBlock, jobs: tuple[str, ...] | None = None) -> None:
        self._seq += 1
        request = SyncRequest(
            protocol=1,
            incarnation="i",
            seq=self._seq,
            last_answer=None,
            since_answer_seconds=None,
            state=self._state(node),
            digest="d",
            ages={},
            orders={},
            issuer=None,
            steps=blocks,
            step_jobs=jobs,
        )
        asyncio.run(self.fleet.sync(node, key_hash(KEY), request, 0.0))

    def _state(self, node: str) -> NodeState:
        steps = result("job_steps", tier=Tier.PASSIVE)
        return state(node, checks=(spec("job_steps", tier=Tier.PASSIVE),), results=(steps,))

    def run(self, blocks: int, *, slow: str = "", job: str = "train", first: int = 0) -> None:
        for number in range(first, first + blocks):
            for rank, node in enumerate(self.names):
                own = 0.1 * (1.1 if node == slow else 1)
                values = tuple(own * (1 + (step * 7 + rank * 3) % 5 / 500) for step in range(50))
                self.say(node, block(job, rank, len(self.names), 50 * number, values))
            self.judge()

    def judge(self) -> None:
        self.fleet.peers._apply_soon(asyncio.run(self.jobs.judge()))

    def health(self, node: str) -> tuple[Health | None, list[str]]:
        view = self.fleet.view(node)
        assert view is not None
        state = view.node.state
        return (state.health if state is not None else None), [one.message for one in view.reasons if one.target]


def block(job: str, rank: int, size: int, first: int, own: tuple[float | None, ...]) -> StepBlock:
    return StepBlock(job=job, size=size, ranks=(rank,), first_step=first, own_seconds=own)


def test_the_slow_node_of_a_job_is_warned_of_with_rank_and_numbers_and_others_are_not() -> None:
    nodes = Nodes(4)
    nodes.run(5, slow="n2")
    health, reasons = nodes.health("n2")
    assert health is Health.DEGRADED
    (message,) = reasons
    assert message.startswith("job_steps rank:2: job train: its rank 2 works 110")
    assert "the other nodes 100" in message
    assert "10.2 % longer in 5 of the last 5 windows over 4 nodes" in message
    for other in ("n0", "n1", "n3"):
        assert nodes.health(other) == (Health.HEALTHY, [])
    view = nodes.fleet.view("n2")
    assert view is not None
    assert view.node.state is not None
    assert view.node.state.results[0].status is Status.WARN
    assert view.node.failing is False  # nothing for a rule to begin with
    assert [(node, bool(text)) for node, text in nodes.jobs.news] == [("n2", True)]


def test_the_warning_goes_when_the_node_is_slow_no_more_and_when_the_job_is_over() -> None:
    nodes = Nodes(4)
    nodes.run(5, slow="n2")
    nodes.run(5, first=5)
    assert nodes.health("n2") == (Health.HEALTHY, [])
    nodes.run(5, slow="n1", first=10)
    assert nodes.health("n1")[0] is Health.DEGRADED
    nodes.clock.now += FORGET_SECONDS + 1
    nodes.fleet.peers._apply_soon(nodes.jobs.forget_old())
    assert not nodes.jobs.jobs
    nodes.say("n1")
    assert nodes.health("n1")[1] == []


def test_a_node_that_has_the_job_no_more_is_warned_of_no_more_and_the_last_one_ends_it() -> None:
    nodes = Nodes(4)
    nodes.run(5, slow="n2")
    assert nodes.health("n2")[0] is Health.DEGRADED
    nodes.say("n2", jobs=("train", "other"))
    assert nodes.health("n2")[0] is Health.DEGRADED
    nodes.say("n2", jobs=("other",))
    assert nodes.health("n2") == (Health.HEALTHY, [])
    nodes.judge()  # what was told before its end accuses it no more
    assert nodes.health("n2") == (Health.HEALTHY, [])
    for node in ("n0", "n1"):
        nodes.say(node, jobs=())
    assert set(nodes.jobs.jobs) == {"train"}
    nodes.say("n3", jobs=())
    assert not nodes.jobs.jobs
    assert not nodes.jobs.slow


def test_what_strangers_tell_is_bounded() -> None:
    nodes = Nodes(2)
    bad = (
        block("", 0, 2, 0, (0.1,) * 50),
        block("a b", 0, 2, 0, (0.1,) * 49),
        block("j" * 500, 0, 2, 0, (0.1,) * 50),
        block("x", 0, 2, -1, (0.1,) * 50),
    )
    nodes.say("n0", *bad)
    assert not nodes.jobs.jobs
    nodes.say("n0", *(block(f"j{i}", 0, 2, 0, (0.1,) * 50) for i in range(2 * MOST_BLOCKS)))
    jobs = nodes.jobs
    assert list(jobs.jobs) == [f"j{i}" for i in range(MOST_BLOCKS - MOST_JOBS_OF_NODE, MOST_BLOCKS)]
    for i in range(MOST_JOBS + 10):
        jobs.put("n0", (block(f"k{i}", 0, 2, 0, (0.1,) * 50),))
    assert len(jobs.jobs) == MOST_JOBS_OF_NODE  # one node takes the room of none
    jobs.put("n1", (block("k3", 1, 2, 0, (0.1,) * 50),))
    for i in range(MOST_JOBS + 10):
        jobs.put(f"m{i}", (block(f"l{i}", 0, 2, 0, (0.1,) * 50),))
    assert len(jobs.jobs) == MOST_JOBS
    assert jobs.left_out == MOST_BLOCKS + 10 + MOST_JOBS_OF_NODE + 1
    nodes.clock.now += FORGET_SECONDS + 1
    jobs.forget_old()
    assert not jobs.jobs
    assert not jobs._told
    assert not jobs._tellers


def test_a_node_that_tells_a_smaller_job_cuts_off_nobody() -> None:
    jobs = Nodes(0).jobs
    values = (0.1,) * 50
    for rank in range(4):
        jobs.put(f"n{rank}", (block("train", rank, 1 if rank == 2 else 4, 0, values),))
        assert bool(jobs._due) is (rank == 3)
    asyncio.run(jobs.judge())
    assert len(jobs.jobs["train"].ranks) == 4


def test_steps_may_come_while_a_large_job_is_judged_and_the_loop_goes_on() -> None:
    nodes = Nodes(0)
    jobs = nodes.jobs
    many = 4 * MOST_AT_ONCE
    values = tuple(0.1 + (step % 5) / 500 for step in range(50))

    def tell(number: int) -> None:
        for rank in range(many):
            jobs.put(f"n{rank}", (block("train", rank, many, 50 * number, values),))

    async def judged() -> tuple[int, int]:
        tell(0)
        judging = asyncio.create_task(jobs.judge())
        await asyncio.sleep(0)
        assert not jobs.jobs["train"].ranks  # the first block, too, is judged beside the loop
        turns = told = 0
        while not judging.done():
            turns += 1
            if turns % 3 == 0 and told < 20:
                told += 1
                tell(told)
            await asyncio.sleep(0)
        await judging
        return turns, told

    turns, told = asyncio.run(judged())
    assert told > 0, turns
    asyncio.run(jobs.judge())
    assert len(jobs.jobs["train"].ranks) == many


def test_a_job_that_cannot_be_compared_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(2)
    jobs = nodes.jobs
    for rank in range(2):
        for name in ("bad", "good"):
            jobs.put(f"n{rank}", (block(name, rank, 2, 0, (0.1,) * 50),))
    jobs.jobs["bad"]._open[0]["n0"] = Block(first_step=0, own_seconds=(), ranks=(0,))  # no block of 50 steps
    asyncio.run(jobs.judge())
    assert len(jobs.jobs["good"].ranks) == 2
    assert "the steps of job bad could not be compared" in caplog.text


def shown(aggregator: Service, node: str) -> dict[str, Any]:
    record: dict[str, Any] = aggregator.get(f"/v1/nodes/{node}").json()
    return record


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_real_daemons_tell_the_steps_of_a_job_and_its_slow_rank_is_shown(tmp_path: Path) -> None:
    names = ("n1", "n2", "n3")
    with Cluster(tmp_path, checks=("memory_free", "proof", "job_steps")) as cluster:
        aggregator = cluster.fleet(*names)
        ranks = prepared.ScriptPopen(
            [sys.executable, "-c", RANKS, "1", *(str(cluster.run_dir(name)) for name in names)],
            env={**os.environ, **cluster.env, "PYTHONPATH": str(ROOT)},
        )
        cluster.others.append(ranks)

        def found() -> list[str]:
            return [one["code"] for one in shown(aggregator, "n2")["reasons"]]

        until(lambda: found() == ["SlowRank"], 60, lambda: str(aggregator.get("/v1/fleet/steps").text))
        assert shown(aggregator, "n2")["health"] == "degraded"
        message = shown(aggregator, "n2")["reasons"][0]["message"]
        assert "job train-9: its rank 1 works 55" in message
        assert message.endswith(", on cpu:0")
        assert "over 3 nodes" in message
        for other in ("n1", "n3"):
            assert shown(aggregator, other)["reasons"] == []
        said = cluster.healthd("fleet", "steps", "--aggregator", aggregator.url)
        assert said.code == 1
        assert "train-9: 3 ranks, 3 nodes compared" in said.out
        assert "n2 job train-9: its rank 1 works" in said.out
        assert "SlowRank" in aggregator.get("/nodes/n2").text
        assert "healthd_fleet_slow_ranks_nodes 1.0" in aggregator.get("/metrics").text
        # A warning keeps no job from its nodes.
        assert ask(aggregator.url, "next", list(names), wait=30)["decision"] == "admit"
        history = aggregator.get("/v1/nodes/n2/history")
        until(lambda: "slow rank" in aggregator.get("/v1/nodes/n2/history").text, 10, lambda: history.text)
