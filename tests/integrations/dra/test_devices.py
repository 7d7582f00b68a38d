"""Which published device is the one at fault; pure. What Kubernetes makes of rules: `test_device_taints.py`."""

from __future__ import annotations

from typing import Any

from healthd.core.model import DeviceRecord
from healthd.integrations.dra.devices import PublishedDevice, find_device, parse_slices, plugin_resource
from healthd.integrations.dra.rules import Versions
from tests.every import every

GPU, PCI = "GPU-5d0ea2a4", "0000:53:00.0"


def record(target: str = "cuda:0", serial: str | None = GPU, bdf: str | None = PCI) -> DeviceRecord:
    return DeviceRecord(target=target, kind="GPU", serial=serial, cores=None, memory_bytes=None, bdf=bdf)


def published(name: str = "gpu-0", driver: str = "gpu.nvidia.com", **attributes: str) -> PublishedDevice:
    named = {{"uuid": "uuid", "pci": "resource.kubernetes.io/pciBusID"}.get(k, k): v for k, v in attributes.items()}
    return PublishedDevice(driver=driver, pool="n1", name=name, attributes=named)


def test_device_is_known_by_its_uuid_or_by_its_pci_address() -> None:
    one, other = published(uuid=GPU, pci=PCI), published("gpu-1", uuid="GPU-1", pci="0000:63:00.0")
    assert find_device(record(), (other, one)).device is one
    assert find_device(record(serial=None), (other, one)).device is one
    assert find_device(record(bdf=None), (other, one)).device is one
    full = PublishedDevice(driver="gpu.nvidia.com", pool="n1", name="g", attributes={"gpu.nvidia.com/uuid": GPU})
    assert find_device(record(), (other, full)).device is full


def test_neuron_device_is_known_by_its_number() -> None:
    devices = [published(f"neuron-device-{number}", "neuron.aws.com") for number in range(16)]
    neuron = record("neuron:3", "serial-of-it", None)
    assert find_device(neuron, devices).device is devices[3]
    assert find_device(record("neuron:16", None, None), devices).device is None
    assert find_device(record("cuda:3", None, None), devices).device is None
    others = [published(f"neuron-device-{number}", "neuron.example.com") for number in range(16)]
    assert find_device(neuron, others).device is None, "names of other drivers mean nothing"


@every(
    ("devices", "why"),
    [
        ((), "no DRA driver publishes cuda:0"),
        ((published("gpu-1", uuid="GPU-1"),), "no DRA driver publishes cuda:0"),
        ((published("a"),), "no DRA driver publishes cuda:0"),
        ((published("a", uuid=GPU), published("b", uuid=GPU)), "cuda:0 may be a of gpu.nvidia.com in pool n1 or b of"),
        # A partition of the GPU would be given to jobs though the GPU is tainted.
        ((published("gpu-0", uuid=GPU, pci=PCI), published("gpu-0-mig-1g", uuid="MIG-1", pci=PCI)), "may be gpu-0"),
        ((published("a", uuid="GPU-1", pci=PCI),), "matches a"),
    ],
)
def test_device_that_is_not_known_for_certain_is_none(devices: tuple[PublishedDevice, ...], why: str) -> None:
    match = find_device(record(), devices)
    assert match.device is None
    assert why in match.why


def slice_of(*names: str, generation: int = 1, count: int = 1, pool: str = "n1") -> dict[str, Any]:
    devices = [{"name": name, "attributes": {"uuid": {"string": name}, "minor": {"int": 3}}} for name in names]
    pools = {"name": pool, "generation": generation, "resourceSliceCount": count}
    return {"spec": {"driver": "gpu.nvidia.com", "pool": pools, "devices": devices}}


def test_pool_counts_by_its_newest_generation_and_only_whole() -> None:
    assert [one.name for one in parse_slices([slice_of("a", "b")])] == ["a", "b"]
    newer = [slice_of("a"), slice_of("b", generation=2, count=2), slice_of("c", generation=2, count=2)]
    assert [one.name for one in parse_slices(newer)] == ["b", "c"]
    assert parse_slices(newer[:2]) == (), "a slice of the newest generation is missing"
    assert parse_slices([None, {}, {"spec": {"driver": "d"}}, {"spec": {"driver": "d", "pool": {"name": "p"}}}]) == ()
    taints = {"taints": [{"key": "k", "effect": "NoExecute"}]}
    tainted = slice_of("a")
    tainted["spec"]["devices"][0].update(taints)
    assert parse_slices([tainted])[0].taints == ("NoExecute",)


def test_devices_of_a_device_plugin_are_seen_on_the_node() -> None:
    def of(**amounts: str) -> str | None:
        return plugin_resource({"status": {"allocatable": {"cpu": "4", **amounts}}})

    assert of() is None
    assert plugin_resource({}) is None
    assert of(**{"aws.amazon.com/neuron": "16"}) == "aws.amazon.com/neuron"
    assert of(**{"nvidia.com/gpu": "0"}) is None


def test_effect_none_needs_a_kubernetes_that_knows_it() -> None:
    def unfit(minor: int, rules: str | None = "v1alpha3") -> tuple[bool, bool]:
        found = Versions(rules=rules, slices="v1", kubernetes=(1, minor))
        return found.unfit("None") is not None, found.unfit("NoSchedule") is not None

    assert unfit(34) == (True, False)
    assert unfit(35) == (False, False)
    assert unfit(37, "v1") == (False, False)
    assert unfit(37, None) == (True, True)
