"""What the variables of AWS Batch mean, and what they cannot mean."""

from __future__ import annotations

from healthd.integrations.batch.launcher import MAIN_ADDRESS, rank_of
from tests.every import every
from tests.hooks.launchers_kit import (
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line,
    makes_no_sense,
    place,
    place_of,
    without,
)


def multi_node(**changes: str) -> dict[str, str]:
    return {
        "AWS_BATCH_JOB_ID": "f0ab#2",
        "AWS_BATCH_JOB_ATTEMPT": "3",
        "AWS_BATCH_JOB_NUM_NODES": "4",
        "AWS_BATCH_JOB_NODE_INDEX": "2",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1",
        **changes,
    }


def test_a_node_of_a_multi_node_job_knows_its_place() -> None:
    assert place_of(multi_node(), "AWS Batch") == (2, 4, "f0ab", 2, "10.0.0.1")
    assert place(multi_node()).main_counts


@every(
    ("variables", "said"),
    [
        (without(multi_node(), "AWS_BATCH_JOB_NODE_INDEX"), "AWS_BATCH_JOB_NODE_INDEX is not"),
        (without(multi_node(), "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"), "is not set on node 2"),
        (multi_node(AWS_BATCH_JOB_NODE_INDEX="4"), "cannot both be of 4 nodes"),
    ],
)
def test_variables_that_make_no_sense_or_are_half_there_are_one_clear_line(
    variables: dict[str, str], said: str
) -> None:
    makes_no_sense(variables, said)


def test_any_variables_are_a_place_or_one_clear_line() -> None:
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(multi_node)


def test_the_main_node_is_rank_0_whatever_its_index() -> None:
    assert [rank_of(index, 2) for index in range(4)] == [1, 2, 0, 3]
    main = place(without(multi_node(AWS_BATCH_JOB_MAIN_NODE_INDEX="2"), MAIN_ADDRESS))
    assert main.rank == 0
    assert main.main not in ("", "127.0.0.1"), "children are told this address by Batch, so it must be reachable"


def test_a_single_job_and_a_child_of_an_array_are_jobs_of_one_node() -> None:
    single = place({"AWS_BATCH_JOB_ID": "a1", "AWS_BATCH_JOB_ATTEMPT": "1"})
    child = place({"AWS_BATCH_JOB_ID": "a1:7", "AWS_BATCH_JOB_ARRAY_INDEX": "7", "AWS_BATCH_JOB_ATTEMPT": "2"})
    assert (single.rank, single.size, single.job, single.attempt) == (0, 1, "a1", 0)
    assert (child.rank, child.size, child.job, child.attempt) == (0, 1, "a1:7", 1)
    assert "child 7 of an array" in child.source
