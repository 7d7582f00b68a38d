"""
Judging a number: text, number and status from one call, so that they cannot disagree.

Not finite or absent is never a pass.

Also here:

- which measurements can have a limit in the settings;
- floors: what a device of a known instance type reaches unless something is grossly wrong;
- which learned limits are meant for this machine: those of its hardware and of the versions that are at work here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checks.contract import NO_LIMIT, Action, Blame, Finding, Limit, Measurement, Status

_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = (
    ("_flops_per_second", "FLOP/s"),
    ("_bytes_per_second", "B/s"),
    ("_bytes", "B"),
    ("_seconds", "s"),
    ("_ratio", ""),
    ("_count", ""),
)

_COLLECTIVES = ("all_gather", "all_reduce", "data_parallel_step", "reduce_scatter")
_OF_COLLECTIVES = ("algbw_bytes_per_second", "busbw_bytes_per_second", "duration_seconds")
_EFA_RATES = (
    "impaired_remote_conn_events",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "retrans_bytes",
    "retrans_pkts",
    "retrans_timeout_events",
    "rx_drops",
    "unresponsive_remote_events",
)

FLOOR = "floor"
FLOOR_RATIO = 0.5
# Scaled formats reach their peak in large products only; a card of 72 W does not hold its peak.
_WITHOUT_FLOOR = frozenset({"fp8", "mxfp8", "int8", "L4"})

ORIGIN = "baseline"


def within(
    value: float | None,
    *,
    name: str,
    target: str,
    limit: Limit = NO_LIMIT,
    reason: str,
    subject: str,
    outside: Status = Status.FAIL,
    labels: Mapping[str, str] | None = None,
    blame: Blame | None = None,
    action: Action | None = None,
) -> Finding:
    """
    Judge one number against its limit.

    `subject` begins the message ("free memory"); `reason` and `outside` are used when the value is out of its limit.
    A value that is not finite fails with `reason`; None, or a limit that is no number, is unknown (`NoData`). Without a
    limit the number is shown unjudged and passes: it was measured, and its correctness is judged elsewhere. A value
    below a floor (see `floors`) is a warning, whatever `outside` says.
    """
    measured = Measurement(
        name=name, value=value, lower=limit.lower, upper=limit.upper, origin=limit.origin, labels=dict(labels or {})
    )
    status, why, text = Status.PASS, None, f"{subject} {quantity(name, value)}"
    if value is None:
        status, why, text = Status.UNKNOWN, "NoData", f"{subject}: no reading"
    elif not math.isfinite(value):
        status, why, text = Status.FAIL, reason, f"{subject} is {value}, which is not a valid number"
    elif any(bound is not None and math.isnan(bound) for bound in (limit.lower, limit.upper)):
        status, why = Status.UNKNOWN, "NoData"
        text += f": its limit from {limit.origin} is not a number; correct it"
    elif limit.lower is not None and value < limit.lower:
        status, why = Status.WARN if limit.origin == FLOOR else outside, reason
        text += f" is below {quantity(name, limit.lower)} ({_source(limit)})"
    elif limit.upper is not None and value > limit.upper:
        status, why = outside, reason
        text += f" is above {quantity(name, limit.upper)} ({_source(limit)})"
    # A value that is not finite has no place in JSON; the message keeps it.
    if value is not None and not math.isfinite(value):
        measured = Measurement(
            name=name, value=None, lower=limit.lower, upper=limit.upper, origin=limit.origin, labels=dict(labels or {})
        )
    return Finding(
        status=status,
        reason=why,
        message=text,
        target=target,
        measurements=(measured,),
        blame=blame if why else None,
        action=action if why else None,
    )


def limited_names() -> frozenset[str]:
    """
    The names, without label and target, by which the checks that come with healthd ask for a limit.

    `nodes_` and `nccom_nodes_` begin those of collectives between nodes.
    """
    with_nccom = [f"nccom_{name}" for name in _COLLECTIVES if name != "data_parallel_step"]
    inside = [*_COLLECTIVES, *with_nccom]
    between = [f"nodes_{name}" for name in _COLLECTIVES]
    between += [name.replace("nccom_", "nccom_nodes_") for name in with_nccom]
    return frozenset(
        [
            *(f"{name}_{quantity}" for name in (*inside, *between) for quantity in _OF_COLLECTIVES),
            *(f"efa_{counter}_per_second" for counter in _EFA_RATES),
            "checkpoint_available_bytes",
            "checkpoint_load_bytes_per_second",
            "checkpoint_peers_count",
            "checkpoint_read_bytes_per_second",
            "checkpoint_rename_seconds",
            "checkpoint_size_bytes",
            "checkpoint_write_bytes_per_second",
            "clock_offset_seconds",
            "data_parallel_step_own_seconds",
            "data_random_bytes_per_second",
            "data_random_read_seconds",
            "data_sequential_bytes_per_second",
            "disk_available_bytes",
            "disk_available_inodes_ratio",
            "gpu_nvlink_crc_errors_per_second",
            "gpu_nvlink_retries_count",
            "gpu_pcie_replays_per_second",
            "gpu_retired_pages_count",
            "gpu_stuck_bytes",
            "gpu_temperature_celsius",
            "gpu_uncorrected_errors_count",
            "job_step_seconds",
            "load_per_core_ratio",
            "matmul_flops_per_second",
            "memlock_limit_bytes",
            "memory_available_ratio",
            "memory_bandwidth_bytes_per_second",
            "neuron_corrected_errors_per_hour_count",
            "neuron_hardware_errors_count",
            "neuron_repairable_errors_count",
            "neuron_suspect_errors_count",
            "neuron_uncorrected_errors_count",
            "nodes_data_parallel_step_own_seconds",
            "open_files_limit_count",
            "processes_stuck_count",
            "processes_zombie_count",
            "shared_memory_available_ratio",
            "shared_memory_size_bytes",
            "store_answer_seconds",
            "store_available_bytes",
            "store_available_inodes_ratio",
            "swap_used_ratio",
            "train_step_flops_per_second",
            "train_step_loss_error_ratio",
            "train_step_seconds",
            "train_step_steps_per_second",
            "train_step_tokens_per_second",
            "transfer_bytes_per_second",
        ]
    )


def quantity(name: str, value: float | None) -> str:
    """A value for people, in decimal prefixes: `12.3 GB/s`, `1.5 ms`, `87 %`, `none`."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return str(value)
    if name.endswith("_ratio"):
        return f"{100 * value:.4g} %"
    text = unit(name)
    if text == "s":
        for scale, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "u")):
            if abs(value) >= scale or scale == 1e-6 or value == 0:
                return f"{value / scale:.4g} {prefix}s"
    if text:
        for scale, prefix in _DECIMAL:
            if abs(value) >= scale:
                return f"{value / scale:.3g} {prefix}{text}"
    return f"{value:.6g} {text}".rstrip()


