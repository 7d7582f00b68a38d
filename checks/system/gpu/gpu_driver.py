"""NVIDIA's driver: its versions, and who computes on GPUs by its own word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Measurement, Status, check, make_finding
from checks.host.machine import Host, HostError
from checks.host.nvml import Gpu, NvmlError, Versions, opened
from checks.limits import within
from checks.system.gpu.gpu_reading import of_nvml, read_gpus

MAX_NAMED = 8


@dataclass(frozen=True)
class Params:
    """What must fit."""

    driver: str | None = None  # the version that every node should have, or its beginning (`570.`); None: any


@check(tier="passive", interval_seconds=60, timeout_seconds=20, accelerators=True)
def gpu_driver(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The driver answers, is the one that is wanted, and shows no process on a GPU that cannot be seen here.

    Who holds GPUs is read from /proc. A process that the driver shows and /proc does not is in another process
    namespace, where nobody sees whether a job has the GPU: the node is not known to be free then.

    Reads:   NVML (nvidia-ml-py): versions, processes on each GPU; /proc/PID/fd of these processes.
    Judges:  fail VersionMismatch (the kernel's part and the libraries differ, or not the version of params.driver),
             DeviceLost | unknown Busy (processes out of sight), NoData, MissingTool, NoPermission | skip NotApplicable
             (no NVIDIA GPU).
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
    for reading in read_gpus(ctx, lambda gpu: list_processes(ctx.host, gpu)):
        if isinstance(reading, Finding):
            yield reading
            continue
        processes, hidden = reading.said
        if processes is None:
            text = "the driver does not tell which processes compute on it"
            yield make_finding(Status.UNKNOWN, "NoData", text, reading.target)
            continue
        known += 1
        counted += len(processes)
        if hidden:
            names = ", ".join(map(str, hidden[:MAX_NAMED]))
            text = f"the driver shows processes that cannot be seen here ({names}): run in the host's PID namespace"
            yield make_finding(Status.UNKNOWN, "Busy", text, reading.target)
    if known:
        yield within(
            float(counted),
            name="gpu_processes_count",
            target="node",
            reason="NoData",
            subject=f"processes on {known} GPUs by the driver's word:",
        )


def _judge_versions(said: Versions, wanted: str | None) -> Finding:
    text = f"driver {said.driver or 'unknown'}, NVML {said.nvml or 'unknown'}, CUDA {said.cuda or 'unknown'}"
    if said.driver is None:
        return make_finding(Status.UNKNOWN, "NoData", f"NVML tells no version of the driver: {', '.join(said.failed)}")
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
