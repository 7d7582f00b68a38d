"""
A taint on one device, where devices are given by dynamic resource allocation (DRA): a DeviceTaintRule of ours for it.

The first half is pure: what drivers publish in ResourceSlices, and which of it is the device that is at fault. The
second makes the rules so. A rule selects by driver, pool and device alone, its name is derived from these, and it bears
the same label and owner as the taint on a node. A ResourceSlice is never written.

Sources: kubernetes/kubernetes `staging/src/k8s.io/api/resource/v1/types.go` (1.37) and `v1alpha3` (1.34); names and
attributes of devices: kubernetes-sigs/dra-driver-nvidia-gpu `cmd/gpu-kubelet-plugin/deviceinfo.go`, and the Neuron DRA
driver as seen on EKS, which names its devices `neuron-device-N`.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import urllib.parse
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from checks.accelerators import descriptors
from healthd.aggregator.drain.plan import ActuatorError
from healthd.core.model import DeviceRecord
from healthd.core.platforms.kubernetes import MERGE, ApiServer, KubernetesError, members, records

Effect = Literal["None", "NoSchedule"]

# How much an effect keeps away; one that is not known counts as None, as Kubernetes says.
_STRENGTH = {"None": 0, "NoSchedule": 1, "NoExecute": 2}

# --- which published device is the one at fault: pure ---------------------------------------------------------------

PCI_ADDRESS = "resource.kubernetes.io/pciBusID"
_NEURON_DRIVER, _NEURON_DEVICE = "neuron.aws.com", re.compile(r"neuron-device-(\d{1,4})")


@dataclass(frozen=True, kw_only=True)
class PublishedDevice:
    """A device as its driver publishes it. `attributes` are texts alone; `taints` are the effects of the driver's."""

    driver: str
    pool: str
    name: str
    attributes: Mapping[str, str]
    taints: tuple[str, ...] = ()

    def attribute(self, name: str) -> str | None:
        """By its name; one without a domain is in that of the driver."""
        return self.attributes.get(name) or self.attributes.get(f"{self.driver}/{name}")

    def __str__(self) -> str:
        return f"{self.name} of {self.driver} in pool {self.pool}"


@dataclass(frozen=True, kw_only=True)
class Match:
    """The published device, or why there is none that can be meant alone."""

    device: PublishedDevice | None = None
    why: str = ""


