"""Frozen records of what NVML reports about a GPU, and the conversion of its values. `checks.host.nvml` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Errors of memory. Counts since the last reset (volatile) and of the GPU's life (aggregate)."""

    ecc_enabled: bool | None
    volatile_uncorrected: int | None
    aggregate_uncorrected: int | None
    remapped_rows: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    retired_pages: int | None
    retire_pending: bool | None
    failed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Why clocks are what they are (a bit mask, nvmlClocksEventReasons) and how hot the GPU is, in degrees Celsius."""

    reasons: int | None
    temperature: int | None
    slowdown_temperature: int | None
    failed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Links:
    """
    PCIe, and NVLink by number of the link: whether it is active, and counts of errors since the driver was loaded.

    `busy_ratio` is how much of the last moment the GPU worked: an idle one lowers its PCIe generation to save power.
    `fabric_state` is 0 (no fabric), 1 (not started), 2 (in progress) or 3 (completed), then with `fabric_status`.
    """

    pcie_width: int | None
    pcie_width_max: int | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_replays: int | None
    busy_ratio: float | None
    nvlink_active: Mapping[int, bool]
    nvlink_errors: Mapping[str, int]
    fabric_state: int | None
    fabric_status: int | None
    failed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The driver's, the library's, and the newest CUDA that the driver can (`12.4`)."""

    driver: str | None
    nvml: str | None
    cuda: str | None
    failed: tuple[str, ...]


def whole(value: object) -> int | None:
    """A count; None for what is none. All ones is how NVML says "not available"."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        return None
    return value


def flag(value: object) -> bool | None:
    """Of 0 and 1; None for anything else."""
    return None if (number := whole(value)) is None or number > 1 else bool(number)


def text(value: object) -> str | None:
    """What is no text is None. The module gives bytes in old releases."""
    said = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return (said.strip() or None) if isinstance(said, str) else None


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
