"""Links of GPUs: the PCIe slot, the NVLinks, the fabric between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.catalog import find_type
from checks.contract import Context, Evidence, Finding, Status, check, make_finding
from checks.host.identity import read_identity
from checks.host.nvml import Gpu, Links
from checks.limits import within
from checks.system.bounds import bound
from checks.system.gpu.gpu_reading import Reading, earlier, not_told, read_gpus, risen

_LINK_STATE = re.compile(r"NVLink \d+: ")  # of what NVML failed to tell: the state of a link, where its list ends
_FABRIC_STATES = {1: "not started", 2: "in progress"}  # nvmlGpuFabricState; 0: not supported, 3: completed
# NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_...: two bits each; 0: not supported, 1: yes, 2: no.
_YES = 1
_FABRIC_FAULTS: Mapping[int, tuple[Status, str, str]] = {
    0: (Status.FAIL, "LinkDegraded", "the NVLink fabric gives the GPU reduced bandwidth"),
    4: (Status.FAIL, "LinkDown", "a route of the GPU through the NVLink fabric is unhealthy"),
    2: (Status.WARN, "LinkErrors", "the NVLink fabric is recovering a route of the GPU"),
    6: (Status.WARN, "LinkErrors", "the NVLink fabric is recovering from a timed-out access by the GPU"),
}


@dataclass(frozen=True)
class Params:
    """Bounds."""

    busy_ratio: float = 0.1  # at least so busy must a GPU be for its PCIe generation to count: idle ones lower it
    # Source: DCGM, dcgm_gpu_hardware_limits.h: 8 replays a minute; CRC errors matter from 100 a second on.
    max_pcie_replays_per_second: float = 8 / 60
    max_nvlink_crc_errors_per_second: float = 100.0
    max_nvlink_retries_count: int = 0  # replays and recoveries of links since the last look


@check(tier="passive", interval_seconds=60, timeout_seconds=20, accelerators=True)
def gpu_links(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    Each GPU's PCIe link has its full width, its NVLinks are up, and none of them retransmits data.

    A GPU with fewer active NVLinks than most of the others has lost one. On instance types whose GPUs are all linked to
    each other, every link must be active. The PCIe generation is judged only while the GPU works, because idle GPUs
    lower it.

    Reads:   NVML (nvidia-ml-py): PCIe width, generation and replays; state and errors of NVLinks; state and health of
             the fabric; the firmware tables for the instance type.
    Judges:  fail LinkDown (NVLink, fabric, a route of it), LinkDegraded (bandwidth of the fabric), LinkErrors (CRC
             errors of NVLinks), DeviceLost, VersionMismatch | warn LinkDegraded (PCIe), LinkErrors (PCIe replays;
             NVLinks that repeat or recover; a fabric that recovers) | unknown NoData, MissingTool, NoPermission | skip
             NotApplicable (no NVIDIA GPU).
    Cost:    some 10 ms; harmless to jobs (see gpu_memory).
    Source:  NVML API reference, NvLink, PCIe and nvmlGpuFabricInfoV_t (healthMask); limits of DCGM.
             Unverified on hardware: NVLinks with errors; NVLink 5 (Blackwell), which may count errors elsewhere.
    """
    readings = read_gpus(ctx, Gpu.links)
    wanted = _wanted(ctx, [reading.said for reading in readings if isinstance(reading, Reading)])
    remembered: dict[str, Any] = {}
    for reading in readings:
        if isinstance(reading, Finding):
            yield reading
            continue
        said = reading.said
        remembered[reading.key] = {"pcie_replays": said.pcie_replays, **said.nvlink_errors}
        findings = [
            *not_told(reading.target, said.failed),
            *_judge_pcie(ctx, reading.target, said),
            *_judge_nvlink(reading.target, said, wanted),
            *_judge_counters(ctx, reading),
        ]
        yield from findings or [_nothing(reading.target)]
    if remembered:
        yield Evidence(target="node", key="gpu_links", data={"gpus": remembered})


def _wanted(ctx: Context[Params], said: list[Links]) -> int | None:
    """
    How many NVLinks of a GPU should be active: all on types whose GPUs are linked by switches, else as most have.

    None where all should be, 0 where nobody expects any.
    """
    known = find_type(read_identity(ctx.host, inventory=ctx.inventory, imds=False)["instance_type"])
    if known is not None and known.topology == "switch" and known.chip.accelerator == "cuda":
        return None
    counts = Counter(
        sum(links.nvlink_active.values())
        for links in said
        if not any(_LINK_STATE.match(words) for words in links.failed)
    )
    return max(counts, key=lambda active: (counts[active], active), default=0)


