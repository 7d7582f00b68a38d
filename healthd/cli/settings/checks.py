"""The settings of checks on this node: what `healthd check` needs, and every other command has too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checks.contract import Limit, Program
from healthd.core.config import locate, nearest, parse_duration
from healthd.core.errors import ConfigError
from healthd.core.file_trust import check_file, check_folder
from healthd.node.settings import NodeSettings

if TYPE_CHECKING:
    from healthd.runner.settings import Baseline, RunnerSettings


# What one says of checks: how they run, by which limits they judge, and which programs are checks.


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
    """Versions of libraries and drivers, by name. A machine that is known to have another one is of another kind."""

    limits: dict[str, LimitSettings] = field(default_factory=dict)
    """Limits by measurement, as under `limits`."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How checks are run."""

    accelerator: str = "auto"
    """auto takes what is found; a name insists on it."""

    python: Path | None = None
    """The interpreter that has torch (3.10 or newer); None is the one that healthd runs with."""

    instance_type: str | None = None
    """The EC2 instance type, where it must not be looked for; None asks the firmware tables, then the metadata."""

    cpu_devices: int = 2
    """How many logical devices plain CPUs are split into. Two: collectives need two."""

    third_party: tuple[str, ...] = ()
    """Checks to take from entry points (group healthd.checks) of the probe interpreter, by name."""

    directories: tuple[Path, ...] = ()
    """Directories of check files of your own."""

    workers: int | None = None
    """Most workers started at once; None is half the cores, at least two. Ranks of one group always start together."""

    on_cold_cache: Literal["unknown", "compile"] = "unknown"
    """What a quick run does where the probes are not compiled for this device yet (Neuron, XLA). unknown says so at
    once and names `healthd warm`; compile makes the run wait for it. Deep runs always compile."""

    compile_timeout_seconds: float = 1200.0
    """How long compiling all probes of a run may take. The smallest takes a minute on Neuron, so twenty minutes."""

    compile_cache: Path | None = None
    """Where compiled probes are kept; None: `compile-cache` in the state directory. Never a job's own cache."""

    compile_flags: tuple[str, ...] | None = None
    """Flags of the Neuron compiler for the probes; None: those that compile fast and keep fp32 products exact."""

    neuron_lnc: int | None = None
    """Physical cores of one logical NeuronCore (1 or 2), as the jobs have it; None: as neuron-ls says."""

    preload: bool = False
    """Whether the node daemon keeps torch imported while the node is free, so that a gate takes about a second. It
    costs about 165 MB of memory, and the process ends as soon as a job has the node."""

    start_seconds: float = 60.0
    """Within which a worker must be ready: importing torch from a cold disk takes long."""

    lock_wait_seconds: float = 60.0
    """How long to wait while another healthd on this host runs active checks."""

    profile: Literal["off", "slow", "always"] = "slow"
    """What one more repetition under a profiler is done of: what is slow against its limit, everything that is timed,
    or nothing."""

    retries: int = 1
    """How often a check that could not run is tried again. A wrong result is never tried into a pass."""

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
                raise ValueError(f"accelerator {self.accelerator!r} is none of ours{near}")


# The run directory: where it is by default, and whether it may be used; only commands that use it look.


def default_run_dir() -> Path:
    """Root's is the system's; another user's is their own."""
    if os.geteuid() == 0:
        return Path("/run/healthd")
    import tempfile

    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "healthd" if base else Path(tempfile.gettempdir()) / f"healthd-{os.geteuid()}"


