"""
One bad device of a node, where devices are given by DRA, on a real API server with the real scheduler.

The test publishes the devices, as a driver would, of a node that is an object without a machine: claims are allocated
by the scheduler, and no kubelet has to start the pods. The rights are those of the components.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from healthd.aggregator.drain.controller import make_drain_controller
from healthd.aggregator.drain.plan import Actuator, Done, Outcome, Removal, Why
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.drain.targets import make_actuator, with_devices
from healthd.cli.settings.tree import Settings
from healthd.clients.kubernetes import ApiServer
from healthd.core.config import load
from healthd.core.model import DeviceRecord
from healthd.integrations.dra.rules import DeviceTaintRules
from healthd.integrations.dra.settings import Effect
from tests.aggregator.engine_kit import running
from tests.aggregator.rules_engine_kit import kept, measured, slow_results
from tests.aggregator.world import World, good_results, neuron
from tests.deploy.manifests import KUBERNETES
from tests.kubernetes.cluster import missing
from tests.kubernetes.kit import KEY, PLACE, Cluster, account, started, until

pytestmark = pytest.mark.kubernetes

NAMESPACE, NODE, DRIVER = "tests-devices", "tests-devices-1", "gpu.nvidia.com"
COUNT = 3


def rights() -> list[dict[str, Any]]:
    files = [KUBERNETES / "components" / name / "rbac.yaml" for name in ("actuator", "device-taints")]
    return [rule for file in files for one in yaml.safe_load_all(file.read_text()) for rule in one.get("rules", ())]


@contextmanager
def machine(cluster: Cluster, folder: Path) -> Iterator[ApiServer]:
    """A cluster with `node`, as an account with the rights of the components; at the end nothing of it is left."""
    with account(cluster, folder, NAMESPACE, rights()) as server:
        try:
            node(cluster)
            cluster.apply(
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "DeviceClass",
                    "metadata": {"name": NAMESPACE},
                    "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
                }
            )
            yield server
        finally:
            cluster.kubectl("delete", "resourceslice,deviceclass", NAMESPACE, "--ignore-not-found")
            cluster.kubectl("delete", "node", NODE, "--ignore-not-found")


@pytest.fixture(scope="module", name="newest")
def _newest(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if "v1" not in versions(cluster, "devicetaintrules"):
        pytest.skip("the cluster serves no DeviceTaintRule of v1: Kubernetes 1.37 or newer")
    with machine(cluster, tmp_path_factory.mktemp("account")) as made:
        yield made


@pytest.fixture
def server(cluster: Cluster, newest: ApiServer) -> Iterator[ApiServer]:
    """A server whose one node publishes devices and has no taint of ours, no rule and no claim."""
    yield newest
    clear(cluster)


@pytest.fixture
def alpha(tmp_path: Path) -> Iterator[tuple[Cluster, ApiServer]]:
    """The oldest control plane with the rules that it has, which are off there by default."""
    if reason := missing(nodes=0, oldest=True):
        pytest.skip(reason)
    turned_on = ("--gate=DRADeviceTaints", "--api=resource.k8s.io/v1alpha3")
    folder = PLACE / f"healthd-kubernetes-alpha-{os.getpid()}"
    with (
        started(folder, "--nodes=0", "--oldest", *turned_on) as made,
        machine(made, tmp_path) as server,
    ):
        yield made, server
        clear(made)


def clear(cluster: Cluster) -> None:
    cluster.kubectl("delete", "devicetaintrules", "-l", KEY)
    cluster.kubectl("delete", "pods", "-n", NAMESPACE, "--all", "--force", "--grace-period=0")
    cluster.kubectl("delete", "resourceclaims", "-n", NAMESPACE, "--all")
    cluster.kubectl("delete", "node", NODE)
    node(cluster)


def node(cluster: Cluster) -> None:
    """A node without a machine, whose devices a driver publishes."""
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    status = {"allocatable": {"cpu": "64", "memory": "1Ti", "pods": "110"}}
    cluster.kubectl("patch", "node", NODE, "--subresource=status", "-p", json.dumps({"status": status}))
    cluster.apply(slice_of([{} for _ in range(COUNT)]))


def versions(cluster: Cluster, resource: str) -> list[str]:
    """In which versions the server has a resource of resource.k8s.io."""
    group = json.loads(cluster.kubectl("get", "--raw", "/apis/resource.k8s.io"))
    served = [one["version"] for one in group["versions"]]
    lists = {one: json.loads(cluster.kubectl("get", "--raw", f"/apis/resource.k8s.io/{one}")) for one in served}
    return [one for one, listed in lists.items() if any(kind["name"] == resource for kind in listed["resources"])]


def slice_of(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """As NVIDIA's driver publishes GPUs; `devices` says what is special about each."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": NAMESPACE},
        "spec": {
            "driver": DRIVER,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": f"gpu-{number}",
                    "attributes": {
                        "uuid": {"string": f"GPU-{number}"},
                        "resource.kubernetes.io/pciBusID": {"string": bdf(number)},
                    },
                    **special,
                }
                for number, special in enumerate(devices)
            ],
        },
    }


