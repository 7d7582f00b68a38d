"""Frozen records of what NVML reports about a GPU, and the conversion of its values. `checks.host.nvml` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Errors of the memory."""

    ecc_enabled: bool | None
    """None where the GPU does not report it; so are the other numbers."""
    volatile_uncorrected: int | None
    """Uncorrected ECC errors since the last reset."""
    aggregate_uncorrected: int | None
    """Uncorrected ECC errors over the life of the GPU."""
    remapped_rows: int | None
    """Rows that were remapped, for correctable and uncorrectable errors."""
    remap_pending: bool | None
    """A row is remapped at the next reset."""
    remap_failed: bool | None
    """A remapping has failed."""
    retired_pages: int | None
    """Pages that were retired, on GPUs without row remapping."""
    retire_pending: bool | None
    """A page is retired at the next reset."""
    failed: tuple[str, ...]
    """Calls that failed, each with its error."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Why clocks are what they are (a bit mask, nvmlClocksEventReasons) and how hot the GPU is, in degrees Celsius."""

    reasons: int | None
    temperature: int | None
    slowdown_temperature: int | None
    failed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The state of PCIe, NVLink and the NVSwitch fabric."""

    pcie_width: int | None
    """Lanes in use; None where the GPU does not report it; so are the other numbers."""
    pcie_width_max: int | None
    """The most lanes that the GPU and its slot support."""
    pcie_generation: int | None
    """The present generation; an idle GPU lowers it to save power."""
    pcie_generation_max: int | None
    """The highest generation that the GPU and its slot support."""
    pcie_replays: int | None
    """Replays, as the driver counts them."""
    busy_ratio: float | None
    """Which part of the last moment the GPU worked."""
    nvlink_active: Mapping[int, bool]
    """Whether each link is active, by its number."""
    nvlink_errors: Mapping[str, int]
    """Errors of each active link since the driver was loaded, by kind and link: `replay/3`."""
    fabric_state: int | None
    """0 (no fabric), 1 (not started), 2 (in progress) or 3 (completed)."""
    fabric_status: int | None
    """The result of joining the fabric, an nvmlReturn_t."""
    failed: tuple[str, ...]
    """Calls that failed, each with its error."""


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
