"""What tests of launchers share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Place, describe, find_place


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def one_line(error: ConfigError) -> None:
    assert "\n" not in str(error)


def place(variables: dict[str, str]) -> Place:
    found = find_place(variables)
    assert found is not None
    return found


def place_of(variables: dict[str, str], source: str) -> tuple[int, int, str | None, int, str]:
    """Rank, size, job, attempt and host of rank 0, by a launcher that says from what it has them."""
    found = place(variables)
    assert found.source == source
    assert found.evidence
    assert describe(found).startswith(f"rank {found.rank} of {found.size} by {source} ({found.evidence})")
    return found.rank, found.size, found.job, found.attempt, found.main


def makes_no_sense(variables: dict[str, str], said: str) -> None:
    """These variables are refused by one clear line."""
    with pytest.raises(ConfigError, match=said) as told:
        find_place(variables)
    one_line(told.value)


def any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(make: Callable[[], dict[str, str]]) -> None:
    """Whatever becomes of a launcher's variables."""

    @given(data=st.data())
    def tried(data: st.DataObject) -> None:
        variables = make()
        for name in list(variables):
            fate = data.draw(st.sampled_from(["kept", "kept", "lost", "changed"]))
            if fate == "lost":
                del variables[name]
            elif fate == "changed":
                values = ["", "0", "1", "7", "-1", "x", "²", "9" * 30, "[1]", "null"]
                variables[name] = data.draw(st.sampled_from(values))
        try:
            found = find_place(variables)
        except ConfigError as error:
            one_line(error)
        else:
            assert found is None or (0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size)
            assert found is None or found.main

    tried()