def bdf(number: int) -> str:
    return f"0000:{number + 0x10:02x}:00.0"


def record(number: int) -> DeviceRecord:
    return DeviceRecord(
        target=f"cuda:{number}",
        kind="NVIDIA H100",
        serial=f"GPU-{number}",
        cores=None,
        memory_bytes=None,
        bdf=bdf(number),
    )


def removal(*devices: DeviceRecord, whole: bool = False) -> Removal:
    return Removal(
        node="fleet-1",
        aliases=(NODE,),
        instance_id=None,
        why=Why.QUARANTINE,
        reason="rule:hard: EccErrors on cuda:0",
        by_person=False,
        injected=False,
        allocated=False,
        since=0.0,
        devices=devices,
        whole=whole or not devices,
    )


def acting(server: ApiServer, effect: str = "NoSchedule") -> ActuatorSettings:
    """As an operator sets it."""
    words = {"API_SERVER": server.url, "SERVICE_ACCOUNT": str(server.service_account), "DEVICE_TAINTS": effect}
    environ = {f"HEALTHD_ACTUATOR_KUBERNETES_{name}": word for name, word in words.items()}
    environ |= {"HEALTHD_ACTUATOR_KIND": "kubernetes", "HEALTHD_ACTUATOR_MODE": "act"}
    return load(Settings, file=None, environ=environ, arguments={}, sections=("aggregator",)).actuator


def nodes_of(server: ApiServer, effect: str = "NoSchedule") -> Actuator:
    made = make_actuator(acting(server, effect))
    assert made is not None
    return made


def actuator(server: ApiServer, effect: Effect = "NoSchedule") -> Actuator:
    return with_devices(nodes_of(server, effect))


def remove(server: ApiServer, wanted: Removal, effect: Effect = "NoSchedule") -> Outcome:
    return asyncio.run(actuator(server, effect).remove(wanted))


def rules(cluster: Cluster) -> list[tuple[str, str]]:
    """Device and effect of each rule, of all owners."""
    specs = [one["spec"] for one in cluster.items("devicetaintrules")]
    return sorted((one["deviceSelector"]["device"], one["taint"]["effect"]) for one in specs)


def tainted(cluster: Cluster) -> bool:
    return any(one["key"] == KEY for one in cluster.get("node", NODE)["spec"].get("taints", ()))


def claim(cluster: Cluster, name: str) -> None:
    """A pod that wants one device; it tolerates that nobody speaks for the node."""
    silent = [f"node.kubernetes.io/{one}" for one in ("not-ready", "unreachable")]
    cluster.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"devices": {"requests": [{"name": "one", "exactly": {"deviceClassName": NAMESPACE, "count": 1}}]}},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "tolerations": [{"key": key, "operator": "Exists"} for key in silent],
                "resourceClaims": [{"name": "device", "resourceClaimName": name}],
                "containers": [{"name": "job", "image": "job", "resources": {"claims": [{"name": "device"}]}}],
            },
        },
    )


