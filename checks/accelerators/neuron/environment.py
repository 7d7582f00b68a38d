"""
The environment of a worker on one NeuronCore: what pins it, what of a job's must go, and where programs are cached.

Pure. Each of the two ways from PyTorch to a core has variables of its own. Native TorchNeuron gives `NEURON_CC_FLAGS`
as they are to `neuronx-cc compile`, which refuses a flag that it does not know, and takes its caches from
`TORCH_NEURONX_*`, some of them when it is imported. torch-neuronx for PyTorch/XLA takes flags of its own out of
`NEURON_CC_FLAGS` (`--cache_dir`, `--retry_failed_compilation`) before it calls the compiler, each time that it does.
So `environment_of` is what both understand, before torch is imported, and `xla_environment` comes once it is known
that the way is PyTorch/XLA.

Source: TorchNeuron environment variables and PyTorch NeuronX environment variables, in the AWS Neuron documentation.
Unverified on hardware.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks.accelerators import DeviceMissingError

# The first keeps compilation short; the second keeps fp32 fp32, which the bound of `matmul` supposes.
COMPILE_FLAGS = ("--optlevel=1", "--auto-cast=none")

# What a job may have set that changes results, shapes, caches or who takes which core. By prefix: whole families.
_DROPPED_PREFIXES = (
    "NEURON_PJRT_",
    "NEURON_RT_DBG_",
    "NEURON_RT_INSPECT_",
    "NEURON_RT_STOCHASTIC_",
    "PJRT_LOCAL_",
    "TORCH_NEURONX_",  # of native TorchNeuron: where programs are kept, what is fused, dumped or done by the host
    "NKI_",  # the same of its kernels
)
_DROPPED = (
    "NEURON_RT_NUM_CORES",  # VISIBLE_CORES beats it, but some frameworks read it first
    "NEURONCORE_GROUP_SIZES",
    "NEURONCORE_NUM_DEVICES",
    "NEURON_RT_ROOT_COMM_ID",
    "NEURON_RT_EXEC_TIMEOUT",  # a job that compiles may wait for hours in one execution
    "NEURON_RT_MULTI_INSTANCE_INFERENCE",
    "NEURON_COMPILER_OPT_LEVEL",  # of native TorchNeuron, beside the flags
    "NEURON_FAIL_ON_NAN",  # a sticky flag of the hardware: what a job did would fail the probe
    "NEURON_EXTRACT_GRAPHS_ONLY",  # executes nothing and returns zeros
    "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU",  # the probe would test the host
    "NEURON_ENABLE_INT_MATMUL_DOWNCAST",
    "NEURON_FRAMEWORK_DEBUG",
    "NEURON_DUMP_HLO_SNAPSHOT",
    "NEURON_PARALLEL_COMPILE_MAX_RETRIES",
    "NEURON_LIBRARY_PATH",
    "NEURON_COMPILE_CACHE_URL",  # the job's own cache, perhaps on a network: what we compile has no place there
    "XLA_FLAGS",
    "XLA_IR_DEBUG",
    "XLA_HLO_DEBUG",
    "XLA_USE_SPMD",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_FP16",
    "XLA_DOWNCAST_FP16",
    "XLA_USE_32BIT_LONG",
    "XLA_PERSISTENT_CACHE_PATH",
)


def flags_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of the compiler: `compile_flags` of the options, else COMPILE_FLAGS."""
    given = options.get("compile_flags")
    return COMPILE_FLAGS if given is None else tuple(str(flag) for flag in given)