def unit(name: str) -> str:
    """The unit that a measurement's name ends in, as people write it; empty for counts and ratios."""
    return next((text for suffix, text in _UNITS if name.endswith(suffix)), "")


def floors(instance_type: str | None, inventory: Mapping[str, Any]) -> dict[str, Limit]:
    """
    The least speeds of one target (a GPU, a logical NeuronCore) on this instance type; empty where none is published.

    Half of the vendor's peak. A value below it is a warning: the figure is published, not learned from this fleet, so
    it finds gross faults only. Limits from the settings and learned limits replace it.

    Source: the peaks of `checks.catalog`, from AWS's Neuron documentation and NVIDIA's data sheets. Healthy devices
    reach more than half: trn1 78.6 of 95 TFLOP/s a core in bf16 and 62 % of its memory bandwidth (a third party's
    measurement). Not yet compared with a run of healthd on these devices.
    """
    from checks.catalog import find_type

    known = find_type(instance_type)
    if known is None or known.chip.accelerator != inventory.get("accelerator"):
        return {}
    chip = known.chip
    # The smallest target that there may be, where the host does not say.
    targets = 1 if chip.cores is None else chip.cores // (inventory.get("lnc") or min(chip.lnc))
    peaks = {
        f"matmul_flops_per_second/{dtype}": peak
        for dtype, peak in chip.flops_per_second.items()
        if dtype not in _WITHOUT_FLOOR and chip.name not in _WITHOUT_FLOOR
    }
    if chip.memory_bytes_per_second is not None:
        peaks["memory_bandwidth_bytes_per_second"] = chip.memory_bytes_per_second
    return {name: Limit(lower=FLOOR_RATIO * peak / targets, upper=None, origin=FLOOR) for name, peak in peaks.items()}


def has_floors(device_key: str) -> bool:
    """Whether floors apply to the device of this key (`Device.key`): a part of a GPU (MIG) may have any size."""
    return " MIG " not in device_key


def replaces(configured: str, other: str) -> bool:
    """
    Whether a configured limit replaces a floor or a learned limit of this name.

    It does if both are for the same measurement, unless they are for different labels. A configured
    `matmul_flops_per_second` therefore replaces a floor for `matmul_flops_per_second/bf16`.
    """
    name, _, label = configured.partition("@")[0].partition("/")
    plain, _, other_label = other.partition("/")
    return name == plain and label in ("", other_label)


def hardware_in(instance_type: str | None, inventory: Mapping[str, Any]) -> str | None:
    """The same, of an inventory as accelerators give it."""
    devices = [device for device in inventory.get("devices") or () if isinstance(device, Mapping)]
    return hardware_of(
        instance_type,
        [str(device.get("kind")) for device in devices],
        len(inventory.get("workers") or devices),
    )


def hardware_of(instance_type: str | None, kinds: Sequence[str], ranks: int) -> str | None:
    """
    The hardware in one word: instance type, else kind of device, and how many ranks it is split into.

    The split counts because a core of two has other rates than one of eight. None where nothing is known, or where
    devices of several kinds are in one machine whose type is not known.
    """
    kind = instance_type or (next(iter(set(kinds))) if len(set(kinds)) == 1 else None)
    return f"{kind} x{ranks}" if kind and ranks > 0 else None


def choose(
    sets: Iterable[Mapping[str, Any]], *, hardware: str | None, accelerator: str | None, versions: Mapping[str, str]
) -> dict[str, Limit]:
    """The limits of the one set that fits (see the module); empty where none does, or more than one."""
    fitting = [
        one
        for one in sets
        if hardware is not None
        and one["hardware"] == hardware
        and one["accelerator"] == accelerator
        and all(versions.get(name, version) == version for name, version in one["versions"].items())
    ]
    if len(fitting) != 1:
        return {}
    return {
        str(name): Limit(lower=bounds["lower"], upper=bounds["upper"], origin=ORIGIN)
        for name, bounds in fitting[0]["limits"].items()
    }


def _source(limit: Limit) -> str:
    return f"{100 * FLOOR_RATIO:g} % of the published peak" if limit.origin == FLOOR else f"limit from {limit.origin}"
