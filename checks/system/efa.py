"""
Elastic Fabric Adapters: as many as there should be, links up, no counter of errors rising.

Also here:

- what the readings of EFA interfaces mean: which accelerator uses which, how fast counters rise, what libfabric
  offers;
- how many EFA interfaces a node should have, and what fewer mean: a fault, or a node that was launched without;
- elastic Fabric Adapters: as many as there should be, links up, no counter of errors rising, libfabric content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from checks.accelerators import find_descriptor
from checks.catalog import InstanceType, find_type
from checks.contract import (
    NO_LIMIT,
    Context,
    Evidence,
    Finding,
    Limit,
    Measurement,
    Previous,
    Status,
    check,
    make_finding,
)
from checks.host.container import has_own_dev
from checks.host.efa import Adapter, Port, find_on_bus, name_at, read_adapters, without_file
from checks.host.identity import read_identity
from checks.host.machine import Host, HostError
from checks.limits import within
from checks.printable import some

# The most each counter may rise per second. Source: aws/eks-node-monitoring-agent 1.7.0, efa.go: for more it makes an
# event and marks no node.
RATE_LIMITS: Mapping[str, float] = {
    "rx_drops": 100.0,
    "rdma_write_wr_err": 100.0,
    "rdma_read_wr_err": 100.0,
    "unresponsive_remote_events": 100.0,
    "impaired_remote_conn_events": 100.0,
    "retrans_timeout_events": 100.0,
    "retrans_pkts": 1000.0,
    "retrans_bytes": 1e6,
}
MIN_ELAPSED_SECONDS = 1.0  # over less, one burst is taken for a rate

# The interface of each Trainium device, by the host's numbers. Two devices of trn1 share one. Source:
# aws-neuron/connected-device-maps-over-efa-for-neuron, lookup/neuron/*.json; which file is for which family says
# lookup/config/instance-family-mappings.json. For types that are not listed nothing is published.
_TRN1 = ("10:1a.0", "a0:1a.0", "20:19.0", "90:19.0", "20:1a.0", "90:1a.0", "10:19.0", "a0:19.0")
_TRN2 = (
    "c9:00.0", "b4:00.0", "b3:00.0", "ca:00.0", "6c:00.0", "57:00.0", "56:00.0", "6d:00.0",
    "98:00.0", "83:00.0", "82:00.0", "99:00.0", "f5:00.0", "e0:00.0", "df:00.0", "f6:00.0",
)  # fmt: skip
_TRN1N = (
    "10:17.0", "10:1a.0", "a0:17.0", "a0:1a.0", "20:19.0", "20:18.0", "90:19.0", "90:18.0",
    "20:17.0", "20:1a.0", "90:17.0", "90:1a.0", "10:19.0", "10:18.0", "a0:19.0", "a0:18.0",
)  # fmt: skip
_TRN3 = (
    "be:00.0", "a9:00.0", "a8:00.0", "bf:00.0", "61:00.0", "4c:00.0", "4b:00.0", "62:00.0",
    "8d:00.0", "78:00.0", "77:00.0", "8e:00.0", "ea:00.0", "d5:00.0", "d4:00.0", "eb:00.0",
)  # fmt: skip
MAPS: Mapping[str, tuple[str, ...]] = {
    "trn1.32xlarge": tuple(f"0000:{_TRN1[device // 2]}" for device in range(16)),
    "trn1n.32xlarge": tuple(f"0000:{address}" for address in _TRN1N),
    "trn2.48xlarge": tuple(f"0000:{address}" for address in _TRN2),
    "trn2u.48xlarge": tuple(f"0000:{address}" for address in _TRN2),
    "trn3.48xlarge": tuple(f"0000:{address}" for address in _TRN3),
    "trn3p.48xlarge": tuple(f"0000:{address}" for address in _TRN3),
}

_TEMPLATE = "add them in the launch template (network interfaces of type efa), or set expected for this check"

FI_INFO_TIMEOUT_SECONDS = 8.0  # it opens every interface: under 1 s where all is well
FI_INFO_EVERY_SECONDS = 600.0
_AWS_FI_INFO = "/opt/amazon/efa/bin/fi_info"  # not in the PATH of services; a distribution's own may know no efa
_UP = (("4: ACTIVE", "5: ACTIVE_DEFER"), ("5: LinkUp",))  # include/rdma/ib_verbs.h


@check(tier="passive", interval_seconds=60, timeout_seconds=15)
def efa(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The node has the expected EFA interfaces, they are up, and they neither retransmit nor lose data.

    Instance types with several Neuron devices are expected to have the maximum number of interfaces, because a job over
    several nodes needs them. If there are none at all, that is a warning for a single node, and a failure if a fleet or
    a gate over several nodes needs them (`required`). If only some are present, or some lack a driver, that is always a
    failure. For GPU types made for jobs over several nodes, fewer interfaces are a warning; for other types, none are
    needed. A missing interface, or one that is down, is reported with the devices that use it. In a container with its
    own /dev, libfabric must offer the interfaces whose files the container has.

    Reads:   /sys/class/infiniband (vendor, device, ports, hw_counters); with fewer than expected also /sys/bus/pci;
             the firmware tables for the type; `fi_info -p efa` where it is installed, at most once in ten minutes; in a
             container the names in /dev/infiniband and /sys/class/infiniband_verbs.
    Judges:  fail MissingDevice, LinkDown, NetworkUnusable (libfabric offers none, or not all) | warn LinkErrors (a
             counter rises faster than its limit), MissingDevice (GPUs; none at all on a node by itself) | unknown
             UnknownInstanceType, NoData, NoPermission, Timeout, Crashed, MissingTool (fi_info cannot be started) | skip
             NotApplicable (none, and none needed; libfabric, where fi_info is not installed: jobs bring their own).
    Cost:    5 ms, with fi_info up to a second; harmless to jobs.
    Source:  aws/eks-node-monitoring-agent, efa.go (ids, limits of rates); checks/catalog.py (counts).
             Unverified on hardware: no EFA was at hand.
    """
    adapters = read_adapters(ctx.host, tuple(RATE_LIMITS))
    name = read_identity(ctx.host, inventory=ctx.inventory, imds=False)["instance_type"]
    known = find_type(name)
    users = map_devices(known.name if known else None, adapters or (), ctx.inventory.get("devices") or ())
    yield from judge_count(ctx, ctx.params, known, adapters, users)
    if not adapters:
        return
    yield from _judge_ports(adapters, users)
    if ctx.params.counters:
        yield from _judge_rates(ctx, adapters)
    data: dict[str, Any] = {"counters": counters_of(adapters)}
    up = [adapter.name for adapter in adapters if adapter.ports and all(_is_up(port) for port in adapter.ports)]
    if ctx.params.fi_info and up:  # of one that is down the link is told, and libfabric leaves it out
        asked = _ask_libfabric(ctx, _given(ctx.host, up))
        yield from _fi_findings(asked)
        data["fi_info"] = asked
    yield Evidence(target="node", key="efa", data=data)


