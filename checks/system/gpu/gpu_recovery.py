"""The recovery action that NVIDIA's driver requests before a GPU is used again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from checks.contract import Action, Context, Finding, Measurement, NoParams, Status, check, make_finding
from checks.host.nvml import Gpu
from checks.system.gpu.gpu_reading import not_told, read_gpus

# nvmlDeviceGpuRecoveryAction_t: what is needed, and what to do in the words of this project. Source: nvml.h of CUDA 13.
_NEEDED: Mapping[int, tuple[str, Action]] = {
    1: ("a reset of the GPU", Action.RESET_DEVICE),
    2: ("a reboot of the node", Action.REBOOT),
    3: ("all jobs that use peer-to-peer access to end (drain P2P), then another check", Action.INSPECT),
    4: ("all jobs on it to end, then a reset of the GPU", Action.RESET_DEVICE),
    5: ("recovery of its IMEX domain: restart nvidia-imex on all nodes of the domain", Action.INSPECT),
    6: ("a reset of its PCI bus", Action.RESET_DEVICE),
    7: ("a reboot of the whole system, not only of a virtual machine", Action.REBOOT),
}


@check(tier="passive", interval_seconds=60, timeout_seconds=20, accelerators=True)
def gpu_recovery(ctx: Context[NoParams]) -> Iterator[Finding]:
    """
    The driver asks for no recovery of any GPU.

    After an error the driver reports what must be done before the GPU is used again. This advice is the finding's
    action.

    Reads:   NVML (nvidia-ml-py): the field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (230).
    Judges:  fail RecoveryNeeded (1 to 7), DeviceLost, VersionMismatch | warn RecoveryNeeded (a number that is not known
             here) | unknown NoData, MissingTool, NoPermission | skip NotApplicable (no NVIDIA GPU; a driver before r570
             does not report it).
    Cost:    some 10 ms; harmless to jobs (see gpu_memory).
    Source:  NVML API reference, nvmlDeviceGpuRecoveryAction_t; its numbers are those of nvidia-ml-py 13.
             Unverified on hardware: all of it; a stand-in with the names and records of the real NVML was read.
    """
    for reading in read_gpus(ctx, Gpu.recovery):
        if isinstance(reading, Finding):
            yield reading
            continue
        action, target = reading.said.action, reading.target
        yield from not_told(target, reading.said.failed)
        if action is None:
            if not reading.said.failed:
                text = "the driver does not report a recovery action; drivers from r570 on do"
                yield make_finding(Status.SKIP, "NotApplicable", text, target)
            continue
        yield _judge(action, target)


def _judge(action: int, target: str) -> Finding:
    measured = Measurement(name="gpu_recovery_action", value=float(action), lower=None, upper=None, origin="none")
    status, reason, advice = Status.PASS, None, None
    text = "the driver requests no recovery"
    if action in _NEEDED:
        needed, advice = _NEEDED[action]
        status, reason, text = Status.FAIL, "RecoveryNeeded", f"the driver requests {needed} (recovery action {action})"
    elif action != 0:
        status, reason, advice = Status.WARN, "RecoveryNeeded", Action.INSPECT
        text = f"the driver requests the unknown recovery action {action}: see nvidia-smi -q"
    return Finding(status=status, reason=reason, message=text, target=target, measurements=(measured,), action=advice)