def given(cluster: Cluster, name: str) -> str:
    """The device that the scheduler gave a claim, or that it has none to give; empty while it has said nothing."""
    allocation = cluster.get("resourceclaim", name, "-n", NAMESPACE).get("status", {}).get("allocation")
    if allocation:
        return str(allocation["devices"]["results"][0]["device"])
    conditions = cluster.get("pod", name, "-n", NAMESPACE)["status"].get("conditions", ())
    return next((one["reason"] for one in conditions if one.get("reason") == "Unschedulable"), "")


def gives(cluster: Cluster, *names: str) -> set[str]:
    for name in names:
        claim(cluster, name)
    return {until(f"the scheduler's word on {name}", lambda name=name: given(cluster, name)) for name in names}  # type: ignore[misc]


def test_claims_get_the_other_devices_and_the_node_is_not_tainted(cluster: Cluster, server: ApiServer) -> None:
    outcome = remove(server, removal(record(0)))
    assert outcome.done is Done.OUT
    assert f"gpu-0 of {DRIVER} in pool {NODE}" in outcome.note
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule")], False)
    (rule,) = cluster.items("devicetaintrules", "-l", f"{KEY}=healthd")
    assert rule["spec"]["deviceSelector"] == {"driver": DRIVER, "pool": NODE, "device": "gpu-0"}
    assert gives(cluster, "a", "b") == {"gpu-1", "gpu-2"}
    assert gives(cluster, "c") == {"Unschedulable"}
    # Another process of the aggregator knows what is ours, and the pod gets the device that is well again.
    again = actuator(server)
    assert list(asyncio.run(again.marked())) == ["fleet-1"]
    assert asyncio.run(again.restore("fleet-1")).done is Done.BACK
    assert rules(cluster) == []
    until("the device is given", lambda: given(cluster, "c") == "gpu-0")


def test_effect_none_keeps_no_claim_from_the_device_and_the_node_is_tainted(
    cluster: Cluster, server: ApiServer
) -> None:
    outcome = remove(server, removal(record(0)), "None")
    assert outcome.done is Done.OUT
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "None")], True)
    cluster.kubectl("taint", "node", NODE, f"{KEY}-")
    assert gives(cluster, "a", "b", "c") == {"gpu-0", "gpu-1", "gpu-2"}
    # The setting is changed: the same rule has the other effect, and the node has no taint any more.
    remove(server, removal(record(0)))
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule")], False)


def test_while_a_gate_speaks_of_the_node_both_are_out(cluster: Cluster, server: ApiServer) -> None:
    hand = actuator(server)
    asyncio.run(hand.remove(removal(record(0))))
    asyncio.run(hand.remove(removal(record(0), whole=True)))
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule")], True)
    asyncio.run(hand.remove(removal(record(0), record(1))))
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule"), ("gpu-1", "NoSchedule")], False)
    asyncio.run(hand.remove(removal()))
    assert (rules(cluster), tainted(cluster)) == ([], True)
    assert asyncio.run(hand.restore("fleet-1")).done is Done.BACK
    assert (rules(cluster), tainted(cluster)) == ([], False)


