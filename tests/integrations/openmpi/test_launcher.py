"""What Open MPI's variables mean, and what they cannot mean."""

from __future__ import annotations

from tests.every import every
from tests.hooks.launchers_kit import (
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line,
    makes_no_sense,
    place,
    place_of,
    without,
)


def mpi(**changes: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        **changes,
    }


def test_it_counts_processes_and_we_count_nodes() -> None:
    assert place_of(mpi(), "Open MPI") == (1, 2, None, 0, "10.0.0.1")
    found = place(mpi())
    assert (found.local_rank, found.local_size) == (1, 2)


@every(
    ("variables", "said"),
    [
        (without(mpi(), "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not"),
        (mpi(OMPI_COMM_WORLD_LOCAL_RANK="0"), "not placed node by node; use mpirun --map-by slot"),
        (without(mpi(), "MASTER_ADDR"), "Open MPI does not provide the address of rank 0: set MASTER_ADDR"),
    ],
)
def test_variables_that_make_no_sense_or_are_half_there_are_one_clear_line(
    variables: dict[str, str], said: str
) -> None:
    makes_no_sense(variables, said)


def test_any_variables_are_a_place_or_one_clear_line() -> None:
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(mpi)
