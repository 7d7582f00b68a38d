"""Who am I among how many: what torchrun's variables mean, and what they cannot mean."""

from __future__ import annotations

import pytest

from healthd.errors import ConfigError
from healthd.launchers import find_place, torchrun


def variables(**changes: str) -> dict[str, str]:
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


def test_torchrun_counts_processes_and_we_count_nodes() -> None:
    place = find_place(variables())
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 3, 1, 4)
    assert (place.job, place.attempt, place.main, place.source) == ("run-7", 2, "10.0.0.1", "torchrun")


def test_a_run_without_an_id_has_no_name() -> None:
    place = find_place(variables(TORCHELASTIC_RUN_ID="none"))
    assert place is not None
    assert place.job is None


def test_without_a_launcher_there_is_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "1", "WORLD_SIZE": "2"}) is None, "somebody's own variables are not torchrun's"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": "10"}, "10 ranks do not divide over nodes of 4"),
        ({"LOCAL_WORLD_SIZE": "0"}, "do not divide"),
        ({"GROUP_RANK": "first"}, "GROUP_RANK='first' is not a number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a number"),
    ],
)
def test_variables_that_make_no_sense_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_place(variables(**changes))


def test_the_ranks_of_a_smaller_job_are_renumbered_and_the_store_stays_where_it_is() -> None:
    told = torchrun.renumber(variables(), rank=0, size=2, main="10.0.0.2")
    assert told == {
        "GROUP_RANK": "0",
        "RANK": "1",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "HEALTHD_MAIN": "10.0.0.2",
    }
