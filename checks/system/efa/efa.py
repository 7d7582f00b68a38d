"""Elastic Fabric Adapters: as many as there should be, links up, no counter of errors rising, libfabric content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from checks.catalog import find_type
from checks.contract import NO_LIMIT, Context, Evidence, Finding, Limit, Measurement, Status, check, make_finding
from checks.host.container import has_own_dev
from checks.host.efa import Adapter, Port, read_adapters, without_file
from checks.host.identity import read_identity
from checks.host.machine import Host, HostError
from checks.limits import within
from checks.printable import some
from checks.system.efa.efa_count import judge_count
from checks.system.efa.efa_links import (
    RATE_LIMITS,
    Rate,
    counters_of,
    map_devices,
    parse_fi_info,
    rates,
    used_by,
)

FI_INFO_TIMEOUT_SECONDS = 8.0  # it opens every interface: under 1 s where all is well
FI_INFO_EVERY_SECONDS = 600.0
_AWS_FI_INFO = "/opt/amazon/efa/bin/fi_info"  # not in the PATH of services; a distribution's own may know no efa
_UP = (("4: ACTIVE", "5: ACTIVE_DEFER"), ("5: LinkUp",))  # include/rdma/ib_verbs.h


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


@check(tier="passive", interval_seconds=60, timeout_seconds=15)
def efa(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The node has the EFA interfaces that it should have, they are up, and they do not repeat or lose what they carry.

    What an instance type takes at most is what types made of several Neuron devices are expected to have, because a job
    over several nodes needs it. None at all is a warning for a node by itself, and a failure where a fleet or a gate
    over several nodes needs them (`required`); some of them, or some without a driver, is a failure everywhere. Of GPU
    types made for jobs over several nodes fewer is a warning, and of other types none is in order. An interface that is
    missing or down is told with the devices that use it. In a container with a /dev of its own libfabric must offer
    those whose files it has.

    Reads:   /sys/class/infiniband (vendor, device, ports, hw_counters); with fewer than expected also /sys/bus/pci;
             the firmware tables for the type; `fi_info -p efa` where it is installed, at most once in ten minutes; in a
             container the names in /dev/infiniband and /sys/class/infiniband_verbs.
    Judges:  fail MissingDevice, LinkDown, NetworkUnusable (libfabric offers none, or not all) | warn LinkErrors (a
             counter rises faster than its limit), MissingDevice (GPUs; none at all on a node by itself) | unknown
             UnknownInstanceType, NoData, NoPermission, Timeout, Crashed | skip NotApplicable (none, and none needed),
             MissingTool (libfabric, where fi_info is not installed).
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
            text = "the driver shows no counters of errors; update it, or set counters = false for this check"
            yield make_finding(Status.UNKNOWN, "NoData", text, target=f"efa:{adapter.name}")
    found, anew = rates(counters_of(adapters), ctx.previous, ctx.host.boot_id())
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
        set_back = f"; counters of {', '.join(anew)} began anew" if anew else ""
        text = f"{'the other' if bad else 'all'} counters of errors rise no faster than they may{set_back}"
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
            return Status.SKIP, "MissingTool", "libfabric was not asked: fi_info is not installed", [], None
        return Status.UNKNOWN, error.reason, f"libfabric cannot be asked: {error}", [], None
    if done.returncode < 0:
        return Status.UNKNOWN, "Crashed", f"fi_info -p efa was killed by signal {-done.returncode}", [], None
    domains = parse_fi_info(done.stdout) if done.returncode == 0 else []
    if not domains:
        words = " ".join((done.stderr or done.stdout).split())[:200] or "it names no domain of efa"
        text = f"libfabric has no provider efa (fi_info -p efa: exit {done.returncode}, {words})"
        if not host.glob("/dev/infiniband", "uverbs*"):
            text += "; /dev/infiniband/uverbs* is not here: give the container these devices, or load ib_uverbs"
            return Status.UNKNOWN, "NoData", text, [], 0
        if not installed:  # of a distribution: jobs have AWS's own in their images
            text += f"; it is not {_AWS_FI_INFO}: install that, or set fi_info = false for this check"
            return Status.UNKNOWN, "NoData", text, [], 0
        return Status.FAIL, "NetworkUnusable", f"{text}; install aws-efa-installer's libfabric anew", [], 0
    offered = [name for name in names if name in domains]
    if not offered and len(domains) < len(names):
        text = f"libfabric has {len(domains)} domains for {len(names)} interfaces, by other names: {some(domains)}"
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
