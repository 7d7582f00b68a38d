"""
What the runner is asked and what it needs to know: frozen records, nothing that does anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from checks.accelerators import compiles
from checks.contract import Limit, Scope, Tier
from healthd.core.model import CheckResult, Inventory, LearnedLimits
from healthd.runner.collective.shown_times import FLOOR_SECONDS

BETWEEN_NODES = "nodes_"
"""How the name of a limit begins that judges collectives between nodes: `nodes_all_reduce_busbw_bytes_per_second`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run: names of enabled checks, lightest tier first. `tier` is recorded in the results."""

    tier: Tier
    checks: tuple[str, ...]
    executor: str
    order: str | None = None
    timeout_seconds: float | None = None
    """Of the whole run: what has not ended then is unknown (`Timeout`). None leaves it to the checks' own limits."""
    warm: bool = False
    """Only to compile: device checks run on the first device alone, and what is not compiled yet is compiled."""
    taken: str | None = None
    """Why the devices are a job's although nobody holds them yet, as the host's scheduler says; refuses all that would
    use them. None: nobody says so."""
    localize: bool = False
    """Where a collective fails and no rank shows itself, let smaller groups of ranks tell who it is; from the deep tier
    on that is done anyway."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the standard-library child says of the machine before anything runs. Ids are None where unknown."""

    inventory: Inventory
    boot_id: str | None
    instance_id: str | None
    instance_type: str | None
    versions: Mapping[str, str]
    holders: tuple[str, ...] | None  # who holds devices ("pid 123 (python)"); None: cannot be seen
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckInfo:
    """
    A check that could be enabled. `judged` says that it compares devices; `origin` is built-in or where it came from.
    """

    name: str
    tier: Tier
    scope: Scope
    interval_seconds: float
    timeout_seconds: float
    judged: bool
    doc: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """A sign of progress for people. `event` is started, ended or step; `text` the step or how it ended."""

    check: str
    target: str
    event: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """A program that is a check. `protocol` is monitoring (monitoring plug-ins) or npd (node-problem-detector)."""

    name: str
    argv: tuple[str, ...]
    protocol: str = "monitoring"
    tier: Tier = Tier.PASSIVE
    interval_seconds: float = 60.0
    timeout_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """How checks are run here."""

    probe_python: Path | None = None
    """The interpreter of all checks: that of the environment with torch or torch-neuronx. None: the service's own."""
    host_root: Path | None = None
    """The machine as data, for tests. None: this machine."""
    accelerator: str = "auto"
    """cpu, cuda, xla, neuron, or auto: the most special one that is present."""
    run_dir: Path | None = None
    """Where lock files and the files of CPU devices are. None: no lock, and nobody holds a CPU device."""
    heed_leases: bool = True
    """Run nothing active while a node daemon says in `run_dir` that a job has the node. False for that daemon itself,
    which knows better."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the accelerator (`cpu_devices`)."""
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of checks, by name."""
    timeouts_seconds: Mapping[str, float] = field(default_factory=dict)
    """Of checks, by name, where the check's own is not right here."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """By measurement: `name` or `name@target`."""
    learned: tuple[LearnedLimits, ...] = ()
    """Approved baselines of any machines: the worker takes those meant for where it is. `limits` beat them."""
    third_party: tuple[str, ...] = ()
    """Names of checks by entry point in the interpreter of the checks."""
    directories: tuple[Path, ...] = ()
    """Where an operator's own check files are; every *.py in them that does not begin with an underscore."""
    programs: tuple[ProgramSpec, ...] = ()
    """Programs that speak a plug-in protocol."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the workers."""
    max_workers_at_once: int = field(default_factory=lambda: max(2, (os.cpu_count() or 2) // 2))
    """Device workers at a time, each with torch in it; half of the processors, because importing torch is work for
    them. The ranks of a collective always run together."""
    start_timeout_seconds: float = 60.0
    """From the start of a worker to its ready: importing torch from a cold network file system takes long."""
    times_file: Path | None = None
    """Where it is kept how long collectives took here (see `shown_times`). None: their own time limits hold alone."""
    silence_floor_seconds: float = FLOOR_SECONDS
    """The least time without a sign of life after which a collective that has run before hangs."""
    compile_cache: Path | None = None
    """Where compiled graphs of the probes are kept, for accelerators that compile. None: whatever their compiler does,
    and nothing is ever cold."""
    on_cold_cache: Literal["unknown", "compile"] = "unknown"
    """What a quick run does where graphs are not compiled: say so at once, or compile. Deep runs always compile."""
    compile_timeout_seconds: float = 1200.0
    """For compiling all graphs of a run on one device: a small one takes a minute."""
    survey_timeout_seconds: float = 10.0
    """For finding devices and their holders."""
    judge_timeout_seconds: float = 10.0
    """For comparing what devices measured: pure arithmetic."""
    kill_grace_seconds: float = 3.0
    """How long a killed worker may take to vanish (a large memory takes its time) before it counts as stuck."""
    peer_grace_seconds: float = 1.0
    """How long the other ranks may go on once a rank has ended badly: time to say what they saw."""
    search_seconds: float = 120.0
    """For groups of ranks that tell who is at fault in a collective: ten rounds, and a start of ranks that hung."""
    lock_wait_seconds: float = 10.0
    """How long to wait for another healthd that runs active checks on the same devices."""
    retries: int = 1
    """Of transient causes: a worker that did not start or died, a device that was busy. Never of a wrong result."""
    retry_backoff_seconds: float = 0.25
    """Before the first retry; doubled for each further one."""

    def compile_allowance_seconds(self, accelerator: str | None) -> float:
        """
        How much longer an ordered run may take on such devices, since what is cold is compiled in the middle of it.
        """
        may = self.compile_cache is not None and self.on_cold_cache == "compile" and compiles(accelerator)
        return self.compile_timeout_seconds if may else 0.0

    def between_nodes(self) -> RunnerSettings:
        """
        The same for ranks of several nodes.

        What holds inside a node is no measure of the network between nodes, so that has limits of its own name.
        """
        own = {
            name.removeprefix(BETWEEN_NODES): limit
            for name, limit in self.limits.items()
            if name.startswith(BETWEEN_NODES)
        }
        return replace(self, learned=(), limits=own)


OnResult = Callable[[CheckResult], None]
OnProgress = Callable[[RunProgress], None]
Limits = Mapping[str, Limit]
