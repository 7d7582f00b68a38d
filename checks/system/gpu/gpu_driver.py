"""NVIDIA's driver: its versions, the processes that it lists on GPUs, and memory in use without a process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Evidence, Finding, Measurement, Status, Tier, check, make_finding
from checks.host.machine import Host, HostError
from checks.host.nvml import Gpu, NvmlError, Usage, Versions, opened
from checks.limits import within
from checks.system.bounds import bound
from checks.system.gpu.gpu_reading import earlier, of_nvml, read_gpus

MAX_NAMED = 8


@dataclass(frozen=True)
class Params:
    """What must fit."""

    driver: str | None = None  # the version that every node should have, or its beginning (`570.`); None: any
    max_stuck_bytes: int = 1 << 30  # of memory in use without a process; drivers keep some hundred MB at most
    fail_seconds: float = 50.0  # seen at two looks, a minute apart by default: memory of a process that ended goes soon


@check(tier="passive", interval_seconds=60, timeout_seconds=20, accelerators=True)
def gpu_driver(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The driver answers, has the expected version, and shows no process or memory on a GPU that healthd cannot explain.

    /proc shows which processes hold GPUs. A process that the driver shows and /proc does not is in another process
    namespace. healthd then cannot tell whether a job has the GPU, so the node does not count as free. If memory is in
    use although no process has the GPU open, no job can use that memory until the GPU is reset. This is a warning at
    first, and a fault if it lasts or is seen in a run before a job (the quick tier and above).

    Reads:   NVML (nvidia-ml-py): versions, processes on each GPU, memory in use; /proc/PID/fd of these processes.
    Judges:  fail VersionMismatch (the kernel's part and the libraries differ, or not the version of params.driver),
             StuckMemory, DeviceLost | warn StuckMemory | unknown Busy (processes out of sight), NoData, MissingTool,
             NoPermission | skip NotApplicable (no NVIDIA GPU).
    Cost:    some 10 ms; harmless to jobs (see gpu_memory).
    Unverified on hardware: all of it; a stand-in with the names and records of the real NVML was read.
    """
    if ctx.inventory.get("accelerator") == "cuda":
        try:
            with opened(ctx.host) as nvml:
                yield _judge_versions(nvml.versions(), ctx.params.driver)
        except NvmlError as error:
            yield of_nvml(error)
            return
    counted = known = 0
    remembered: dict[str, Any] = {}
    for reading in read_gpus(ctx, lambda gpu: (*list_processes(ctx.host, gpu), gpu.usage())):
        if isinstance(reading, Finding):
            yield reading
            continue
        processes, hidden, usage = reading.said
        stuck = _stuck_bytes(ctx, reading.target, usage)
        seconds = _stuck_seconds(ctx, reading.key) if stuck is not None else None
        remembered[reading.key] = {"stuck_seconds": seconds}
        if stuck is not None and seconds is not None:
            yield _judge_stuck(ctx, reading.target, stuck, seconds)
        if processes is None:
            text = "the driver does not report compute processes on it"
            yield make_finding(Status.UNKNOWN, "NoData", text, reading.target)
            continue
        known += 1
        counted += len(processes)
        if hidden:
            names = ", ".join(map(str, hidden[:MAX_NAMED]))
            text = f"the driver reports processes that are not visible here ({names}): run in the host's PID namespace"
            yield make_finding(Status.UNKNOWN, "Busy", text, reading.target)
    if known:
        yield within(
            float(counted),
            name="gpu_processes_count",
            target="node",
            reason="NoData",
            subject=f"processes on {known} GPUs, as the driver reports:",
        )
    if remembered:
        yield Evidence(target="node", key="gpu_driver", data={"gpus": remembered})


def _stuck_bytes(ctx: Context[Params], target: str, usage: Usage) -> int | None:
    """Memory in use beyond the limit on a GPU that no process has open; None if there is none, or it is unknown."""
    holders = ctx.inventory.get("holders")
    if holders is None or usage.processes != () or usage.used_bytes is None:
        return None
    if any(": pid " not in str(line) or str(line).startswith(f"{target}: ") for line in holders):
        return None  # held, or so many hold devices that some were left out
    limit = bound(ctx, "gpu_stuck_bytes", target, upper="max_stuck_bytes").upper
    return usage.used_bytes if limit is not None and usage.used_bytes > limit else None


def _stuck_seconds(ctx: Context[Params], key: str) -> float:
    """For how long it has been seen so."""
    before = earlier(ctx, key, least_seconds=0.0)
    lasted = before[0].get("stuck_seconds") if before is not None else None
    if before is None or isinstance(lasted, bool) or not isinstance(lasted, (int, float)):
        return 0.0
    return lasted + before[1] if 0 <= lasted < float("inf") else 0.0


def _judge_stuck(ctx: Context[Params], target: str, used_bytes: int, seconds: float) -> Finding:
    lasting = seconds >= ctx.params.fail_seconds
    return within(
        float(used_bytes),
        name="gpu_stuck_bytes",
        target=target,
        limit=bound(ctx, "gpu_stuck_bytes", target, upper="max_stuck_bytes"),
        reason="StuckMemory",
        subject="no process has the GPU open; memory in use" + (f" for {seconds:.0f} s:" if lasting else ":"),
        outside=Status.FAIL if lasting or ctx.tier is not Tier.PASSIVE else Status.WARN,
    )


def _judge_versions(said: Versions, wanted: str | None) -> Finding:
    text = f"driver {said.driver or 'unknown'}, NVML {said.nvml or 'unknown'}, CUDA {said.cuda or 'unknown'}"
    if said.driver is None:
        return make_finding(Status.UNKNOWN, "NoData", f"NVML reports no driver version: {', '.join(said.failed)}")
    if wanted is not None and not said.driver.startswith(wanted):
        return make_finding(Status.FAIL, "VersionMismatch", f"{text}; {wanted} is wanted")
    told = float(sum(version is not None for version in (said.driver, said.nvml, said.cuda)))
    shown = Measurement(name="gpu_driver_versions_count", value=told, lower=None, upper=None, origin="none")
    return Finding(status=Status.PASS, reason=None, message=text, target="node", measurements=(shown,))


def list_processes(host: Host, gpu: Gpu) -> tuple[tuple[int, ...] | None, list[int]]:
    """
    Processes on a GPU by the driver's word (None: it does not tell), and those that are not seen to have it open.

    Of these the ones that the driver shows twice, before and after the look, so that one that ended meanwhile does not
    count; all of them where it does not tell again.
    """
    processes = gpu.processes()
    unseen = {pid for pid in processes or () if not _is_seen(host, pid)}
    again = gpu.processes() if unseen else ()
    return processes, sorted(unseen if again is None else unseen & set(again))


def _is_seen(host: Host, pid: int) -> bool:
    """Whether the process of this number is here and has a GPU open: numbers mean others in another namespace."""
    folder = f"/proc/{pid}/fd"
    try:
        return any(_points_to_gpu(host, f"{folder}/{name}") for name in host.listdir(folder))
    except HostError as error:
        # One that may not be looked into is a process all the same; `device_holders` tells of it.
        return error.reason == "NoPermission"


def _points_to_gpu(host: Host, path: str) -> bool:
    try:
        return host.readlink(path).startswith("/dev/nvidia")
    except HostError:
        return False
