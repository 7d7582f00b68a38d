"""
What nccom-test is asked to do: which sizes, types and numbers of ranks, and the arguments for one such run. Pure.

Sources: AWS Neuron documentation, nccom-test.rst (arguments), neuron-runtime/explore/intranode-collective-comm.rst (the
algorithms within a node change at 1 MB and at 56 MB). Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.collective.nccom.report import Abilities
from checks.contract import Tier

# Operation of the check -> what nccom-test calls it. By full name: the short forms differ between versions.
OPERATIONS = {
    "nccom_all_gather": "all_gather",
    "nccom_all_reduce": "all_reduce",
    "nccom_reduce_scatter": "reduce_scatter",
}
MAIN_DTYPE = "fp32"
DEEP_DTYPES = ("fp32", "bf16", "fp16")
_WIDEST_BYTES = 4
_QUICK = (1024, 32)  # size to begin with and factor: three sizes, the last of them 1 MiB
_DEEP = (512 * 1024, 16)  # 512 KiB, 8 MiB, 128 MiB: one for each algorithm
_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process of nccom-test: a sweep over `sizes_bytes` (each `factor` times the one before)."""

    op: str
    ranks: int
    dtype: str
    sizes_bytes: tuple[int, ...]
    factor: int
    whole: bool
    """Whether these are all ranks of the node."""


def plan_steps(check: str, tier: Tier, *, ranks: int, counts: Sequence[int]) -> list[Step]:
    """
    The processes of one check: in quick one, of all ranks; in deep one a type, and one for each of `counts` besides.
    """
    op = OPERATIONS[check]
    if tier.rank <= Tier.QUICK.rank:
        return [_step(op, ranks, MAIN_DTYPE, _QUICK, whole=True)]
    whole = [_step(op, ranks, dtype, _DEEP, whole=True) for dtype in DEEP_DTYPES]
    return whole + [_step(op, count, MAIN_DTYPE, _DEEP, whole=False) for count in counts if 1 < count < ranks]


def rank_counts(kind: str | None, ranks: int, cores_per_device: int | None) -> tuple[int, ...]:
    """
    Numbers of ranks that are documented to work, besides all of them.

    2 and 8 on Trainium (documented: 1, 2, 8, 32); on others the cores of one device, where that is known.
    """
    if kind in ("Trainium", "Trainium1"):
        return tuple(count for count in (2, 8) if count < ranks)
    return (cores_per_device,) if cores_per_device is not None and 1 < cores_per_device < ranks else ()


def arguments(step: Step, abilities: Abilities, *, report: str, port: int | None) -> list[str]:
    """
    The arguments of a step, without the program. `port` is where a process of the tool may listen; None: its default.

    The operation comes first: `--check` and `--stats` would take it for their value.
    """
    words = [step.op, "-r", str(step.ranks), "-b", str(step.sizes_bytes[0]), "-e", str(step.sizes_bytes[-1])]
    words += ["-f", str(step.factor), "-d", step.dtype]
    if abilities.knows("--non-interactive"):
        words.append("--non-interactive")
    if abilities.knows("--report-to-json-file"):
        words += ["--report-to-json-file", report]
    if abilities.knows("--stats"):
        words += ["--stats", "avg", "p99"]
    if abilities.knows("--data-collector-port") and port is not None:
        words += ["--data-collector-port", str(port)]
    return words + list(abilities.check)


def environment(
    core_ids: Sequence[int] | None, *, comm_port: int, folder: str, lnc: int | None = None
) -> dict[str, str]:
    """
    What a step on one node needs. `core_ids` are the node's, ascending; None where they are not known. `lnc`: see
    `lnc_environment`.

    HOME is the run's own folder: nccom-test would take hosts from a file `hosts` in it, and writes there.
    """
    found = {"NEURON_RT_ROOT_COMM_ID": f"127.0.0.1:{comm_port}", "HOME": folder, "LC_ALL": "C"}
    found.update(lnc_environment(lnc))
    # By itself the tool takes the cores from 0 on, which may be others' where numbers are left out.
    if core_ids and list(core_ids) != list(range(len(core_ids))):
        found["NEURON_RT_VISIBLE_CORES"] = visible_cores(core_ids)
    return found


def lnc_environment(lnc: int | None) -> dict[str, str]:
    """
    The logical core configuration by which the ranks were counted, under its new and its old name.

    Without it the runtime takes the chip's default, and may have half of the cores that are asked for. None: not known.
    """
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    return {} if lnc is None else dict.fromkeys(names, str(lnc))


def lnc_of(inventory: Mapping[str, Any]) -> int | None:
    """The logical core configuration of the node; None where it is not known."""
    lnc = inventory.get("lnc")
    return lnc if isinstance(lnc, int) and not isinstance(lnc, bool) and lnc > 0 else None


def visible_cores(core_ids: Sequence[int]) -> str:
    """`8-15`, or each by itself where numbers are left out."""
    ids = sorted(set(core_ids))
    if ids == list(range(ids[0], ids[-1] + 1)) and len(ids) > 1:
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids))


def core_ids_of(inventory: Mapping[str, Any]) -> list[int] | None:
    """The ids of all cores, ascending; None where any device does not say its own."""
    ids: list[int] = []
    for device in inventory.get("devices") or ():
        own = device.get("core_ids") if isinstance(device, Mapping) else None
        if not isinstance(own, (list, tuple)) or not own:
            return None
        ids += [one for one in own if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    return sorted(ids) or None


def _step(op: str, ranks: int, dtype: str, sweep: tuple[int, int], *, whole: bool) -> Step:
    """Sizes that every rank gets an equal share of, because it is not documented how nccom-test rounds others."""
    wanted, factor = sweep
    first = ranks * _WIDEST_BYTES
    while first * 2 <= wanted:
        first *= 2
    sizes = tuple(first * factor**index for index in range(_STEPS))
    return Step(op=op, ranks=ranks, dtype=dtype, sizes_bytes=sizes, factor=factor, whole=whole)
