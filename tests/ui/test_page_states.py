"""The pages over any state that a node may send: whatever is optional may be missing, alone or with the rest."""

from __future__ import annotations

import dataclasses
import enum
import html
import re
import string
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.contract import Finding, Measurement, Status, Tier
from healthd.core.model import CheckResult, DeviceRecord, Inventory, NodeState
from tests.profile import examples
from tests.ui.stage import Stage, stage

WORDS = st.text(alphabet=string.ascii_letters + string.digits + " :/._-<&é", min_size=1, max_size=12)
NUMBERS = st.floats(min_value=0, max_value=1e15)


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type of the model; of each `X | None` also None, of each collection also an empty one."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.fixed_dictionaries({name: anything(hint) for name, hint in hints.items()}).map(
            lambda values: kind(**values)  # type: ignore[operator]
        )
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(st.none() if one is type(None) else anything(one) for one in of)
    if origin is tuple:
        return st.lists(anything(of[0]), max_size=2).map(tuple)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(anything(of[0]), anything(of[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return {str: WORDS, float: NUMBERS, int: st.integers(0, 2**40), bool: st.booleans()}[kind]


@pytest.fixture(scope="module")
def open_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("states")) as found:
        yield found


def changes(state: NodeState) -> dict[str, Any]:
    """A state without its name and leases, as changes of the node's last one."""
    kept = {field.name for field in dataclasses.fields(state)} - {"node", "leases", "allocated"}
    return {name: getattr(state, name) for name in kept}


def shows(stage: Stage, node: str, **changed: Any) -> str:
    """The page of a node that reports so; the pages of the fleet and of each grouping are whole as well."""
    stage.say(node, **changed)
    with stage.http() as client:
        grid = client.get("/")
        assert grid.status_code == 200, grid.text
        for choice in re.findall(r'<option value="([^"]*)"', grid.text):
            assert client.get("/", params={"group": html.unescape(choice)}).status_code == 200
        answer = client.get(f"/nodes/{node}")
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("labels", [{}, {"rack": "r1"}, {"pool": ""}])
def test_a_node_without_the_label_pool_has_its_page(open_stage: Stage, labels: dict[str, str]) -> None:
    text = shows(open_stage, "bare", labels=labels)
    assert "· pool" not in text
    assert all(value in text for value in labels.values())


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(anything(NodeState))
def test_a_node_has_its_page_whatever_its_state_leaves_out(open_stage: Stage, state: NodeState) -> None:
    shows(open_stage, "any", **changes(state))


OPTIONAL = {
    kind: [name for name, hint in get_type_hints(kind).items() if type(None) in get_args(hint)]
    for kind in (NodeState, Inventory, DeviceRecord, CheckResult, Finding, Measurement)
}


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([(kind, name) for kind, names in OPTIONAL.items() for name in names]),
    st.sampled_from(Status),
)
def test_each_optional_field_may_be_the_one_that_is_missing(
    open_stage: Stage, gone: tuple[type, str], status: Status
) -> None:
    kind, name = gone

    def built(wanted: type, **values: Any) -> Any:
        return wanted(**values | ({name: None} if kind is wanted else {}))

    number = built(Measurement, name="matmul_flops_per_second", value=1.5, lower=1.0, upper=2.0, origin="default")
    finding = built(
        Finding, status=status, reason="SlowDevice", message="slow", target="cpu:0", measurements=(number, number)
    )
    result = built(
        CheckResult,
        check="matmul",
        tier="quick",
        status=status,
        findings=(finding, finding),
        age_seconds=1.0,
        started_at=5.0,
        duration_seconds=0.1,
        attempts=1,
        error="last words",
        injected=False,
        executor="daemon",
    )
    device = built(DeviceRecord, target="cpu:0", kind="cpu", serial="s1", cores=4, memory_bytes=2**34)
    inventory = built(
        Inventory, accelerator="cpu", device_count=1, core_count=4, memory_bytes=2**34, efa_count=1, devices=(device,)
    )
    values = {"instance_type": "t1", "instance_id": "i-1", "boot_id": "b", "address": "10.0.0.1:1", "hostname": "h"}
    own = {name: None} if kind is NodeState else {}
    text = shows(open_stage, "each", **{"inventory": inventory, "results": (result,), **values, **own})
    assert "cpu:0" in text or kind is NodeState


@pytest.mark.parametrize(("origin", "said"), [("none", True), ("floor", True), ("baseline", False)])
def test_a_node_whose_speeds_have_no_limit_says_so_on_its_page(open_stage: Stage, origin: str, said: bool) -> None:
    speed = Measurement(name="matmul_flops_per_second", value=1e12, lower=None, upper=None, origin=origin)
    finding = Finding(status=Status.PASS, reason=None, message="exact", target="cpu:0", measurements=(speed,))
    result = CheckResult(
        check="matmul",
        tier=Tier.QUICK,
        status=Status.PASS,
        findings=(finding,),
        age_seconds=1.0,
        started_at=5.0,
        duration_seconds=0.1,
        attempts=1,
        error=None,
        injected=False,
        executor="daemon",
    )
    assert ("no speed limits configured" in shows(open_stage, "speeds", results=(result,))) is said