def lnc_of(inventory: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Physical cores of a logical one: `neuron_lnc` of the options, else what the inventory says."""
    configured = options.get("neuron_lnc")
    found = inventory.get("lnc") if configured is None else configured
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def environment_of(
    target: str, inventory: Mapping[str, Any], options: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, str | None]:
    """
    What the environment must be before torch is imported: name -> value, None to drop it.

    Options: `compile_flags`, `neuron_lnc`, `compile_folder` (the private cache; without it the compiler's own default)
    and `group` (this process becomes a rank: `size` ranks of all nodes, `targets` of this node, `first_rank` of the
    first of them, by default 0, and `root_comm`, where rank 0 waits). Raises DeviceMissingError for a core that is not
    there.
    """
    core = _core_of(target, inventory)
    changes: dict[str, str | None] = {
        name: None for name in environ if name in _DROPPED or name.startswith(_DROPPED_PREFIXES)
    }
    changes.update(
        {
            "NEURON_RT_VISIBLE_CORES": str(core),
            "PJRT_DEVICE": "NEURON",
            # Where the runtime's words are heard, and from which level on.
            "NEURON_RT_LOG_LOCATION": "console",
            "NEURON_RT_LOG_LEVEL": "ERROR",
            # What fails on the device must fail, not move to the host.
            "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
            "PATH": _path(environ.get("PATH", "")),
        }
    )
    lnc = lnc_of(inventory, options)
    if lnc is not None:
        changes["NEURON_LOGICAL_NC_CONFIG"] = changes["NEURON_RT_VIRTUAL_CORE_SIZE"] = str(lnc)
    changes["NEURON_CC_FLAGS"] = " ".join(flags_of(options))
    folder = options.get("compile_folder")
    if folder is not None:
        changes["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(Path(str(folder), "neff"))
        changes["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"] = str(Path(str(folder), "neff-local"))
        changes["TORCH_NEURONX_HLO_CACHE_DIR"] = str(Path(str(folder), "hlo"))
    group = options.get("group")
    if group:
        changes.update(_rank_environment(target, group))
    return changes


def xla_environment(options: Mapping[str, Any]) -> dict[str, str]:
    """
    What PyTorch/XLA needs besides, before it opens its device.

    Options: `compile_flags`, `compile_folder`, and `retry_failed` (compile again what failed).
    """
    flags = list(flags_of(options))
    changes = {}
    folder = options.get("compile_folder")
    if folder is not None:
        place = str(Path(str(folder), "neuron"))
        flags.append(f"--cache_dir={place}")
        changes["NEURON_COMPILE_CACHE_URL"] = place
    if options.get("retry_failed"):
        flags.append("--retry_failed_compilation")
    return {**changes, "NEURON_CC_FLAGS": " ".join(flags)}


def _rank_environment(target: str, group: Mapping[str, Any]) -> dict[str, str | None]:
    """
    What makes the process a rank: PJRT's client opens the whole group, so it must know before torch_xla is imported.

    The variables without LOCAL count over all nodes of the group, those with it over this one; both bindings read them.
    """
    targets = [str(item) for item in group["targets"]]
    local = targets.index(target)
    rank, size, root = int(group.get("first_rank", 0)) + local, int(group["size"]), str(group["root_comm"])
    address, _, port = root.rpartition(":")
    changes: dict[str, str | None] = {
        "NEURON_RT_ROOT_COMM_ID": root,
        "NEURON_PJRT_PROCESS_INDEX": str(rank),
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": ",".join(["1"] * size),
        "PJRT_LOCAL_PROCESS_RANK": str(local),
        "PJRT_LOCAL_PROCESS_COUNT": str(len(targets)),
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(len(targets)),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
    }
    return changes


def _core_of(target: str, inventory: Mapping[str, Any]) -> int:
    """The number of the core as NEURON_RT_VISIBLE_CORES counts. Raises DeviceMissingError."""
    workers = [str(item) for item in inventory.get("workers") or ()]
    kind, _, number = target.partition(":")
    if target not in workers or kind != "neuroncore" or not number.isdecimal():
        shown = f"{', '.join(workers[:8])}{' and others' if len(workers) > 8 else ''}" or "none"
        raise DeviceMissingError(f"no such core: {target}; this node has {shown}")
    return int(number)


def _path(path: str) -> str:
    """The compiler is a program beside the interpreter, and torch_xla looks for it by PATH."""
    folders = [os.path.dirname(sys.executable), *path.split(os.pathsep), "/opt/aws/neuron/bin"]
    return os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
