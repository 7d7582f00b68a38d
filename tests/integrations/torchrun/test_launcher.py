"""What torchrun's variables mean, and what they cannot mean."""

from __future__ import annotations

import pytest

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import find_place
from healthd.integrations.torchrun.launcher import renumber
from tests.every import every
from tests.hooks.launchers_kit import (
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line,
    makes_no_sense,
    place,
    place_of,
)


def torch(**changes: str) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "GROUP_RANK": "1",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "12",
        "MASTER_ADDR": "10.0.0.1",
        **changes,
    }


def test_it_counts_processes_and_we_count_nodes() -> None:
    assert place_of(torch(), "torchrun") == (1, 3, "run-7", 0, "10.0.0.1")
    found = place(torch())
    assert (found.local_rank, found.local_size) == (1, 4)


def test_a_run_without_an_id_has_no_name() -> None:
    assert place(torch(TORCHELASTIC_RUN_ID="none")).job is None


def test_somebodys_own_variables_are_not_torchruns() -> None:
    assert find_place({"RANK": "1", "WORLD_SIZE": "2"}) is None


@every(
    ("variables", "said"),
    [
        (torch(WORLD_SIZE="10"), "10 ranks cannot be divided into nodes of 4"),
        (torch(LOCAL_WORLD_SIZE="0"), "cannot be divided"),
        (torch(GROUP_RANK="first"), "GROUP_RANK='first' is not a number"),
        (torch(GROUP_RANK="9"), "torchrun: rank 9 of 3 nodes"),
        (torch(LOCAL_RANK="-1"), "LOCAL_RANK='-1' is not a number"),
        (torch(WORLD_SIZE=""), "WORLD_SIZE='' is not a number"),
    ],
)
def test_variables_that_make_no_sense_are_one_clear_line(variables: dict[str, str], said: str) -> None:
    makes_no_sense(variables, said)


def test_any_variables_are_a_place_or_one_clear_line() -> None:
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(torch)


def test_a_number_of_nodes_that_contradicts_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"4 nodes were requested, but torchrun has 3 \("):
        find_place(torch(), size=4)
    told = find_place(torch(), size=3, main="head")
    assert told is not None
    assert told.main == "head"


def test_how_often_an_agent_has_restarted_is_no_attempt_of_the_job() -> None:
    """Each counts its own restarts, so that nodes of one job would tell different attempts."""
    for count in ("0", "2"):
        found = place(torch(TORCHELASTIC_RESTART_COUNT=count))
        assert (found.attempt, found.attempt_told) == (0, False)


def test_the_ranks_of_a_smaller_job_are_renumbered_and_the_store_stays_where_it_is() -> None:
    told = renumber(torch(), rank=0, size=2, main="10.0.0.2")
    assert told == {
        "GROUP_RANK": "0",
        "RANK": "1",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "HEALTHD_MAIN": "10.0.0.2",
    }
