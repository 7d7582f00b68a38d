"""
A taint on one device: a DeviceTaintRule of ours for it.

A rule selects by driver, pool and device alone, its name is derived from these, and it bears the same label and owner
as the taint on a node. A ResourceSlice is never written.

Source: kubernetes/kubernetes `staging/src/k8s.io/api/resource/v1/types.go` (1.37) and `v1alpha3` (1.34).
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from healthd.aggregator.drain.plan import ActuatorError
from healthd.clients.kubernetes import MERGE, ApiServer, KubernetesError, members, records
from healthd.core.model import DeviceRecord
from healthd.integrations.dra.devices import Match, PublishedDevice, find_device, parse_slices
from healthd.integrations.dra.settings import Effect

log = logging.getLogger(__name__)

# How much an effect keeps away; one that is not known counts as None, as Kubernetes says.
_STRENGTH = {"None": 0, "NoSchedule": 1, "NoExecute": 2}

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

    async def marked(self) -> Mapping[str, str]:
        """The reason that its rules note, by node of the fleet."""
        if (await self._served()).rules is None:
            return {}
        found: dict[str, str] = {}
        try:
            async for rule in self._rules():
                if node := self._note(rule, "node"):
                    found[node] = self._note(rule, "reason") or "no reason is noted"
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

    def _rules(self) -> AsyncIterator[dict[str, object]]:
        query = {"labelSelector": f"{self._key}={self._owner}"}
        return self._server.items(self._path(), query, page=PAGE, needs=LIST_RULES)

    async def _slices(self, name: str) -> AsyncIterator[dict[str, object]]:
        path = f"{GROUP}/{(await self._served()).slices}/resourceslices"
        async for one in self._server.items(
            path, {"fieldSelector": f"spec.nodeName={name}"}, page=PAGE, needs=READ_SLICES
        ):
            yield one

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
