"""One job over many nodes: one slow node is named soon, uneven data accuses nobody, and what is told is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from healthd.integrations.steps.blocks import BLOCK_STEPS, LEAST_KNOWN_STEPS, MOST_WAITING, Block, Blocks
from healthd.integrations.steps.datagram import StepReport
from healthd.integrations.steps.over_nodes import MOST_OPEN, JobOverNodes, are_bounded
from tests.every import every
from tests.integrations.steps.detector_kit import STEP_SECONDS, Own, by_blocks, by_drift, by_length, by_turns, noisy


def blocks(own: Own, count: int, nodes: int) -> list[dict[str, Block]]:
    """What nodes of one rank each tell of so many blocks; steps in order, so that data may go on from step to step."""
    told: list[dict[str, Block]] = []
    for first in range(0, count * BLOCK_STEPS, BLOCK_STEPS):
        rows = [[own(step, rank) for rank in range(nodes)] for step in range(first, first + BLOCK_STEPS)]
        told.append(
            {
                f"n{rank}": Block(first_step=first, own_seconds=tuple(row[rank] for row in rows), ranks=(rank,))
                for rank in range(nodes)
            }
        )
    return told


def judged(told: Sequence[Mapping[str, Block]], *, size: int | None = None) -> list[tuple[str, ...]]:
    """Who is slow after each block."""
    job = JobOverNodes(size or len(told[0]))
    found: list[tuple[str, ...]] = []
    for nodes in told:
        for node, block in nodes.items():
            if job.put(node, block):
                while job.judge():
                    found.append(tuple(job.slow))
    return found


@pytest.mark.parametrize("nodes", [4, 64, 512])
def test_a_node_that_is_a_tenth_slower_is_named_within_five_windows(nodes: int) -> None:
    for seed in range(1 if nodes > 64 else 5):
        own, slow = noisy(random.Random(seed), 0.02), (7 * seed + 1) % nodes
        found = judged(blocks(lambda step, rank: own(step, rank) * (1.1 if rank == slow else 1), 6, nodes))  # noqa: B023
        assert (f"n{slow}",) in found[:5], (nodes, seed, found)
        assert all(who in ((), (f"n{slow}",)) for who in found)


def test_a_step_that_is_long_for_all_hides_nobody() -> None:
    """Lengths that all ranks have in common change every step by half, and the slow one is still seen step by step."""
    chance, own = random.Random(3), noisy(random.Random(4))
    common = [chance.uniform(0.5, 1.5) for _ in range(6 * BLOCK_STEPS)]
    found = judged(blocks(lambda step, rank: own(step, rank) * common[step] * (1.1 if rank == 2 else 1), 6, 8))
    assert ("n2",) in found[:5]


@pytest.mark.parametrize("kind", [by_length, by_blocks, by_turns, by_drift])
def test_uneven_data_accuses_nobody_in_a_hundred_runs(kind: Callable[[random.Random, int], Own]) -> None:
    """A quarter of the runs each."""
    for seed in range(25):
        nodes = (4, 16)[seed % 2]
        found = judged(blocks(kind(random.Random(f"{kind.__name__} {seed}"), nodes), 12, nodes))
        assert found
        assert set(found) == {()}, (kind.__name__, seed, found)


def test_a_job_that_goes_on_with_other_nodes_accuses_none_of_those_before() -> None:
    """One node alone cannot be compared, and what was found with others says nothing of it."""
    own = noisy(random.Random(2))
    told = blocks(lambda step, rank: own(step, rank) * (1.2 if rank == 1 else 1), 8, 4)
    job = JobOverNodes(4)
    for nodes in told[:6]:
        for node, block in nodes.items():
            job.put(node, block)
        job.judge()
    assert tuple(job.slow) == ("n1",)
    one = told[6]["n0"]
    lossy = {node: Block(block.first_step, (None,) * BLOCK_STEPS, block.ranks) for node, block in told[6].items()}
    for node, block in lossy.items():
        job.put(node, block)
    assert job.judge()
    assert tuple(job.slow) == ("n1",), "datagrams that were lost clear nobody"
    job.size = 1
    job.put("n7", Block(told[7]["n0"].first_step, one.own_seconds, (0,)))
    assert job.judge()
    assert tuple(job.slow) == ()


def test_half_of_the_nodes_that_are_slower_are_not_accused_with_more_than_the_others() -> None:
    own = noisy(random.Random(2))
    found = judged(blocks(lambda step, rank: own(step, rank) * (1.2 if rank < 5 else 1), 6, 8))
    assert set(found) == {()}


def test_a_block_is_judged_when_all_ranks_are_there_or_it_is_left_behind() -> None:
    own = noisy(random.Random(2))
    told = blocks(lambda step, rank: own(step, rank) * (1.2 if rank == 1 else 1), 6 + MOST_OPEN, 4)
    missing = [{name: block for name, block in nodes.items() if name != "n3"} for nodes in told]
    assert len(judged(missing, size=4)) == 6 * 1
    assert judged(missing, size=4)[-1] == ("n1",)
    assert len(judged(missing, size=3)) == 6 + MOST_OPEN


def test_what_is_told_twice_or_late_does_not_count_and_a_job_that_begins_again_does() -> None:
    told = blocks(noisy(random.Random(2)), 12, 4)
    job = JobOverNodes(4)
    for nodes in told:
        for node, block in nodes.items():
            job.put(node, block)
        job.judge()
    assert job.windows == 10
    assert not any(job.put(node, block) for node, block in told[-1].items())
    assert not job.judge()
    for node, block in told[0].items():
        job.put(node, block)
    assert job.judge()
    assert job.windows == 1


def test_nodes_that_claim_the_same_rank_are_not_compared() -> None:
    own = blocks(noisy(random.Random(2)), 1, 4)[0]
    own["stranger"] = own["n1"]
    job = JobOverNodes(5)
    assert any(job.put(node, block) for node, block in own.items())
    assert job.judge()
    assert job.windows == 0


# --- what a node tells ------------------------------------------------------------------------------------------------


def reported(
    collected: Blocks, steps: Sequence[int], *, seconds: float = STEP_SECONDS, work: float | None = None
) -> None:
    for step in steps:
        ranks = {rank: StepReport("j", rank, 8, step, seconds * (1 + rank / 100), 0.01, work) for rank in (4, 5, 6)}
        collected.add(step, ranks)


def test_a_block_is_of_the_same_steps_everywhere_and_has_the_median_rank() -> None:
    collected = Blocks(1.0)
    reported(collected, range(30, 130))
    (block,) = collected.waiting
    assert (block.first_step, block.ranks) == (50, (4, 5, 6))
    assert list(block.own_seconds) == pytest.approx([1.05 * STEP_SECONDS] * BLOCK_STEPS)
    told = Blocks(1.0)
    reported(told, range(65), work=100.0)
    assert told.waiting[0].own_seconds[0] == pytest.approx(1.05 * STEP_SECONDS / 100)


def test_lost_steps_are_told_as_such_and_too_many_tell_nothing() -> None:
    collected = Blocks(1.0)
    reported(collected, [step for step in range(65) if step != 7])
    assert collected.waiting[0].own_seconds[7] is None
    assert are_bounded(collected.waiting[0].own_seconds, collected.waiting[0].ranks)
    few = Blocks(1.0)
    reported(few, [*range(LEAST_KNOWN_STEPS - 1), *range(50, 65)])
    assert not few.waiting


def test_fast_jobs_tell_fewer_blocks_and_all_nodes_the_same_ones() -> None:
    collected = Blocks(25.0)
    reported(collected, range(40 * BLOCK_STEPS), seconds=0.05)  # 3.1 s a block, so every eighth
    assert [block.first_step // BLOCK_STEPS % 8 for block in collected.waiting] == [0] * MOST_WAITING
    other = Blocks(25.0)
    reported(other, range(40 * BLOCK_STEPS), seconds=0.02)  # every sixteenth, which the others tell too
    assert all(block.first_step // BLOCK_STEPS % 16 == 0 for block in other.waiting)
    tiny = Blocks(25.0)
    reported(tiny, range(40 * BLOCK_STEPS), seconds=0.001)
    assert not tiny.waiting


@every(
    ("own", "ranks"),
    [
        ([0.1] * 49, (0,)),
        ([0.1] * 51, (0,)),
        ([-0.1] * 50, (0,)),
        ([float("nan")] * 50, (0,)),
        ([1e9] * 50, (0,)),
        ([0.1] * 50, ()),
        ([0.1] * 50, (-1,)),
        ([0.1] * 50, tuple(range(65))),
    ],
)
def test_what_is_no_block_is_left_out(own: Sequence[float], ranks: Sequence[int]) -> None:
    assert are_bounded([0.1] * 50, (0,))
    assert not are_bounded(own, ranks)


def test_blocks_that_nobody_judges_do_not_pile_up() -> None:
    job = JobOverNodes(4)
    for number in range(10 * MOST_OPEN):
        job.put("n0", Block(first_step=number * BLOCK_STEPS, own_seconds=(0.1,) * BLOCK_STEPS, ranks=(0,)))
    assert len(job._open) <= 2 * MOST_OPEN
