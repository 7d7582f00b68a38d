"""What SageMaker's variables and its file mean, and what they cannot mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.core.errors import ConfigError
from healthd.integrations.sagemaker.launcher import find
from tests.every import every
from tests.hooks.launchers_kit import (
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line,
    makes_no_sense,
    one_line,
    place_of,
    without,
)


def training(**changes: str) -> dict[str, str]:
    hosts = json.dumps(["algo-1", "algo-10", "algo-2"])
    return {"SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-10", "TRAINING_JOB_NAME": "fine-tune", **changes}


def test_its_hosts_are_counted_in_the_order_of_their_numbers() -> None:
    assert place_of(training(), "SageMaker") == (2, 3, "fine-tune", 0, "algo-1")


@every(
    ("variables", "said"),
    [
        (without(training(), "SM_HOSTS"), "SM_HOSTS is not"),
        (training(SM_HOSTS="algo-1,algo-2"), "not a list of host names"),
        (training(SM_CURRENT_HOST="algo-3"), "'algo-3' is not among the hosts algo-1, algo-2, algo-10"),
    ],
)
def test_variables_that_make_no_sense_or_are_half_there_are_one_clear_line(
    variables: dict[str, str], said: str
) -> None:
    makes_no_sense(variables, said)


def test_any_variables_are_a_place_or_one_clear_line() -> None:
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(training)


def test_a_container_of_ones_own_has_only_the_file(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(
        json.dumps({"current_host": "algo-2", "hosts": ["algo-2", "algo-1"], "network_interface_name": "x"})
    )
    found = find({"TRAINING_JOB_NAME": "t"}, file=file)
    assert found is not None
    assert (found.rank, found.size, found.main, found.job) == (1, 2, "algo-1", "t")
    assert str(file) in found.evidence


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["algo-1", "algo-2", ""]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["current_host", "hosts"]), inner),
        max_leaves=6,
    ),
    st.integers(min_value=0, max_value=40),
)
def test_any_resource_config_is_a_place_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, content: object, cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "resourceconfig.json"
    text = json.dumps(content)
    file.write_text(text[: max(0, len(text) - cut)])
    try:
        found = find({}, file=file)
    except ConfigError as error:
        one_line(error)
    else:
        assert found is not None
        assert found.rank < found.size