def check_run_dir(folder: Path) -> None:
    """ConfigError where it is the default one, of which everybody knows the name, and somebody else has made it."""
    if os.geteuid() == 0 or folder != default_run_dir().absolute():
        return  # in /run root alone makes directories, for whomever
    try:
        status = folder.lstat()
    except OSError:
        return  # who makes it says what is wrong
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{folder}: another user has made it; name a directory of yours with --run-dir")


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """The tables of the file that checks go by."""

    node: NodeSettings
    """The node daemon, and what `healthd check` shares with it."""

    probe: ProbeSettings = field(default_factory=ProbeSettings)
    """How checks are run."""

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters by check, and for any of them `timeout`."""

    limits: dict[str, LimitSettings] = field(default_factory=dict)
    """Limits by measurement."""

    programs: dict[str, Program] = field(default_factory=dict)
    """Programs as checks, by name."""

    baselines: dict[str, BaselineSettings] = field(default_factory=dict)
    """Limits for one kind of machine, by any name."""

    file: Path | None = field(default=None, metadata={"internal": True})
    """The file that was read; no setting itself."""

    def compile_cache(self) -> Path:
        """Where compiled probes are kept."""
        return (self.probe.compile_cache or self.node.state_dir / "compile-cache").absolute()

    def limits_by_name(self) -> Mapping[str, Limit]:
        """The operator's limits as checks see them."""
        return {
            name: Limit(lower=limit.lower, upper=limit.upper, origin="config") for name, limit in self.limits.items()
        }

    def limits_by_kind(self) -> tuple[Baseline, ...]:
        """
        The limits for kinds of machines as checks see them.

        A limit under `limits` on a measurement, in whatever form, silences those of kinds, but for other labels: who
        sets `matmul_flops_per_second` must not be overruled by a `matmul_flops_per_second/bf16` that was learned.
        """
        if not self.baselines:
            return ()
        from checks.limits import ORIGIN
        from healthd.runner.settings import Baseline

        return tuple(
            Baseline(
                hardware=one.hardware,
                accelerator=one.accelerator,
                versions=one.versions,
                limits={
                    name: Limit(lower=limit.lower, upper=limit.upper, origin=ORIGIN)
                    for name, limit in one.limits.items()
                    if not any(_silences(other, name) for other in self.limits)
                },
            )
            for one in self.baselines.values()
        )

    def where(self, *path: str) -> str:
        """Where a key is set, for errors that are found after loading."""
        return locate(self.file, path) if self.file else "configuration"

    def control_socket(self) -> Path:
        """The socket of this host's daemon. ConfigError where another user has made the run directory."""
        check_run_dir(self.node.run_dir)
        return self.node.control_socket

    def runner(self, *, in_job: bool | None = None, in_fleet: bool | None = None) -> RunnerSettings:
        """
        What the runner needs. ConfigError names a check that matches nothing, a parameter it does not have, or a run
        directory that another user has made.

        `in_job`: the devices that can be seen here were given to the job that this process belongs to, so that nobody
        out of sight has them. None: where a scheduler has started this process. `in_fleet`: jobs over several nodes run
        here. None: where aggregators are configured.
        """
        from healthd.node.occupancy.own import inside_a_job
        from healthd.runner.settings import RunnerSettings

        probe = self.probe
        check_run_dir(self.node.run_dir)
        self._check_writers()
        params, timeouts = self._check_params()
        if probe.instance_type is not None:
            for name in ("instance_type", "device_count", "neuron_cores", "neuron_topology"):
                params[name] = {"type": probe.instance_type, **params.get(name, {})}
        if bool(self.node.sync.aggregators) if in_fleet is None else in_fleet:
            params["efa"] = {"required": True, **params.get("efa", {})}
        return RunnerSettings(
            probe_python=probe.python,
            host_root=self.node.host_root,
            accelerator=probe.accelerator,
            run_dir=self.node.run_dir,
            options={
                "cpu_devices": probe.cpu_devices,
                "instance_type": probe.instance_type,
                "compile_flags": probe.compile_flags,
                "neuron_lnc": probe.neuron_lnc,
                "in_job": inside_a_job(os.environ) if in_job is None else in_job,
            },
            params=params,
            timeouts_seconds=timeouts,
            limits=self.limits_by_name(),
            baselines=self.limits_by_kind(),
            third_party=probe.third_party,
            directories=probe.directories,
            programs=self.programs,
            times_file=None if self.node.host_root else self.node.state_dir / "collective-times.json",
            compile_cache=self.compile_cache(),
            on_cold_cache=probe.on_cold_cache,
            compile_timeout_seconds=probe.compile_timeout_seconds,
            max_workers_at_once=probe.workers or max(2, (os.cpu_count() or 2) // 2),
            preload=probe.preload,
            start_timeout_seconds=probe.start_seconds,
            lock_wait_seconds=probe.lock_wait_seconds,
            retries=probe.retries,
            profile=probe.profile,
        )

    def _check_writers(self) -> None:
        """ConfigError where everybody could change what is run as this user: programs, check files, the interpreter."""
        for folder in self.probe.directories:
            check_folder(folder, "check file", ending=".py")
        programs = [program.command[0] for program in self.programs.values() if program.command]
        if not programs and self.probe.python is None:
            return
        import shutil

        for program in [*programs, *([str(self.probe.python)] if self.probe.python is not None else [])]:
            found = shutil.which(program)
            if found is not None:
                check_file(Path(found), "program", owner=False)  # packages may well belong to a user of their own

    def _check_params(self) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """`[checks.NAME]` split into parameters and the time limit, checked against the check where it is known."""
        params: dict[str, dict[str, Any]] = {}
        timeouts: dict[str, float] = {}
        if not self.checks:
            return params, timeouts
        from checks.contract import ParameterError, load_params
        from checks.discover import builtin_checks

        known = builtin_checks()
        elsewhere = bool(self.probe.third_party or self.probe.directories)
        for name, values in self.checks.items():
            if name not in known and name not in self.programs and not elsewhere:
                raise ConfigError(f"{self.where('checks', name)}: no such check: {name!r}{nearest(name, known)}")
            values = dict(values)
            try:
                if "timeout" in values:
                    timeouts[name] = parse_duration(values.pop("timeout"))
                if name in known:
                    load_params(known[name].params_type, values)
                for key, value in values.items():
                    if isinstance(value, (int, float)) and value < 0:
                        raise ValueError(f"{key} must not be negative, as {value} is")
            except ValueError as error:
                path = error.path if isinstance(error, ParameterError) else ()
                raise ConfigError(f"{self.where('checks', name, *path)}: checks.{name}: {error}") from None
            params[name] = values
        return params, timeouts


def _silences(configured: str, learned: str) -> bool:
    name, _, label = configured.partition("@")[0].partition("/")
    plain, _, learned_label = learned.partition("/")
    return name == plain and label in ("", learned_label)