def parse_slices(slices: Iterable[object]) -> tuple[PublishedDevice, ...]:
    """
    The devices of these ResourceSlices (of v1 or v1beta2). A pool counts by its newest generation, and only when all
    slices of that are there.
    """
    pools: dict[tuple[str, str], list[object]] = defaultdict(list)
    for one in slices:
        driver, pool = members(one, "spec", "driver"), members(one, "spec", "pool", "name")
        if isinstance(driver, str) and isinstance(pool, str):
            pools[driver, pool].append(members(one, "spec"))
    found = []
    for (driver, pool), specs in pools.items():
        newest = max(_whole(members(spec, "pool", "generation")) for spec in specs)
        specs = [spec for spec in specs if _whole(members(spec, "pool", "generation")) == newest]
        if len(specs) != _whole(members(specs[0], "pool", "resourceSliceCount")):
            continue
        for device in (device for spec in specs for device in records(spec, "devices")):
            if isinstance(name := device.get("name"), str):
                attributes = _texts(device.get("attributes"))
                effects = tuple(str(taint.get("effect")) for taint in records(device, "taints"))
                found.append(
                    PublishedDevice(driver=driver, pool=pool, name=name, attributes=attributes, taints=effects)
                )
    return tuple(found)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _texts(attributes: object) -> dict[str, str]:
    if not isinstance(attributes, dict):
        return {}
    texts = {str(name): members(value, "string") for name, value in attributes.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def find_device(wanted: DeviceRecord, published: Sequence[PublishedDevice]) -> Match:
    """
    The published device that is `wanted`: by UUID, PCI address, and for Neuron by number.

    All that both sides tell must agree. One that agrees in a part, such as a partition of the same GPU, speaks against
    the match: a taint on the whole does not keep a job off it.
    """
    signs = [(device, _signs(wanted, device)) for device in published]
    touched = [(device, agree) for device, agree in signs if any(agree)]
    if not touched:
        return Match(why=f"no DRA driver publishes {wanted.target} of this node by its UUID, PCI address or number")
    if len(touched) > 1:
        return Match(why=f"{wanted.target} may be {touched[0][0]} or {touched[1][0]}")
    device, agree = touched[0]
    return Match(device=device) if all(agree) else Match(why=f"{wanted.target} matches {device} only in part")


def _signs(wanted: DeviceRecord, device: PublishedDevice) -> tuple[bool, ...]:
    """For each that both sides tell, whether it is the same."""
    found = []
    if wanted.serial and (uuid := device.attribute("uuid")):
        found.append(uuid.casefold() == wanted.serial.casefold())
    if wanted.bdf and (address := device.attributes.get(PCI_ADDRESS)):
        found.append(address.casefold() == wanted.bdf.casefold())
    number = wanted.target.removeprefix("neuron:")
    named = _NEURON_DEVICE.fullmatch(device.name) if device.driver == _NEURON_DRIVER else None
    if named is not None and number != wanted.target:
        found.append(named[1] == number)
    return tuple(found)


def plugin_resource(node: object) -> str | None:
    """A resource of a device plugin by which the node gives accelerators away; rules have no effect on it."""
    ours = tuple(name for one in descriptors() for name in one.kubernetes_resources)
    amounts = members(node, "status", "allocatable")
    if not isinstance(amounts, dict):
        return None
    return next((str(name) for name, amount in amounts.items() if str(name).startswith(ours) and amount != "0"), None)


# --- the rules ------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

GROUP = "/apis/resource.k8s.io"
VERSIONS_OF_RULES = ("v1", "v1beta2", "v1alpha3")
VERSIONS_OF_SLICES = ("v1", "v1beta2")
NONE_SINCE = (1, 35)
"""The first Kubernetes whose rules may have the effect None."""
READ_SLICES, LIST_RULES, CREATE_RULES = (
    "list on resourceslices.resource.k8s.io",
    "list on devicetaintrules.resource.k8s.io",
    "create on devicetaintrules.resource.k8s.io",
)
PATCH_RULES, DELETE_RULES = "patch on devicetaintrules.resource.k8s.io", "delete on devicetaintrules.resource.k8s.io"
DISCOVERY = "get on the API group resource.k8s.io, which every account has"
PAGE = 100
MOST_PAGES = 100
# As long is believed which versions the server has: it may be upgraded.
VERSIONS_SECONDS = 600.0
REFUSED = (403, 404, 422)
"""The rules are not to be had: a right, the API or a field is missing. Anything else may be over soon."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What the server has. None: not at all."""

    rules: str | None
    slices: str | None
    kubernetes: tuple[int, int]

    def unfit(self, effect: Effect) -> str | None:
        """Why no rule of this effect can be made; None where it can."""
        if self.rules is None or self.slices is None:
            return "this Kubernetes serves no DeviceTaintRule"
        if effect == "None" and self.kubernetes < NONE_SINCE:
            major, minor = self.kubernetes
            return f"Kubernetes {major}.{minor} does not support the effect None"
        return None


@dataclass(frozen=True, kw_only=True)
class Applied:
    """
    `out`: nothing new gets these devices, by our rules (`ours`) or by their driver alone. `note` says what was done, or
    why the node has to be out instead.
    """

    out: bool
    note: str
    ours: bool = False


class DeviceTaintRules:
    """The rules of one owner. ActuatorError is for what may be over soon; all else is a note, and the node is out."""

    def __init__(
        self,
        server: ApiServer,
        *,
        key: str,
        owner: str,
        effect: Effect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._key = key
        self._owner = owner
        self._effect = effect
        self._clock = clock
        self._versions: Versions | None = None
        self._versions_at = 0.0
        self._with_rules: set[str] = set()  # nodes of the fleet
        self._told = ""

    async def marked(self) -> Mapping[str, tuple[str, str]]:
        """By node of the fleet: the node of the cluster and the reason that its rules note."""
        if (await self._served()).rules is None:
            return {}
        found: dict[str, tuple[str, str]] = {}
        try:
            async for rule in self._rules():
                if node := self._note(rule, "node"):
                    found[node] = (self._note(rule, "kubernetes-node") or node, self._note(rule, "reason"))
        except KubernetesError as error:
            self._refused_or_away(error)
        self._with_rules = set(found)
        return found

    async def apply(self, node: str, name: str, devices: Sequence[DeviceRecord], reason: str) -> Applied:
        """The rules of a node of the fleet, called `name` in the cluster, are to be about these devices alone."""
        try:
            return await self._apply(node, name, devices, reason)
        except KubernetesError as error:
            return Applied(out=False, note=self._refused_or_away(error))

    async def remove(self, node: str) -> tuple[str, ...]:
        """The rules of a node of the fleet go, as far as `marked` or `apply` have met any; a line for each."""
        if node not in self._with_rules or (await self._served()).rules is None:
            return ()
        try:
            gone = [rule async for rule in self._rules() if self._note(rule, "node") == node]
            done = tuple([await self._delete(rule) for rule in gone])
        except KubernetesError as error:
            self._refused_or_away(error)
            return ()
        self._with_rules.discard(node)
        return done

    async def _apply(self, node: str, name: str, devices: Sequence[DeviceRecord], reason: str) -> Applied:
        versions = await self._served()
        if why := versions.unfit(self._effect):
            return Applied(out=False, note=why)
        published = parse_slices([one async for one in self._slices(name)])
        ours = {rule_name: rule async for rule in self._rules() if (rule_name := _name(rule))}
        before = {rule_name: rule for rule_name, rule in ours.items() if self._note(rule, "node") == node}
        wanted: dict[str, tuple[PublishedDevice, str]] = {}
        notes, out, why = [], True, ""
        for device in devices:
            match = self._find(device, published, before.values())
            if match.device is None:
                why = why or match.why
                continue
            by_driver = _strongest(match.device.taints)
            out = out and max(by_driver, _STRENGTH[self._effect]) >= _STRENGTH["NoSchedule"]
            if by_driver >= _STRENGTH[self._effect]:
                notes.append(f"{match.device} is tainted by its driver")
                continue
            wanted[self._name_of(match.device)] = (match.device, device.target)
            notes.append(f"{match.device} has a DeviceTaintRule, {self._key}={self._owner}:{self._effect}")
        for rule_name, rule in before.items():
            if rule_name not in wanted:
                await self._delete(rule)
        for rule_name, (published_device, target) in wanted.items():
            await self._put(rule_name, published_device, ours.get(rule_name), node, name, target, reason)
        if wanted:
            self._with_rules.add(node)
        return Applied(out=out and not why, note="; ".join([*notes, why] if why else notes), ours=bool(wanted))

    def _find(
        self, device: DeviceRecord, published: Sequence[PublishedDevice], before: Iterable[Mapping[str, object]]
    ) -> Match:
        """By what is known of the device; of one whose node has not reported yet, by the rule that it has already."""
        if device.serial or device.bdf or device.kind:
            return find_device(device, published)
        for rule in before:
            selector = members(rule, "spec", "deviceSelector")
            for one in published:
                same = (members(selector, "driver"), members(selector, "pool"), members(selector, "device"))
                if self._note(rule, "device") == device.target and same == (one.driver, one.pool, one.name):
                    return Match(device=one)
        return Match(why=f"the node does not report {device.target} at present")

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _put(
        self,
        rule_name: str,
        device: PublishedDevice,
        known: Mapping[str, object] | None,
        node: str,
        name: str,
        target: str,
        reason: str,
    ) -> None:
        """The rule is there, with our effect."""
        notes = {"node": node, "kubernetes-node": name, "device": target, "reason": reason}
        annotations = {f"{self._key}-{what}": text for what, text in notes.items()}
        taint = {"key": self._key, "value": self._owner, "effect": self._effect}
        if known is None:
            body = {
                "apiVersion": f"resource.k8s.io/{(await self._served()).rules}",
                "kind": "DeviceTaintRule",
                "metadata": {"name": rule_name, "labels": {self._key: self._owner}, "annotations": annotations},
                "spec": {
                    "deviceSelector": {"driver": device.driver, "pool": device.pool, "device": device.name},
                    "taint": taint,
                },
            }
            await self._server.create(self._path(), body, needs=CREATE_RULES)
        elif members(known, "spec", "taint", "effect") != self._effect or self._note(known, "node") != node:
            change = {"metadata": {"annotations": annotations}, "spec": {"taint": taint}}
            await self._server.patch(self._path(rule_name), change, kind=MERGE, needs=PATCH_RULES)

    async def _delete(self, rule: Mapping[str, object]) -> str:
        name, device = _name(rule), members(rule, "spec", "deviceSelector", "device")
        try:
            await self._server.delete(self._path(name), needs=DELETE_RULES)
        except KubernetesError as error:
            if error.status != 404:
                raise
        return f"the DeviceTaintRule of device {device} is removed"

    async def _rules(self) -> AsyncIterator[dict[str, object]]:
        async for rule in self._listed(self._path(), {"labelSelector": f"{self._key}={self._owner}"}, LIST_RULES):
            yield rule

    async def _slices(self, name: str) -> AsyncIterator[dict[str, object]]:
        path = f"{GROUP}/{(await self._served()).slices}/resourceslices"
        async for one in self._listed(path, {"fieldSelector": f"spec.nodeName={name}"}, READ_SLICES):
            yield one

    async def _listed(self, path: str, query: Mapping[str, str], needs: str) -> AsyncIterator[dict[str, object]]:
        asked = {**query, "limit": str(PAGE)}
        for _ in range(MOST_PAGES):
            page = await self._server.get(path, asked, needs=needs)
            for item in records(page, "items"):
                yield item
            more = members(page, "metadata", "continue")
            if not isinstance(more, str) or not more:
                return
            asked = {**asked, "continue": more}
        raise ActuatorError(f"kubernetes: {path} has more than {PAGE * MOST_PAGES} objects")

    async def _served(self) -> Versions:
        """What the server has, asked anew now and then. ActuatorError."""
        if self._versions is None or self._clock() - self._versions_at >= VERSIONS_SECONDS:
            try:
                self._versions = await _discover(self._server)
            except KubernetesError as error:
                raise ActuatorError(f"kubernetes: {error}", retry_after_seconds=error.retry_after_seconds) from None
            self._versions_at = self._clock()
            if why := self._versions.unfit(self._effect):
                self._say(why)
        return self._versions

    def _refused_or_away(self, error: KubernetesError) -> str:
        """Why the rules are not to be had; raises ActuatorError where it may be over soon."""
        if error.status not in REFUSED:
            raise ActuatorError(f"kubernetes: {error}", retry_after_seconds=error.retry_after_seconds) from None
        self._versions = None  # the server may be another one now
        self._say(str(error))
        return str(error)

    def _say(self, text: str) -> None:
        """Once for each new sentence."""
        if text != self._told:
            log.warning("kubernetes: no rules for single devices: %s", text)
        self._told = text

    # --- what is ours -------------------------------------------------------------------------------------------------

    def _path(self, name: str = "") -> str:
        version = self._versions.rules if self._versions is not None else VERSIONS_OF_RULES[0]
        return f"{GROUP}/{version}/devicetaintrules" + (f"/{urllib.parse.quote(name, safe='')}" if name else "")

    def _name_of(self, device: PublishedDevice) -> str:
        """The same for the same device, so that two that make it at once make one."""
        parts = (self._key, self._owner, device.driver, device.pool, device.name)
        return f"healthd-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:24]}"

    def _note(self, rule: object, what: str) -> str:
        text = members(members(rule, "metadata", "annotations"), f"{self._key}-{what}")
        return text if isinstance(text, str) else ""


async def _discover(server: ApiServer) -> Versions:
    """Which versions of what we need the server has, the newest first."""
    try:
        group = await server.get(GROUP, needs=DISCOVERY)
    except KubernetesError as error:
        if error.status != 404:
            raise
        return Versions(rules=None, slices=None, kubernetes=(0, 0))
    served = {str(one.get("version")) for one in records(group, "versions")}
    kinds: dict[str, set[str]] = {}
    for version in (one for one in VERSIONS_OF_RULES if one in served):
        found = await server.get(f"{GROUP}/{version}", needs=DISCOVERY)
        kinds[version] = {str(one.get("name")) for one in records(found, "resources")}
    told = await server.get("/version", needs="get on /version, which every account has")
    numbers = [re.match(r"\d{1,4}", str(told.get(part))) for part in ("major", "minor")]
    major, minor = (int(number[0]) if number else 0 for number in numbers)
    return Versions(
        rules=next((one for one in VERSIONS_OF_RULES if "devicetaintrules" in kinds.get(one, ())), None),
        slices=next((one for one in VERSIONS_OF_SLICES if "resourceslices" in kinds.get(one, ())), None),
        kubernetes=(major, minor),
    )


def _strongest(effects: Iterable[str]) -> int:
    return max((_STRENGTH.get(effect, 0) for effect in effects), default=-1)


def _name(rule: object) -> str:
    name = members(rule, "metadata", "name")
    return name if isinstance(name, str) else ""
