"""What Slurm's variables mean, and what they cannot mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import find_place
from healthd.integrations.slurm.launcher import expand
from tests.every import every
from tests.hooks.launchers_kit import (
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line,
    makes_no_sense,
    one_line,
    place,
    place_of,
    without,
)


def step(**changes: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[4-5]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_RESTART_COUNT": "1",
        **changes,
    }


def test_it_counts_processes_and_we_count_nodes() -> None:
    assert place_of(step(), "Slurm") == (1, 2, "slurm-77", 1, "n4")
    found = place(step())
    assert (found.local_rank, found.local_size) == (1, 2)


def test_a_shell_and_a_prolog_are_no_task() -> None:
    assert find_place({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}) is None, "a shell of salloc is no task"
    prolog = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SCRIPT_CONTEXT": "prolog_slurmctld"}
    assert find_place(prolog) is None, "a prolog is no task of its job"


@every(
    ("variables", "said"),
    [
        (without(step(), "SLURM_NODEID"), "SLURM_NODEID is not"),
        (without(step(), "SLURM_STEP_ID"), "this is the batch script of job 77 on 2 nodes.*srun"),
        (step(SLURM_STEP_NODELIST="n4"), "lists 1 nodes"),
        (step(SLURM_STEP_NODELIST="n[4-"), "cannot be read"),
        (step(SLURM_STEP_TASKS_PER_NODE="two"), "tasks per node 'two' cannot be read"),
    ],
)
def test_variables_that_make_no_sense_or_are_half_there_are_one_clear_line(
    variables: dict[str, str], said: str
) -> None:
    makes_no_sense(variables, said)


def test_any_variables_are_a_place_or_one_clear_line() -> None:
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(step)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07]-ib,m", ["n1-ib", "n2-ib", "n3-ib", "n07-ib", "m"]),
        ("trn-[08-11]", ["trn-08", "trn-09", "trn-10", "trn-11"]),
        ("a,b[2],c", ["a", "b2", "c"]),
    ],
)
def test_lists_of_nodes_are_expanded_as_slurm_does(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@every("text", ["", ",", "n[", "n[]", "n[3-1]", "n[a-b]", "n[1-9999999999]", "n]1"])
def test_a_list_of_nodes_that_is_none_is_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        expand(text)


@given(st.text(alphabet="n01-9[],x ", max_size=20))
def test_any_text_is_a_list_of_nodes_or_one_clear_line(text: str) -> None:
    try:
        hosts = expand(text)
    except ConfigError as error:
        one_line(error)
    else:
        assert hosts
        assert all(hosts)
