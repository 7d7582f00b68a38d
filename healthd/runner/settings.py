"""The settings of the runner and the records that it is asked with: frozen, without behaviour."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from checks.accelerators import compiles
from checks.contract import Limit, Profile, Program, Tier
from healthd.core.model import CheckResult, Inventory

BETWEEN_NODES = "nodes_"
"""Prefix of the limits that judge collectives between nodes: `nodes_all_reduce_busbw_bytes_per_second`."""
SILENCE_FLOOR_SECONDS = 8.0
"""Silences are milliseconds on a quiet machine; stalls of a virtual machine and of swapping reach seconds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run."""

    tier: Tier
    """Recorded in the results."""
    checks: tuple[str, ...]
    """Names of enabled checks, lightest tier first."""
    executor: str
    """Who runs the checks; recorded in the results."""
    order: str | None = None
    """Id of the order that asked for the run; None without one."""
    timeout_seconds: float | None = None
    """Time limit of the whole run: what has not ended then is unknown (`Timeout`). None: the checks' own limits."""
    warm: bool = False
    """Only compile: device checks run on the first device alone, and what is not compiled yet is compiled."""
    allocated: str | None = None
    """Why the devices belong to a job although no process holds them yet, as the host's scheduler says; everything that
    would use them is refused. None: no scheduler says so."""
    localize: bool = False
    """Where a collective fails and names no rank, find the rank at fault by smaller groups; from the deep tier on that
    is always done."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the node's worker finds on the machine before anything runs."""

    inventory: Inventory
    """The devices of the machine."""
    boot_id: str | None
    """None where it is unknown; so are the other ids."""
    instance_id: str | None
    """None where it is unknown."""
    instance_type: str | None
    """None where it is unknown."""
    versions: Mapping[str, str]
    """Versions of drivers and libraries, by name."""
    holders: tuple[str, ...] | None
    """The processes that hold devices, as `pid 123 (python)`. None: they cannot be seen, and count as there."""
    looked_at: float = field(compare=False)
    """When the look began (CLOCK_BOOTTIME), however much later it is known what it saw."""
    failed: str = ""
    """Why the machine could not be looked at; empty where it was."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The whole answer of the worker."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """A sign of progress for users. `event` is started, ended or step; `text` the step or how it ended."""

    check: str
    target: str
    event: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Limits for machines of one kind alone, by its hardware and the versions of its libraries (`checks.limits`)."""

    hardware: str
    accelerator: str
    versions: Mapping[str, str]
    limits: Mapping[str, Limit]


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """How checks are run here."""

    probe_python: Path | None = None
    """The interpreter of all checks: that of the environment with torch or torch-neuronx. None: the interpreter of
    healthd itself."""
    host_root: Path | None = None
    """The machine as data, for tests. None: this machine."""
    accelerator: str = "auto"
    """cpu, cuda, xla, neuron, or auto: the most specific one that is present."""
    run_dir: Path | None = None
    """Directory of the lock files and the files of CPU devices. None: no lock, and no process holds a CPU device."""
    heed_leases: bool = True
    """Run nothing active while a node daemon says in `run_dir` that a job has the node. False for that daemon itself,
    which knows better."""
    past: str | None = None
    """The gate of a job that has died, whose lease is not heeded: its own `healthd run` checks the devices."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the accelerator (`cpu_devices`)."""
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters of checks, by name."""
    timeouts_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time limits of checks, by name, where the check's own does not fit."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Limits by measurement: `name` or `name@target`."""
    baselines: tuple[Baseline, ...] = ()
    """Limits of kinds of machines: the worker uses those meant for its machine. `limits` override them."""
    floors: bool = True
    """Whether speeds below half of the instance type's published peak are warnings (`checks.limits.floors`)."""
    third_party: tuple[str, ...] = ()
    """Names of checks by entry point in the interpreter of the checks."""
    directories: tuple[Path, ...] = ()
    """Directories with an operator's own check files: every *.py that does not begin with an underscore."""
    programs: Mapping[str, Program] = field(default_factory=dict)
    """Programs that speak a plug-in protocol."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment of the workers."""
    max_workers_at_once: int = field(default_factory=lambda: max(2, (os.cpu_count() or 2) // 2))
    """Device workers at a time; half of the processors, because each imports torch where it cannot be forked. The ranks
    of a collective always run together."""
    preload: bool = False
    """Whether a daemon keeps the process that forks the workers of devices while the node is free."""
    start_timeout_seconds: float = 60.0
    """From the start of a worker to its ready: importing torch from a cold network file system takes long."""
    times_file: Path | None = None
    """File with the longest silences of collectives on this machine (see `silence_limits`). None: only the time limits
    of the checks hold."""
    silence_floor_seconds: float = SILENCE_FLOOR_SECONDS
    """The shortest time without a report after which a collective that has run before counts as hung."""
    compile_cache: Path | None = None
    """Directory of the compiled graphs of the probes, for accelerators that compile. None: the compiler decides, and
    nothing is ever cold."""
    on_cold_cache: Literal["unknown", "compile"] = "unknown"
    """What a quick run does where graphs are not compiled: report unknown at once, or compile. Deep runs always
    compile."""
    compile_timeout_seconds: float = 1200.0
    """Time limit for compiling all graphs of a run on one device: a small one takes a minute."""
    survey_timeout_seconds: float = 10.0
    """Time limit for finding devices and their holders."""
    judge_timeout_seconds: float = 10.0
    """Time limit for comparing what devices measured: pure arithmetic."""
    kill_grace_seconds: float = 3.0
    """How long a killed worker may take to vanish (a large memory takes its time) before it counts as stuck."""
    peer_grace_seconds: float = 1.0
    """How long the other ranks may go on once a rank has failed: time to report what they saw."""
    search_seconds: float = 120.0
    """Time limit for the search for the rank at fault in a collective: ten rounds, and a start of ranks that hung."""
    lock_wait_seconds: float = 10.0
    """How long to wait for another healthd that runs active checks on the same devices."""
    profile: Literal["off", "slow", "always"] = "slow"
    """What is profiled: nothing, what is slow against its limit, or everything that is timed."""
    retries: int = 1
    """Retries after transient failures: a worker that did not start or died, a device that was busy. Never after a
    wrong result."""
    retry_backoff_seconds: float = 0.25
    """Pause before the first retry; doubled for each further one."""

    def compile_allowance_seconds(self, accelerator: str | None) -> float:
        """
        How much longer an ordered run may take on such devices, since cold graphs are compiled in the middle of it.
        """
        may = self.compile_cache is not None and self.on_cold_cache == "compile" and compiles(accelerator)
        return self.compile_timeout_seconds if may else 0.0

    def between_nodes(self) -> RunnerSettings:
        """
        The settings for ranks of several nodes.

        Limits inside a node do not apply to the network between nodes, which has limits under names of its own.
        """
        own = {
            name.removeprefix(BETWEEN_NODES): limit
            for name, limit in self.limits.items()
            if name.startswith(BETWEEN_NODES)
        }
        return replace(self, baselines=(), limits=own)


OnResult = Callable[[CheckResult], None]
OnProfile = Callable[[Profile], bool]
"""Receives a profile, and says whether it is kept."""
OnProgress = Callable[[RunProgress], None]
Limits = Mapping[str, Limit]