def _judge_pcie(ctx: Context[Params], target: str, said: Links) -> Iterator[Finding]:
    width, widest = said.pcie_width, said.pcie_width_max
    if width is not None and widest is not None:
        if width < widest:
            text = f"PCIe link has {width} of {widest} lanes: reseat or replace the GPU"
            yield make_finding(Status.WARN, "LinkDegraded", text, target)
        else:
            yield within(
                float(width), name="gpu_pcie_lanes_count", target=target, reason="LinkDegraded", subject="PCIe lanes:"
            )
    generation, newest = said.pcie_generation, said.pcie_generation_max
    busy = said.busy_ratio is not None and said.busy_ratio >= ctx.params.busy_ratio
    if busy and generation is not None and newest is not None and generation < newest:
        text = f"PCIe link runs at generation {generation} instead of {newest} while the GPU is busy"
        yield make_finding(Status.WARN, "LinkDegraded", text, target)


def _judge_nvlink(target: str, said: Links, wanted: int | None) -> Iterator[Finding]:
    if said.fabric_state in _FABRIC_STATES:
        text = f"the NVLink fabric is {_FABRIC_STATES[said.fabric_state]}: see nvidia-fabricmanager"
        yield make_finding(Status.FAIL, "LinkDown", text, target)
    elif said.fabric_state == 3 and said.fabric_status:
        text = f"the GPU could not join the NVLink fabric (status {said.fabric_status}): see nvidia-fabricmanager"
        yield make_finding(Status.FAIL, "LinkDown", text, target)
    for shift, (status, reason, text) in _FABRIC_FAULTS.items():
        if said.fabric_health is not None and said.fabric_health >> shift & 3 == _YES:
            yield make_finding(status, reason, f"{text}: see nvidia-fabricmanager", target)
    if any(_LINK_STATE.match(words) for words in said.failed):
        return  # not all are known, so that none of them is missing
    links = said.nvlink_active
    if wanted is None and not links:
        # NVML lists none where it cannot tell, as well as where there are none.
        text = "reports no NVLink, although all GPUs are linked on this instance type"
        yield make_finding(Status.UNKNOWN, "NoData", text, target)
        return
    active = sum(links.values())
    expected = len(links) if wanted is None else wanted
    if active < expected:
        down = [str(link) for link, state in links.items() if not state]
        names = f" (down: {', '.join(down)})" if down else ""
        text = f"{active} of {expected} NVLinks are active{names}"
        yield make_finding(Status.FAIL, "LinkDown", text, target)
    elif active:
        yield within(
            float(active), name="gpu_nvlinks_active_count", target=target, reason="LinkDown", subject="NVLinks active:"
        )


def _judge_counters(ctx: Context[Params], reading: Reading[Links]) -> Iterator[Finding]:
    before = earlier(ctx, reading.key)
    if before is None:
        return
    counters, elapsed_seconds = before
    target, errors = reading.target, reading.said.nvlink_errors
    crc = _rise(counters, errors, ("crc_flit", "crc_data"))
    if crc is not None:
        name = "gpu_nvlink_crc_errors_per_second"
        limit = bound(ctx, name, target, upper="max_nvlink_crc_errors_per_second")
        yield within(
            crc / elapsed_seconds,
            name=name,
            target=target,
            limit=limit,
            reason="LinkErrors",
            subject="CRC errors of NVLinks per second:",
        )
    retries = _rise(counters, errors, ("replay", "recovery"))
    if retries is not None:
        name = "gpu_nvlink_retries_count"
        yield within(
            float(retries),
            name=name,
            target=target,
            limit=bound(ctx, name, target, upper="max_nvlink_retries_count"),
            reason="LinkErrors",
            subject=f"NVLink replays and recoveries in {elapsed_seconds:.0f} s:",
            outside=Status.WARN,
        )
    replays = risen(counters, "pcie_replays", reading.said.pcie_replays)
    if replays is not None:
        name = "gpu_pcie_replays_per_second"
        yield within(
            replays / elapsed_seconds,
            name=name,
            target=target,
            limit=bound(ctx, name, target, upper="max_pcie_replays_per_second"),
            reason="LinkErrors",
            subject="PCIe replays per second:",
            outside=Status.WARN,
        )


def _rise(before: Mapping[str, Any], now: Mapping[str, int], kinds: tuple[str, ...]) -> int | None:
    """
    By how much counters of these kinds rose together, over the links; None where none of them can be compared.

    Each link by itself: one that is up again comes with all that it has counted since the driver was loaded.
    """
    names = [name for name in now if name.partition("/")[0] in kinds]
    rises = [rise for name in names if (rise := risen(before, name, now[name])) is not None]
    return sum(rises) if rises else None


def _nothing(target: str) -> Finding:
    return make_finding(Status.UNKNOWN, "NoData", "reports nothing about its links", target)
