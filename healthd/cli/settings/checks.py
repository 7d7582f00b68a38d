"""The settings of checks: how they run, by which limits they judge, and which programs are checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from healthd.core.config import nearest

# As many logical devices as the largest machines have cores; beyond it is a slip.
MOST_CPU_DEVICES = 1024
MOST_RETRIES = 10


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """One limit of a measurement, by its name (`matmul_flops_per_second`, or for one device `...@cpu:1`)."""

    lower: float | None = None
    """Least value that passes, in the unit that the name ends in."""

    upper: float | None = None
    """Largest value that passes."""


@dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """Limits for one kind of machine, as `healthd baseline` writes them; limits without a kind override them."""

    hardware: str
    """Instance type, else the kind of device, and how many ranks the machine is split into: `trn1.32xlarge x32`."""

    accelerator: str
    """cpu, cuda, xla or neuron."""

    versions: dict[str, str] = field(default_factory=dict)
    """Versions of libraries and drivers, by name. A machine that is known to have a different version is of another
    kind."""

    limits: dict[str, LimitSettings] = field(default_factory=dict)
    """Limits by measurement, as under `limits`."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How checks are run."""

    accelerator: str = "auto"
    """auto uses what is found; a name requires that kind."""

    python: Path | None = None
    """The interpreter that has torch (3.10 or newer); None is the one that healthd runs with."""

    instance_type: str | None = None
    """The EC2 instance type, if it should not be detected; None: read from the firmware tables, then from the metadata
    service."""

    cpu_devices: int = 2
    """How many logical devices plain CPUs are split into. Two: collectives need two."""

    third_party: tuple[str, ...] = ()
    """Checks to take from entry points (group healthd.checks) of the probe interpreter, by name."""

    directories: tuple[Path, ...] = ()
    """Directories of check files of your own."""

    workers: int | None = None
    """Maximum number of workers started at once; None: half the cores, at least two. Ranks of one group always start
    together."""

    on_cold_cache: Literal["unknown", "compile"] = "unknown"
    """What a quick run does if the probes are not yet compiled for this device (Neuron, XLA). unknown: it reports that
    at once and refers to `healthd warm`; compile: the run waits for the compilation. Deep runs always compile."""

    compile_timeout_seconds: float = 1200.0
    """Time limit for compiling all probes of a run. The smallest takes a minute on Neuron, so twenty minutes."""

    compile_cache: Path | None = None
    """Where compiled probes are kept; None: `compile-cache` in the state directory. Never a job's own cache."""

    compile_flags: tuple[str, ...] | None = None
    """Flags of the Neuron compiler for the probes; None: flags that compile fast and keep fp32 products exact."""

    neuron_lnc: int | None = None
    """Physical cores per logical NeuronCore (1 or 2), as the jobs use them; None: as neuron-ls reports."""

    preload: bool = False
    """Whether the node daemon keeps torch imported while the node is free, so that a gate takes about a second. It
    costs about 165 MB of memory, and the process ends as soon as a job has the node."""

    start_seconds: float = 60.0
    """Time limit for a worker to become ready: importing torch from a cold disk takes long."""

    lock_wait_seconds: float = 60.0
    """How long to wait while another healthd on this host runs active checks."""

    profile: Literal["off", "slow", "always"] = "slow"
    """Which probes are repeated once under a profiler: those that are slow against their limit, all that are timed, or
    none."""

    floors: bool = True
    """Whether a speed below half of the instance type's published peak is a warning. A limit of your own or a learned
    limit replaces the floor of its measurement. If healthy nodes are below a floor, set a limit or turn floors off:
    nothing is learned from a node with warnings."""

    retries: int = 1
    """How often a check that could not run is retried. A wrong result is never retried."""

    def __post_init__(self) -> None:
        if not 1 <= self.cpu_devices <= MOST_CPU_DEVICES:
            raise ValueError(f"cpu_devices must be between 1 and {MOST_CPU_DEVICES}, not {self.cpu_devices}")
        if not 0 <= self.retries <= MOST_RETRIES:
            raise ValueError(f"retries must be between 0 and {MOST_RETRIES}, not {self.retries}")
        if self.compile_timeout_seconds <= 0:
            raise ValueError(f"compile_timeout must be more than 0, not {self.compile_timeout_seconds}")
        if self.neuron_lnc not in (None, 1, 2):
            raise ValueError(f"neuron_lnc must be 1 or 2, not {self.neuron_lnc}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
        if self.accelerator != "auto":
            from checks.accelerators import accelerator_names

            names = accelerator_names()
            if self.accelerator not in names:
                near = nearest(self.accelerator, dict.fromkeys(("auto", *names)))
                raise ValueError(f"no such accelerator: {self.accelerator!r}{near}")