def map_devices(
    instance_type: str | None, adapters: Sequence[Adapter], devices: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """
    Targets of devices by the PCI address of the interface that each uses; empty where that cannot be told.

    The published map is taken where all devices of the type are seen (in a container numbers may start anywhere) and
    every interface found stands in it. Else a device uses the one whose bus is nearest; where two are as near, neither.
    """
    table = MAPS.get(instance_type or "")
    known = [adapter.address for adapter in adapters if adapter.address is not None]
    if table is not None and len(devices) == len(table) and set(known) <= set(table):
        mapped = _by_table(table, devices)
        if mapped is not None:
            return mapped
    return _by_bus(known, devices)


def counters_of(adapters: Sequence[Adapter]) -> dict[str, dict[str, int]]:
    """The counters of each port (`rdmap16s27/1`), as they are remembered for the next look."""
    return {f"{adapter.name}/{port.number}": dict(port.counters) for adapter in adapters for port in adapter.ports}


def rates(
    now: Mapping[str, Mapping[str, int]], previous: Previous | None, boot_id: str | None
) -> tuple[list[Rate], list[str]]:
    """
    What each counter rose by since the last look of this boot, and the ports whose counters were reset meanwhile.

    A counter that is lower than before was set back (the driver was loaded again): it tells nothing this time.
    """
    if previous is None or not previous.evidence or previous.boot_id != boot_id:
        return [], []
    if not MIN_ELAPSED_SECONDS <= previous.elapsed_seconds < float("inf"):
        return [], []
    before = previous.evidence[-1].data.get("counters")
    found: list[Rate] = []
    reset: set[str] = set()
    for port, counters in now.items():
        earlier = before.get(port) if isinstance(before, dict) else None
        for name, value in counters.items():
            old = earlier.get(name) if isinstance(earlier, dict) else None
            if not isinstance(old, int) or isinstance(old, bool):
                continue
            if value < old:
                reset.add(port)
            else:
                found.append(Rate(port.partition("/")[0], name, (value - old) / previous.elapsed_seconds))
    return [rate for rate in found if not any(port.partition("/")[0] == rate.adapter for port in reset)], sorted(reset)


class Rate(NamedTuple):
    """How fast one counter of one port rose since the last look."""

    adapter: str
    counter: str
    per_second: float


def parse_fi_info(text: str) -> list[str]:
    """
    The domains of the efa provider in the output of `fi_info -p efa`, without their kind: `rdmap16s27`.

    Blocks begin with `provider: efa` (in old libfabric also `efa;ofi_rxr`), and a domain is `rdmap16s27-rdm`. Blocks of
    other providers do not count.
    """
    found: set[str] = set()
    provider = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "provider":
            provider = value.strip()
        elif key.strip() == "domain" and provider.partition(";")[0] == "efa" and value.strip():
            found.add(re.sub(r"-(rdm|dgrm|direct)$", "", value.strip()))
    return sorted(found)


def judge_count(
    ctx: Context[Any],
    wanted: Params,
    known: InstanceType | None,
    adapters: Sequence[Adapter] | None,
    users: Mapping[str, Sequence[str]],
) -> Iterator[Finding]:
    """
    The number of interfaces; where some are missing, each of them as well, as far as its place is known.

    `users` are the targets of devices by the address of the interface that each uses.
    """
    counted = _counted(ctx, wanted, known, adapters)
    yield counted
    if counted.reason != "MissingDevice" or not adapters or known is None:
        return  # of none at all, one finding says it
    if wanted.expected in (None, known.efa_interfaces):
        yield from _missing(known.name, adapters, users)


def missing_addresses(instance_type: str | None, adapters: Sequence[Adapter]) -> list[str]:
    """Where interfaces of this type should be and none is; empty where no map is known or it is not this machine's."""
    table = MAPS.get(instance_type or "")
    known = {adapter.address for adapter in adapters}
    if table is None or not known <= set(table):
        return []
    return sorted(set(table) - known)


def used_by(targets: Sequence[str] | None) -> str:
    """The end of a message that names the devices which use an interface."""
    return f"; used by {', '.join(targets)}" if targets else ""


def target_at(address: str, adapters: Sequence[Adapter]) -> str:
    """The target of an interface that is not there: by the name that it would have, if the others are named so."""
    named = any(adapter.address and adapter.name == name_at(adapter.address) for adapter in adapters)
    return f"efa:{name_at(address) if named or not adapters else address}"


@dataclass(frozen=True)
class Params:
    """How many are wanted, what libfabric is asked with, and how fast counters may rise (None: not judged)."""

    expected: int | None = None  # None: all that an instance type with several Neuron devices takes
    required: bool = False  # a node without any fails, else it is warned of; healthd sets it for nodes of a fleet
    fi_info: bool = True  # ask libfabric, where its program is installed
    counters: bool = True  # False: where the driver is too old to have any
    max_rx_drops_per_second: float | None = RATE_LIMITS["rx_drops"]
    max_rdma_write_wr_err_per_second: float | None = RATE_LIMITS["rdma_write_wr_err"]
    max_rdma_read_wr_err_per_second: float | None = RATE_LIMITS["rdma_read_wr_err"]
    max_unresponsive_remote_events_per_second: float | None = RATE_LIMITS["unresponsive_remote_events"]
    max_impaired_remote_conn_events_per_second: float | None = RATE_LIMITS["impaired_remote_conn_events"]
    max_retrans_timeout_events_per_second: float | None = RATE_LIMITS["retrans_timeout_events"]
    max_retrans_pkts_per_second: float | None = RATE_LIMITS["retrans_pkts"]
    max_retrans_bytes_per_second: float | None = RATE_LIMITS["retrans_bytes"]


def _by_table(table: Sequence[str], devices: Sequence[Mapping[str, Any]]) -> dict[str, list[str]] | None:
    mapped: dict[str, list[str]] = {}
    for device in devices:
        index = device.get("host_index", device.get("index"))
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(table):
            return None
        mapped.setdefault(table[index], []).append(str(device.get("target")))
    return mapped


def _by_bus(known: Sequence[str], devices: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    mapped: dict[str, list[str]] = {}
    for device in devices:
        place = _place(device.get("bdf"))
        if place is None:
            continue
        far = sorted((abs(_bus(address) - place[1]), address) for address in known if _domain(address) == place[0])
        if far and (len(far) == 1 or far[0][0] < far[1][0]):
            mapped.setdefault(far[0][1], []).append(str(device.get("target")))
    return mapped


def _place(address: object) -> tuple[int, int] | None:
    """Domain and bus of a PCI address; None where it is none."""
    if not isinstance(address, str) or not re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address):
        return None
    return _domain(address), _bus(address)


def _domain(address: str) -> int:
    return int(address.split(":")[0], 16)


def _bus(address: str) -> int:
    return int(address.split(":")[1], 16)


def _counted(
    ctx: Context[Any], wanted: Params, known: InstanceType | None, adapters: Sequence[Adapter] | None
) -> Finding:
    count = None if adapters is None else len(adapters)
    expected, outside, origin = _expected(wanted, known)
    if expected is None and (skipped := _without_expectation(ctx, known, count)) is not None:
        return skipped
    if expected == 0 and not count:
        return make_finding(Status.SKIP, "NotApplicable", "no EFA interface is expected, and none is present")
    if count is None:
        return make_finding(Status.UNKNOWN, "NoData", "sysfs is not mounted, so EFA interfaces cannot be seen")
    names = ", ".join(adapter.name for adapter in adapters or ()) or "none"
    finding = within(
        float(count),
        name="efa_interfaces_count",
        target="node",
        limit=NO_LIMIT if expected is None else Limit(lower=float(expected), upper=None, origin=origin),
        reason="MissingDevice",
        subject=f"EFA interfaces ({names}):",
        outside=outside,
    )
    if finding.status is Status.PASS:
        return finding
    on_bus = len(find_on_bus(ctx.host))
    unbound = f"; the PCI bus shows {on_bus}: load the efa driver" if on_bus > count else f"; {_TEMPLATE}"
    alone = not wanted.required and wanted.expected is None and not count and not on_bus
    if alone:
        unbound = f"; jobs over several nodes need them{unbound}"
    return Finding(
        status=Status.WARN if alone else finding.status,
        reason=finding.reason,
        message=finding.message + unbound,
        target="node",
        measurements=finding.measurements,
    )


def _expected(wanted: Params, known: InstanceType | None) -> tuple[int | None, Status, str]:
    """How many there should be (None: nobody says), how bad fewer are, and who says so."""
    if wanted.expected is not None:
        return wanted.expected, Status.FAIL, "config"
    if known is None or known.efa_interfaces is None:
        return None, Status.FAIL, "none"
    if known.efa_interfaces == 0:
        return 0, Status.FAIL, "catalogue"
    several = (known.devices or 0) > 1
    described = find_descriptor(known.chip.accelerator)
    if described is not None and described.takes_all_efa and several:
        return known.efa_interfaces, Status.FAIL, "catalogue"
    if known.topology == "switch" and several:
        return known.efa_interfaces, Status.WARN, "catalogue"
    return 0, Status.FAIL, "catalogue"  # types that do their work alone: whoever wants EFA sets expected


def _without_expectation(ctx: Context[Any], known: InstanceType | None, count: int | None) -> Finding | None:
    """What to say where nobody says how many there should be; None where what is there can be shown unjudged."""
    described = find_descriptor(ctx.inventory.get("accelerator"))
    on_ec2 = known is not None or (described is not None and described.on_ec2_only)
    # GPUs elsewhere, and CPUs, need no EFA.
    concerned = on_ec2 or (bool(count) and (described is None or described.uses_efa))
    if concerned:
        text = f"{count or 0} EFA interfaces found, but the expected number is unknown; set expected for this check"
        return make_finding(Status.UNKNOWN, "UnknownInstanceType", text)
    return (
        None if count else make_finding(Status.SKIP, "NotApplicable", "no EFA interface is present, and none is needed")
    )


def _missing(name: str, adapters: Sequence[Adapter], users: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Which are missing, and who would use them; nothing where the places are not known."""
    for address in missing_addresses(name, adapters):
        text = f"no EFA interface at {address}{used_by(users.get(address))}"
        yield make_finding(Status.FAIL, "MissingDevice", text, target=target_at(address, adapters))


def _judge_ports(adapters: Sequence[Adapter], users: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Each interface with a port that is not up or not told; one pass where all are up."""
    bad = 0
    for adapter in adapters:
        users_of = used_by(users.get(adapter.address or ""))
        target = f"efa:{adapter.name}"
        if not adapter.ports:
            bad += 1
            yield make_finding(Status.UNKNOWN, "NoData", f"the kernel shows no port{users_of}", target=target)
        for port in adapter.ports:
            said = (port.state, port.phys_state)
            if _is_up(port):
                continue
            bad += 1
            text = f"port {port.number}: state {port.state or 'unreadable'}, link {port.phys_state or 'unreadable'}"
            if any(word is not None and word not in up for word, up in zip(said, _UP, strict=True)):
                yield make_finding(Status.FAIL, "LinkDown", f"{text}{users_of}", target=target)
            else:
                yield make_finding(Status.UNKNOWN, "NoData", f"{text}{users_of}", target=target)
    if not bad:
        up = float(sum(len(adapter.ports) for adapter in adapters))
        yield within(up, name="efa_ports_up_count", target="node", reason="LinkDown", subject="EFA ports up:")


def _judge_rates(ctx: Context[Params], adapters: Sequence[Adapter]) -> Iterator[Finding]:
    """Counters that rise too fast, by interface, and the fastest of each counter."""
    for adapter in adapters:
        if adapter.ports and not all(port.counters for port in adapter.ports):
            text = "the driver shows no error counters; update it, or set counters = false for this check"
            yield make_finding(Status.UNKNOWN, "NoData", text, target=f"efa:{adapter.name}")
    found, reset = rates(counters_of(adapters), ctx.previous, ctx.host.boot_id())
    calm: list[Measurement] = []
    bad = False
    for counter in RATE_LIMITS:
        ranked = sorted((rate for rate in found if rate.counter == counter), key=lambda rate: -rate.per_second)
        findings = [_judge_rate(ctx, rate) for rate in ranked]
        over = [finding for finding in findings if finding.status is not Status.PASS]
        bad = bad or bool(over)
        yield from over
        if findings and not over:
            calm.extend(findings[0].measurements)
    if calm:
        set_back = f"; counters of {', '.join(reset)} were reset" if reset else ""
        text = f"{'the other' if bad else 'all'} error counters rise no faster than their limits{set_back}"
        yield Finding(status=Status.PASS, reason=None, message=text, target="node", measurements=tuple(calm))


def _judge_rate(ctx: Context[Params], rate: Rate) -> Finding:
    name = f"efa_{rate.counter}_per_second"
    field = f"max_{rate.counter}_per_second"
    upper, default = getattr(ctx.params, field), getattr(Params, field)
    target = f"efa:{rate.adapter}"
    limit = ctx.limit(name, target)
    if limit is NO_LIMIT and upper is not None:
        limit = Limit(lower=None, upper=upper, origin="default" if upper == default else "config")
    subject = f"{rate.counter} per second:"
    return within(
        rate.per_second,
        name=name,
        target=target,
        limit=limit,
        reason="LinkErrors",
        subject=subject,
        outside=Status.WARN,
    )


def _given(host: Host, names: list[str]) -> list[str]:
    """Those that can be used here: a container sees all of its host in sysfs, and has the files of its share."""
    if not has_own_dev(host):
        return names
    barred = without_file(host)
    return [name for name in names if name not in barred] or names


def _ask_libfabric(ctx: Context[Params], names: list[str]) -> dict[str, Any]:
    """
    What libfabric offered: `age_seconds`, `status`, `reason`, `message`, `missing` (names) and `domains` (how many),
    as JSON values.

    The last answer while it is younger than ten minutes and the interfaces are the same.
    """
    previous = ctx.previous
    if previous is not None and previous.evidence and previous.boot_id == ctx.host.boot_id():
        last = previous.evidence[-1].data.get("fi_info")
        if isinstance(last, dict) and last.get("names") == names and _is_number(last.get("age_seconds")):
            age_seconds = last["age_seconds"] + max(0.0, previous.elapsed_seconds)
            if age_seconds < FI_INFO_EVERY_SECONDS:
                return {**last, "age_seconds": age_seconds}
    status, reason, message, missing, domains = _run_fi_info(ctx.host, names)
    return {
        "age_seconds": 0.0,
        "names": names,
        "status": status.value,
        "reason": reason,
        "message": message,
        "missing": missing,
        "domains": domains,
    }


def _run_fi_info(host: Host, names: Sequence[str]) -> tuple[Status, str | None, str, list[str], int | None]:
    """Status, reason, message, missing names, and how many domains libfabric has (None: it was not asked)."""
    installed = host.exists(_AWS_FI_INFO)
    program = _AWS_FI_INFO if installed else "fi_info"
    try:
        done = host.run([program, "-p", "efa"], timeout_seconds=FI_INFO_TIMEOUT_SECONDS)
    except HostError as error:
        if error.reason == "MissingTool" and not installed:
            # Jobs bring their libfabric in their images: that none is here says nothing against the node.
            return Status.SKIP, "NotApplicable", "libfabric was not checked: fi_info is not installed", [], None
        return Status.UNKNOWN, error.reason, f"libfabric cannot be checked: {error}", [], None
    if done.returncode < 0:
        return Status.UNKNOWN, "Crashed", f"fi_info -p efa was killed by signal {-done.returncode}", [], None
    domains = parse_fi_info(done.stdout) if done.returncode == 0 else []
    if not domains:
        words = " ".join((done.stderr or done.stdout).split())[:200] or "it lists no efa domain"
        text = f"libfabric has no provider efa (fi_info -p efa: exit {done.returncode}, {words})"
        if not host.glob("/dev/infiniband", "uverbs*"):
            text += "; /dev/infiniband/uverbs* is missing: give the container these devices, or load ib_uverbs"
            return Status.UNKNOWN, "NoData", text, [], 0
        if not installed:  # of a distribution: jobs have AWS's own in their images
            text += f"; fi_info is not {_AWS_FI_INFO}: install that one, or set fi_info = false for this check"
            return Status.UNKNOWN, "NoData", text, [], 0
        return Status.FAIL, "NetworkUnusable", f"{text}; reinstall the libfabric of aws-efa-installer", [], 0
    offered = [name for name in names if name in domains]
    if not offered and len(domains) < len(names):
        text = f"libfabric has {len(domains)} domains for {len(names)} interfaces, under other names: {some(domains)}"
        return Status.UNKNOWN, "NoData", text, [], len(domains)
    # Names of another form than sysfs has say nothing about single interfaces.
    missing = [name for name in names if name not in domains] if offered else []
    if missing:
        text = f"libfabric offers {len(offered)} of {len(names)} interfaces"
        return Status.FAIL, "NetworkUnusable", text, missing, len(domains)
    return Status.PASS, None, f"libfabric has the provider efa with {len(domains)} domains", [], len(domains)


def _fi_findings(asked: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings of an answer, which may have come back from where evidence is kept."""
    known = {status.value: status for status in (Status.PASS, Status.FAIL, Status.SKIP)}
    status, domains = known.get(str(asked.get("status")), Status.UNKNOWN), asked.get("domains")
    if status is Status.PASS and not _is_number(domains):
        status = Status.UNKNOWN
    reason = None if status is Status.PASS else str(asked.get("reason") or "NoData")
    age = asked["age_seconds"]
    text = str(asked.get("message", "")) + (f" ({age:.0f} s ago)" if age else "")
    missing = asked.get("missing")
    targets = [f"efa:{name}" for name in missing] if isinstance(missing, list) and missing else ["node"]
    for target in targets:
        shown = float(domains) if _is_number(domains) else None
        count = Measurement(name="efa_libfabric_domains_count", value=shown, lower=None, upper=None, origin="none")
        measurements = () if shown is None else (count,)
        yield Finding(status=status, reason=reason, message=text, target=target, measurements=measurements)


def _is_up(port: Port) -> bool:
    return all(word in up for word, up in zip((port.state, port.phys_state), _UP, strict=True))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