def test_device_that_its_driver_taints_gets_no_rule(cluster: Cluster, server: ApiServer) -> None:
    by_driver = {"taints": [{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]}
    remove(server, removal(record(0)))
    cluster.apply(slice_of([by_driver, {}, {}]))
    outcome = remove(server, removal(record(0)))
    assert outcome.done is Done.LEFT, "what keeps it out is not ours"
    assert (rules(cluster), tainted(cluster)) == ([], False)
    assert gives(cluster, "a", "b") == {"gpu-1", "gpu-2"}


def test_device_that_cannot_be_told_has_its_node_tainted(cluster: Cluster, server: ApiServer) -> None:
    outcome = remove(server, removal(record(7)))
    assert "no DRA driver publishes cuda:7" in outcome.note
    assert (rules(cluster), tainted(cluster)) == ([], True)


def test_node_that_has_not_reported_yet_keeps_its_rule(cluster: Cluster, server: ApiServer) -> None:
    """The aggregator was started anew: of the device it knows no more than the name."""
    remove(server, removal(record(0)))
    unknown = DeviceRecord(target="cuda:0", kind="", serial=None, cores=None, memory_bytes=None)
    assert remove(server, removal(unknown)).done is Done.OUT
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule")], False)


@pytest.mark.nightly
def test_rule_of_another_owner_stays_and_an_uninstallation_leaves_none_of_ours(
    cluster: Cluster, server: ApiServer
) -> None:
    theirs = DeviceTaintRules(server, key=KEY, owner="other", effect="NoSchedule")
    asyncio.run(theirs.apply("fleet-1", NODE, [record(0)], "bad"))
    remove(server, removal(record(0)))
    assert len(rules(cluster)) == 2

    async def undo() -> list[str]:
        made = with_devices(nodes_of(server, "off"), undo=True)
        return [(await made.restore(name)).note for name in await made.marked()]

    assert asyncio.run(undo()) == ["the DeviceTaintRule of device gpu-0 is removed"]
    (left,) = cluster.items("devicetaintrules")
    assert left["metadata"]["labels"] == {KEY: "other"}


async def test_from_results_that_fail_on_one_device_to_its_rule_and_back(cluster: Cluster, server: ApiServer) -> None:
    devices = tuple(dataclasses.replace(record(number), target=f"cpu:{number}") for number in range(COUNT))
    inventory = dataclasses.replace(neuron(), devices=devices, workers=())
    world = World(NODE)
    async with running(world) as run:
        hand = make_drain_controller(acting(server), run.engine, world)
        assert hand is not None
        for results in (slow_results(), slow_results(), slow_results()):  # on cpu:0
            measured(run, NODE, results, inventory=inventory)
            await run.engine.run_once()
        await hand.turn()
        assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule")], False)
        # It passes again, and the least time of its quarantine is over.
        for _ in range(2):
            measured(run, NODE, good_results(1.0), inventory=inventory)
            await run.engine.run_once()
        measured(run, NODE, good_results(1.0), after=3600.0, inventory=inventory)
        await run.engine.run_once()
        assert kept(run, NODE) is None
        await hand.turn()
        assert (rules(cluster), tainted(cluster)) == ([], False)


@pytest.mark.nightly
def test_oldest_kubernetes_without_rules_has_its_nodes_tainted(oldest: Cluster, tmp_path: Path) -> None:
    if versions(oldest, "devicetaintrules"):
        pytest.skip("this control plane serves DeviceTaintRule")
    with machine(oldest, tmp_path) as server:
        hand = actuator(server)
        assert "serves no DeviceTaintRule" in asyncio.run(hand.remove(removal(record(0)))).note
        assert tainted(oldest)
        assert asyncio.run(hand.restore("fleet-1")).done is Done.BACK
        assert not tainted(oldest)


@pytest.mark.nightly
def test_oldest_kubernetes_with_rules_has_them_in_its_version_and_none_while_it_observes(
    alpha: tuple[Cluster, ApiServer],
) -> None:
    """It knows no effect None, and would take a rule with it for one that keeps jobs away."""
    cluster, server = alpha
    assert versions(cluster, "devicetaintrules") == ["v1alpha3"]
    outcome = remove(server, removal(record(0)), "None")
    assert "Kubernetes 1.34 does not support the effect None" in outcome.note
    assert (rules(cluster), tainted(cluster)) == ([], True)
    remove(server, removal(record(0)))
    assert (rules(cluster), tainted(cluster)) == ([("gpu-0", "NoSchedule")], False)
    assert gives(cluster, "a", "b") == {"gpu-1", "gpu-2"}
