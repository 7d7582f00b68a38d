"""The contract: the decorator, parameters, and the order of statuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import (
    NO_LIMIT,
    Action,
    Blame,
    Context,
    Finding,
    Limit,
    NoParams,
    Scope,
    Status,
    Tier,
    check,
    load_params,
    worst,
)
from checks.host.machine import Host
from checks.reasons import REASONS, action_of, blame_of
from tests.every import every


@dataclass(frozen=True)
class Params:
    ratio: float = 0.5
    count: int = 3
    name: str = "x"
    strict: bool = False
    wanted: int | None = None
    least: float | None = None
    paths: tuple[str, ...] = ()


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def sample(ctx: Context[Params]) -> Iterator[Finding]:
    """A check for these tests."""
    yield Finding(status=Status.PASS, reason=None, message=ctx.params.name, target="node")


@check(tier="quick", interval_seconds=30, timeout_seconds=5, scope="device")
def plain(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield from ()


def test_worst_of_nothing_is_unknown_never_a_pass() -> None:
    """Rival fault 1."""
    assert worst([]) is Status.UNKNOWN


def test_worst_does_not_depend_on_the_order_and_unknown_beats_a_warning() -> None:
    for some in permutations((Status.PASS, Status.UNKNOWN, Status.WARN)):
        assert worst(some) is Status.UNKNOWN
    assert worst([Status.UNKNOWN, Status.FAIL]) is Status.FAIL
    assert worst([Status.SKIP, Status.PASS]) is Status.PASS
    assert worst([Status.SKIP]) is Status.SKIP


def test_decorator_makes_a_record_of_a_generator() -> None:
    assert (sample.name, sample.doc, sample.scope) == ("sample", "A check for these tests.", Scope.NODE)
    assert (sample.tier, sample.active, plain.active) == (Tier.PASSIVE, False, True)
    assert (plain.scope, plain.doc) == (Scope.DEVICE, "")
    assert [tier.rank for tier in Tier] == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [{"tier": "fast"}, {"scope": "planet"}])
def test_unknown_tier_or_scope_is_an_error_where_the_check_is_made(wrong: dict[str, str]) -> None:
    settings: dict[str, Any] = {"tier": "quick", "interval_seconds": 1, "timeout_seconds": 1, **wrong}
    with pytest.raises(ValueError, match=r"fast|planet"):
        check(**settings)(plain.run)


def test_parameters_have_the_type_that_the_annotation_names() -> None:
    assert sample.params_type is Params
    assert plain.params_type is NoParams


def test_check_runs_here_and_now_for_a_test() -> None:
    context: Context[Any] = Context(
        host=Host(None),
        params=Params(name="hello"),
        tier=Tier.PASSIVE,
        device=None,
        group=None,
        previous=None,
        inventory={},
        limits={},
    )
    assert [item.message for item in sample(context) if isinstance(item, Finding)] == ["hello"]


def test_limit_of_a_target_beats_the_one_of_all_and_none_is_no_limit() -> None:
    one, every = (Limit(lower=value, upper=None, origin="config") for value in (1.0, 2.0))
    context: Context[Any] = Context(
        host=Host(None),
        params=None,
        tier=Tier.PASSIVE,
        device=None,
        group=None,
        previous=None,
        inventory={},
        limits={"a_bytes@path:/": one, "a_bytes": every},
    )
    assert context.limit("a_bytes", "path:/") is one
    assert context.limit("a_bytes", "path:/tmp") is every
    assert context.limit("b_bytes") is NO_LIMIT


def test_good_parameters_are_taken_with_whole_numbers_as_floats_and_lists_as_tuples() -> None:
    values = {"ratio": 1, "count": 4, "wanted": None, "least": 2, "paths": ["/", "/tmp"], "strict": True}
    loaded = load_params(Params, values)
    assert loaded == Params(ratio=1.0, count=4, wanted=None, least=2.0, paths=("/", "/tmp"), strict=True)
    assert isinstance(loaded.ratio, float)
    assert load_params(Params, {}) == Params()


@every(
    ("values", "words"),
    [
        ({"ration": 1.0}, "no parameter 'ration'; did you mean 'ratio'"),
        ({"zzz": 1}, "no parameter 'zzz'; it has: count, least, name"),
        ({"ratio": "1"}, "'ratio' must be float, not '1'"),
        ({"ratio": None}, "'ratio' must be float, not None"),
        ({"ratio": True}, "'ratio' must be float, not True"),
        ({"count": 1.5}, "'count' must be int, not 1.5"),
        ({"count": True}, "'count' must be int, not True"),
        ({"strict": 1}, "'strict' must be bool, not 1"),
        ({"name": 1}, "'name' must be str, not 1"),
        ({"paths": "/tmp"}, "'paths' must be a list, not '/tmp'"),
        ({"paths": [1]}, "'paths' must be str, not 1"),
    ],
)
def test_wrong_parameter_is_one_line_that_names_key_and_remedy(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="parameter") as caught:
        load_params(Params, values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check_without_parameters_refuses_any() -> None:
    with pytest.raises(ValueError, match="no parameter 'x'; it has: none"):
        load_params(NoParams, {"x": 1})


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "/tmp", "1"])


@given(st.dictionaries(st.sampled_from(sorted(Params.__dataclass_fields__)), scalars | st.lists(scalars, max_size=3)))
def test_any_values_are_parameters_of_the_right_types_or_a_value_error(values: dict[str, Any]) -> None:
    try:
        loaded = load_params(Params, values)
    except ValueError:
        return
    assert type(loaded.ratio) is float
    assert type(loaded.count) is int
    assert type(loaded.strict) is bool
    assert all(type(path) is str for path in loaded.paths)


def test_every_reason_has_a_meaning_and_an_unknown_code_never_blames_the_node() -> None:
    assert all(reason.code == code and reason.meaning.endswith(".") for code, reason in REASONS.items())
    assert blame_of("SomethingForeign") is Blame.CHECK
    assert action_of(None) is Action.INSPECT


@pytest.mark.parametrize("scope", ["device", "group"])
def test_check_on_devices_cannot_be_passive(scope: str) -> None:
    with pytest.raises(ValueError, match=f"^a check with scope='{scope}' uses devices, so its tier cannot be"):
        check(tier="passive", interval_seconds=30, timeout_seconds=5, scope=scope)
