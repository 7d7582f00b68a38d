"""The taint on a node: ours alone, and put there and taken away whatever others do to the node meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.aggregator.drain.plan import ActuatorError, Done
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.drain.targets import make_actuator
from healthd.core.errors import ConfigError
from healthd.integrations.kubernetes.actuator import KubernetesActuator
from healthd.integrations.kubernetes.settings import KubernetesActuatorSettings
from tests.aggregator.actuators_kit import removal
from tests.clients.api_server_kit import Cluster, cluster

KEY = "healthd.internal/removed"


@pytest.fixture(name="kube")
def _kube(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "account") as made:
        yield made


def tainter(kube: Cluster, owner: str = "healthd") -> KubernetesActuator:
    return KubernetesActuator(kube.server, key=KEY, owner=owner)


OURS = {"key": KEY, "value": "healthd", "effect": "NoSchedule"}
NEURON = {"key": "aws.amazon.com/neuron", "value": "", "effect": "NoSchedule"}


async def test_taint_joins_the_others_and_goes_alone(kube: Cluster) -> None:
    kube.add("n1", taints=[NEURON], zone="a")

    made = tainter(kube)
    assert (await made.remove(removal())).done is Done.OUT
    assert kube.taints("n1") == [NEURON, OURS]
    assert await made.marked() == {"n1": "rule:hard: EccErrors on neuron:3"}
    assert (await made.restore("n1")).done is Done.BACK
    assert kube.taints("n1") == [NEURON]
    assert kube.nodes["n1"]["metadata"]["labels"] == {"zone": "a"}
    assert kube.nodes["n1"]["metadata"]["annotations"] == {}
    assert await made.marked() == {}


def test_jobs_that_run_are_never_evicted(kube: Cluster) -> None:
    kube.add("n1")
    asyncio.run(tainter(kube).remove(removal()))
    assert [taint["effect"] for taint in kube.taints("n1")] == ["NoSchedule"]
    assert "unschedulable" not in kube.nodes["n1"]["spec"]


def test_tainting_twice_writes_once(kube: Cluster) -> None:
    kube.add("n1")

    async def play() -> None:
        for _ in range(3):
            assert (await tainter(kube).remove(removal())).done is Done.OUT

    asyncio.run(play())
    assert len(kube.writes()) == 1


def test_taint_of_somebody_else_survives(kube: Cluster) -> None:
    theirs = {"key": KEY, "value": "ada", "effect": "NoSchedule"}
    kube.add("n1", taints=[theirs])

    async def play() -> None:
        made = tainter(kube)
        outcome = await made.remove(removal())
        assert outcome.done is Done.LEFT
        assert "does not belong to healthd" in outcome.note
        assert (await made.restore("n1")).done is Done.LEFT

    asyncio.run(play())
    assert kube.taints("n1") == [theirs]
    assert kube.writes() == []


def test_cordon_of_a_person_survives_our_taint_and_its_end(kube: Cluster) -> None:
    kube.add("n1")
    kube.nodes["n1"]["spec"]["unschedulable"] = True

    async def play() -> None:
        made = tainter(kube)
        await made.remove(removal())
        await made.restore("n1")

    asyncio.run(play())
    assert kube.nodes["n1"]["spec"]["unschedulable"] is True
    assert kube.taints("n1") == []


async def test_two_aggregators_leave_each_other_alone(kube: Cluster) -> None:
    kube.add("n1")
    kube.add("n2")

    ours, theirs = tainter(kube), tainter(kube, "staging")
    await ours.remove(removal("n1"))
    await theirs.remove(removal("n2"))
    assert list(await ours.marked()) == ["n1"]
    assert list(await theirs.marked()) == ["n2"]
    assert (await ours.restore("n2")).done is Done.LEFT
    assert (await theirs.remove(removal("n1"))).done is Done.LEFT


def test_node_is_found_by_any_of_its_names(kube: Cluster) -> None:
    kube.add("ip-10-0-0-7.ec2.internal")

    async def play() -> None:
        made = tainter(kube)
        wanted = removal("i-0abc", aliases=("trn-7", "ip-10-0-0-7.ec2.internal"))
        assert (await made.remove(wanted)).done is Done.OUT
        # Another process knows the names from the node itself.
        again = tainter(kube)
        assert list(await again.marked()) == ["i-0abc"]
        assert (await again.restore("i-0abc")).done is Done.BACK

    asyncio.run(play())
    assert kube.taints("ip-10-0-0-7.ec2.internal") == []


def test_node_that_the_cluster_does_not_have_is_left(kube: Cluster) -> None:
    outcome = asyncio.run(tainter(kube).remove(removal("gone")))
    assert outcome.done is Done.LEFT
    assert "the cluster has no node named gone" in outcome.note


def test_node_that_changes_meanwhile_is_read_anew(kube: Cluster) -> None:
    kube.add("n1")
    kube.races = 2
    assert asyncio.run(tainter(kube).remove(removal())).done is Done.OUT
    assert kube.taints("n1") == [OURS]


def test_node_that_never_stops_changing_is_an_error_and_nothing_is_written(kube: Cluster) -> None:
    kube.add("n1")
    kube.races = 99
    with pytest.raises(ActuatorError, match="changed 4 times"):
        asyncio.run(tainter(kube).remove(removal()))
    assert kube.taints("n1") == []


@pytest.mark.parametrize("right", ["get on nodes", "patch on nodes"])
def test_missing_right_is_one_line_that_names_it(kube: Cluster, right: str) -> None:
    kube.add("n1")
    kube.rights.discard(right)
    with pytest.raises(ActuatorError, match=f"right to {right}") as caught:
        asyncio.run(tainter(kube).remove(removal()))
    assert "\n" not in str(caught.value)


def test_busy_server_says_when_to_come_again(kube: Cluster) -> None:
    kube.add("n1")
    kube.said = [(429, {"Retry-After": "3"}, b"")]
    with pytest.raises(ActuatorError) as caught:
        asyncio.run(tainter(kube).remove(removal()))
    assert caught.value.retry_after_seconds == 3.0


def test_many_marked_nodes_come_in_pages(kube: Cluster) -> None:
    for index in range(120):
        kube.add(f"n{index}", **{KEY: "healthd"})
    assert len(asyncio.run(tainter(kube).marked())) == 120
    assert len(kube.calls) == 3


@given(
    st.dictionaries(
        st.sampled_from(["metadata", "spec", "status"]),
        st.recursive(
            st.none() | st.booleans() | st.text(max_size=3) | st.integers(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["labels", "taints", "key", "resourceVersion", KEY]), inner, max_size=3
                )
            ),
            max_leaves=6,
        ),
    )
)
def test_node_of_any_shape_is_tainted_or_an_error_never_a_crash(shape: dict[str, Any]) -> None:
    class Server:
        async def get(self, *_: object, **__: object) -> dict[str, Any]:
            return shape

        async def patch(self, *_: object, **__: object) -> dict[str, Any]:
            return shape

    made = KubernetesActuator(Server(), key=KEY, owner="healthd")  # type: ignore[arg-type]
    with contextlib.suppress(ActuatorError):
        assert asyncio.run(made.remove(removal())).done in (Done.OUT, Done.LEFT)


def test_kubernetes_outside_of_a_pod_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="set api_server"):
        make_actuator(ActuatorSettings(kind="kubernetes"))


def test_key_without_a_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="taint_key"):
        KubernetesActuatorSettings(taint_key="no-domain")
