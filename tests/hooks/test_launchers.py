"""Who am I among how many, where a process runs inside of several launchers."""

from __future__ import annotations

import dataclasses

import pytest

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Place, find_place, innermost

INNER = Place(
    job=None,
    attempt=0,
    rank=2,
    size=4,
    main="",
    local_rank=1,
    local_size=8,
    source="inner",
    evidence="INNER_RANK=2",
    attempt_told=False,
)
OUTER = Place(
    job="train",
    attempt=3,
    rank=2,
    size=4,
    main="head",
    local_rank=0,
    local_size=1,
    source="outer",
    main_counts=True,
)


def test_without_a_launcher_there_is_no_place() -> None:
    assert find_place({}) is None


def test_of_several_launchers_the_innermost_counts_and_the_outer_ones_complete_it() -> None:
    found = innermost([INNER, OUTER])
    assert (found.source, found.local_size, found.job, found.attempt) == ("inner", 8, "train", 3)
    assert found.main == "head"
    assert found.main_counts, "the exit code of the main node is the job's, whoever started the process in it"


def test_a_launcher_that_counts_other_nodes_does_not_say_where_rank_0_is_if_the_inner_one_does() -> None:
    inner = dataclasses.replace(INNER, main="first")
    found = innermost([inner, dataclasses.replace(OUTER, size=8, rank=4)])
    assert (found.main, found.main_counts, found.job) == ("first", False, "train")


def test_what_the_user_says_completes_it_and_cannot_contradict_it() -> None:
    assert innermost([INNER], size=4, main="mine").main == "mine"
    with pytest.raises(ConfigError, match=r"5 nodes were requested, but inner has 4 \(INNER_RANK=2\)"):
        innermost([INNER], size=5, main="mine")
    with pytest.raises(ConfigError, match="inner does not provide the address of rank 0: set MASTER_ADDR"):
        innermost([INNER])


def test_the_only_node_is_its_own_main_one() -> None:
    assert innermost([dataclasses.replace(INNER, rank=0, size=1)]).main == "127.0.0.1"


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 4 of 4 nodes"):
        dataclasses.replace(INNER, rank=4)
