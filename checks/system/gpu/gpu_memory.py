"""Errors of GPU memory that could not be corrected, and the repairs that wait or have failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Action, Context, Evidence, Finding, Measurement, Status, check, make_finding
from checks.host.nvml import Gpu, Memory
from checks.limits import within
from checks.system.bounds import bound
from checks.system.gpu.gpu_reading import Reading, not_told, read_gpus, remembered


@dataclass(frozen=True)
class Params:
    """Bounds."""

    max_uncorrected_count: int = 0  # since the last reset: data was lost, and a reset takes the place out of use
    max_retired_pages_count: int = 63  # more is a fault of the board. Source: DCGM, DCGM_LIMIT_MAX_RETIRED_PAGES
    required: bool = True  # False: GPUs without ECC (or with it switched off) are in order


@check(tier="passive", interval_seconds=60, timeout_seconds=20, accelerators=True)
def gpu_memory(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    No GPU has had an uncorrectable memory error since its last reset, and no repair is pending or has failed.

    The lifetime errors of a GPU are shown. Their increase is judged only if the GPU has no counts since its last reset.
    Errors stand until the next boot, because results computed meanwhile may be wrong.

    Reads:   NVML (nvidia-ml-py): ECC mode, uncorrected errors (volatile, aggregate), remapped rows, retired pages.
    Judges:  fail EccErrors (uncorrected errors, a remapping that waits for a reset or has failed, too many retired
             pages), DeviceLost, VersionMismatch | warn NoData (ECC is off) | unknown NoData, MissingTool,
             NoPermission | skip NotApplicable (no NVIDIA GPU, or GPUs without ECC).
    Cost:    some 10 ms; harmless to jobs. Where nothing keeps the driver's state (nvidia-persistenced, a job), the
             driver starts each GPU for the look, which takes a second or more.
    Source:  NVIDIA, GPU memory error management and dynamic page retirement; limits of DCGM.
             Unverified on hardware: errors of real memory; see the tests marked gpu for what runs on a GPU.
    """
    # A GPU that does not answer this time keeps what it had counted before.
    bases = {key: _whole(one.get("aggregate_base")) for key, one in remembered(ctx).items()}
    for reading in read_gpus(ctx, Gpu.memory):
        if isinstance(reading, Finding):
            yield reading
            continue
        base, now = bases.get(reading.key), reading.said.aggregate_uncorrected
        if now is not None and (base is None or base > now):
            base = now
        bases[reading.key] = base
        yield from _judge(ctx, reading, base)
    if bases:
        data = {"gpus": {key: {"aggregate_base": base} for key, base in bases.items()}}
        yield Evidence(target="node", key="gpu_memory", data=data)


def _judge(ctx: Context[Params], reading: Reading[Memory], base: int | None) -> Iterator[Finding]:
    said, target = reading.said, reading.target
    yield from not_told(target, said.failed)
    yield from _repairs(target, said)
    yield from _pages(ctx, target, said)
    errors, since = said.volatile_uncorrected, "since the last reset"
    if errors is None and said.aggregate_uncorrected is not None and base is not None:
        errors, since = said.aggregate_uncorrected - base, "since the first check of this boot"
    if errors is not None:
        finding = within(
            float(errors),
            name="gpu_uncorrected_errors_count",
            target=target,
            limit=bound(ctx, "gpu_uncorrected_errors_count", target, upper="max_uncorrected_count"),
            reason="EccErrors",
            subject=f"uncorrectable memory errors {since}:",
        )
        life = _shown("gpu_uncorrected_errors_life_count", said.aggregate_uncorrected)
        yield Finding(
            status=finding.status,
            reason=finding.reason,
            message=finding.message,
            target=target,
            measurements=(*finding.measurements, *life, *_shown("gpu_remapped_rows_count", said.remapped_rows)),
        )
    elif said.failed:
        return
    elif not ctx.params.required:
        yield make_finding(Status.SKIP, "NotApplicable", "reports no memory errors, and is not required to", target)
    elif said.ecc_enabled is False:
        text = (
            "ECC is off, so memory errors go unnoticed; turn it on (nvidia-smi -e 1, then reset the GPU), or set "
            "required"
        )
        yield make_finding(Status.WARN, "NoData", text, target)
    elif said.ecc_enabled is None and said.remap_pending is None and said.retired_pages is None:
        yield make_finding(Status.SKIP, "NotApplicable", "this kind of GPU has no ECC", target)
    else:
        yield make_finding(Status.UNKNOWN, "NoData", "has ECC but reports no error counts", target)


def _repairs(target: str, said: Memory) -> Iterator[Finding]:
    if said.remap_failed:
        text = "a memory row could not be remapped because the spare rows are used up"
        yield make_finding(Status.FAIL, "EccErrors", text, target, Action.REPLACE)
    elif said.remap_pending or said.retire_pending:
        what = "rows to remap" if said.remap_pending else "pages to retire"
        text = f"memory has {what} at the next reset of the GPU; until then a bad location may be used"
        yield make_finding(Status.FAIL, "EccErrors", text, target, Action.RESET_DEVICE)


def _pages(ctx: Context[Params], target: str, said: Memory) -> Iterator[Finding]:
    if said.retired_pages is None:
        return  # GPUs since Ampere remap rows instead
    finding = within(
        float(said.retired_pages),
        name="gpu_retired_pages_count",
        target=target,
        limit=bound(ctx, "gpu_retired_pages_count", target, upper="max_retired_pages_count"),
        reason="EccErrors",
        subject="pages of memory retired:",
        action=Action.REPLACE,
    )
    yield finding


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(name: str, value: int | None) -> tuple[Measurement, ...]:
    """A number that nobody judges, where it is known."""
    if value is None:
        return ()
    return (Measurement(name=name, value=float(value), lower=None, upper=None, origin="none"),)
