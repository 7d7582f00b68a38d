"""All settings in one tree, and how a command gets them from its options, the variables and the file."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from checks.contract import Limit, Tier
from healthd.baselines.settings import BaselineSettings
from healthd.config import load, locate, nearest, parse_duration
from healthd.errors import BadInputError, ConfigError
from healthd.fleet.actuators.settings import ActuatorSettings
from healthd.fleet.policy import Policy
from healthd.fleet.settings import AggregatorSettings
from healthd.model import LearnedLimits, Mode
from healthd.node.settings import KubernetesSettings, NodeSettings, Unprompted

if TYPE_CHECKING:
    from healthd.client import Endpoint
    from healthd.runner import RunnerSettings

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_FILE = Path("/etc/healthd/healthd.toml")

# As many logical devices as the largest machines have cores; beyond it is a slip.
MOST_CPU_DEVICES = 1024
MOST_RETRIES = 10

# Option -> key, where they differ.
KEYS = {
    "fault": "node.faults",
    "label": "node.labels",
    "name": "node.name",
    "cpu_devices": "probe.cpu_devices",
    "baseline": "baseline.file",
}


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """One limit of a measurement, by its name (`matmul_flops_per_second`, or for one device `...@cpu:1`)."""

    lower: float | None = None
    """Least value that passes, in the unit that the name ends in."""

    upper: float | None = None
    """Largest value that passes."""


@dataclass(frozen=True, kw_only=True)
class ProgramSettings:
    """A check that is a program."""

    command: tuple[str, ...]
    """The program and its arguments; never a shell line."""

    protocol: Literal["monitoring", "npd"] = "monitoring"
    """monitoring: exit 0, 1, 2, 3 and perfdata. npd: the node-problem-detector's 0, 1, 2."""

    tier: Tier = Tier.PASSIVE
    """The lightest tier in which it runs. passive: it must not disturb a job."""

    interval_seconds: float = 60.0
    """How often the daemon runs it."""

    timeout_seconds: float = 10.0
    """After how long it is killed and unknown."""


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

    start_seconds: float = 60.0
    """Within which a worker must be ready: importing torch from a cold disk takes long."""

    lock_wait_seconds: float = 60.0
    """How long to wait while another healthd on this host runs active checks."""

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
            from checks.accelerators import NAMES

            if self.accelerator not in NAMES:
                near = nearest(self.accelerator, dict.fromkeys(("auto", *NAMES)))
                raise ValueError(f"accelerator {self.accelerator!r} is none of ours{near}")


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """What `healthd gate` asks. Every key is an option of that command."""

    aggregator: str = "http://127.0.0.1:8090"
    """Where the aggregator is."""

    token_file: Path | None = None
    """File with the bearer token."""

    ca_file: Path | None = None
    """CA of the aggregator's certificate; None is the system's."""

    job: str | None = None
    """The job's name."""

    attempt: int = 0
    """Which attempt of the job."""

    node: tuple[str, ...] = ()
    """The nodes by name."""

    hostfile: Path | None = None
    """The nodes from a file."""

    pool: str | None = None
    """Nodes from a pool instead."""

    count: int | None = None
    """How many of the pool."""

    join: str | None = None
    """A group of hooks that come together instead, one on each node."""

    size: int | None = None
    """How many members the group has; None: as the launcher says."""

    rank: int | None = None
    """Which member this is; None: as the launcher says."""

    member: str | None = None
    """What tells this process from a former one of its rank; None: something new each time."""

    execute: bool = False
    """Whether the hook runs the ordered checks itself, in the job's own container."""

    min_nodes: int | None = None
    """How many good ones will do; None: all."""

    tier: Tier | None = None
    """Evidence asked; None: the aggregator's policy."""

    max_age_seconds: float | None = None
    """How old it may be; None: the aggregator's policy."""

    wait_seconds: float | None = None
    """How long to hold; None: the aggregator's policy."""

    mode: Mode | None = None
    """enforce or observe; None: the aggregator's policy."""

    collective: bool | None = None
    """Run collectives over the nodes together first; None: the aggregator's policy."""

    workload: str | None = None
    """What the lease lives with."""

    exit_style: Literal["plain", "npd", "slurm"] = "plain"
    """Exit codes for those who know others than ours. npd: 0 admitted, 1 not, 2 and above unknown. slurm: 0 or not."""

    on_unreachable: Literal["hold", "local", "admit"] = "hold"
    """What to do while the aggregator is away. hold: not knowing is not health."""

    local_url: str = "http://127.0.0.1:8080"
    """Where this node's daemon is, for on_unreachable = local."""

    hostfile_out: Path | None = None
    """Where to write the admitted nodes."""


@dataclass(frozen=True, kw_only=True)
class PreflightSettings:
    """What `healthd preflight` asks. Every key is an option of that command."""

    nnodes: int | None = None
    """How many nodes; None: from the launcher."""

    node_rank: int | None = None
    """Which of them this is; None: from the launcher."""

    main: str | None = None
    """Where rank 0 is; None: from the launcher."""

    port: int = 8099
    """The port of the aggregator on the main node, where `main` names none."""

    token_file: Path | None = None
    """A token that all nodes of the job share; None: whoever reaches the port may speak."""

    job: str | None = None
    """The job's name; None: from the launcher."""

    attempt: int | None = None
    """Which attempt; None: from the launcher."""

    min_nodes: int | None = None
    """How many good nodes will do; None: all."""

    tier: Tier = Tier.QUICK
    """Evidence asked."""

    max_age_seconds: float = 3600.0
    """How old it may be. The executors start with nothing, so this bounds how long one waits for another."""

    wait_seconds: float = 600.0
    """How long to wait for all nodes and their checks."""

    acknowledge_seconds: float = 30.0
    """How long admitted nodes may take to confirm the start. They do within milliseconds: half a minute means gone."""

    gone_seconds: float = 20.0
    """After how long without an answer the main node counts as gone, once it has answered."""

    linger_seconds: float = 15.0
    """How long the main node waits at the end for all others to hear it."""

    mode: Mode = Mode.ENFORCE
    """enforce or observe."""

    collective: bool = True
    """Run collectives over the nodes together first, where there is more than one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The whole tree: one table of the file each."""

    node: NodeSettings
    """The node daemon, and what `healthd check` shares with it."""

    probe: ProbeSettings = field(default_factory=ProbeSettings)
    """How checks are run."""

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters by check, and for any of them `timeout`."""

    limits: dict[str, LimitSettings] = field(default_factory=dict)
    """Limits by measurement."""

    programs: dict[str, ProgramSettings] = field(default_factory=dict)
    """Programs as checks, by name."""

    aggregator: AggregatorSettings = field(default_factory=AggregatorSettings)
    """The aggregator."""

    policy: Policy = field(default_factory=Policy)
    """What gates go by."""

    gate: GateSettings = field(default_factory=GateSettings)
    """The gate's hook."""

    preflight: PreflightSettings = field(default_factory=PreflightSettings)
    """The gate with no standing service."""

    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    """Limits learned from what healthy machines measured."""

    actuator: ActuatorSettings = field(default_factory=ActuatorSettings)
    """How the aggregator gets bad nodes out of a scheduler's way; off by default."""

    file: Path | None = field(default=None, metadata={"internal": True})
    """The file that was read; no setting itself."""

    def endpoint(self, url: str) -> Endpoint:
        """How to speak to an aggregator."""
        from healthd.client import Endpoint, read_token

        return Endpoint(url=url, token=read_token(self.gate.token_file), ca_file=self.gate.ca_file)

    def compile_cache(self) -> Path:
        """Where compiled probes are kept."""
        return (self.probe.compile_cache or self.node.state_dir / "compile-cache").absolute()

    def limits_by_name(self) -> Mapping[str, Limit]:
        """The operator's limits as checks see them."""
        return {
            name: Limit(lower=limit.lower, upper=limit.upper, origin="config") for name, limit in self.limits.items()
        }

    def learned_limits(self) -> tuple[LearnedLimits, ...]:
        """The approved limits of the operator's file of baselines. ConfigError where it cannot be used."""
        if self.baseline.file is None:
            return ()
        from healthd.baselines import files, judging

        try:
            return judging.sets_of(files.read(self.baseline.file))
        except BadInputError as error:
            raise ConfigError(f"baseline.file: {error}") from None

    def where(self, *path: str) -> str:
        """Where a key is set, for errors that are found after loading."""
        return locate(self.file, path) if self.file else "configuration"

    def executor(
        self, name: str, url: str, folder: Path, *, address: str, ask_seconds: float, token_file: Path | None
    ) -> NodeSettings:
        """The node daemon as the executor of a preflight: it keeps nothing, and works on order alone."""
        sync = dataclasses.replace(
            self.node.sync, aggregators=(url,), token_file=token_file, ca_file=None, wait_seconds=ask_seconds
        )
        return dataclasses.replace(
            self.node,
            name=name,
            aliases=(socket.gethostname(),),
            state_dir=folder,
            run_dir=folder,
            listen="127.0.0.1:0",
            address=address,
            active=dataclasses.replace(self.node.active, unprompted=Unprompted.OFF),
            allocations=dataclasses.replace(self.node.allocations, read=False),
            sync=sync,
            kubernetes=KubernetesSettings(),
        )

    def runner(self) -> RunnerSettings:
        """What the runner needs. ConfigError names a check that matches nothing, or a parameter it does not have."""
        from healthd.runner import ProgramSpec, RunnerSettings

        probe = self.probe
        params, timeouts = self._check_params()
        if probe.instance_type is not None:
            for name in ("instance_type", "device_count", "neuron_cores", "neuron_topology"):
                params[name] = {"type": probe.instance_type, **params.get(name, {})}
        programs = tuple(
            ProgramSpec(
                name=name,
                argv=program.command,
                protocol=program.protocol,
                tier=program.tier,
                interval_seconds=program.interval_seconds,
                timeout_seconds=program.timeout_seconds,
            )
            for name, program in self.programs.items()
        )
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
            },
            params=params,
            timeouts_seconds=timeouts,
            limits=self.limits_by_name(),
            learned=self.learned_limits(),
            third_party=probe.third_party,
            directories=probe.directories,
            programs=programs,
            compile_cache=self.compile_cache(),
            on_cold_cache=probe.on_cold_cache,
            compile_timeout_seconds=probe.compile_timeout_seconds,
            max_workers_at_once=probe.workers or max(2, (os.cpu_count() or 2) // 2),
            start_timeout_seconds=probe.start_seconds,
            lock_wait_seconds=probe.lock_wait_seconds,
            retries=probe.retries,
        )

    def _check_params(self) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """`[checks.NAME]` split into parameters and the time limit, checked against the check where it is known."""
        params: dict[str, dict[str, Any]] = {}
        timeouts: dict[str, float] = {}
        if not self.checks:
            return params, timeouts
        from checks.contract import load_params
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
                raise ConfigError(f"{self.where('checks', name)}: checks.{name}: {error}") from None
            params[name] = values
        return params, timeouts


def common_options(command: F) -> F:
    """The options that every command has."""
    for option in (
        click.option("--host-root", type=click.Path(path_type=Path), metavar="D", help="A directory as the machine."),
        click.option("--ca-file", type=click.Path(path_type=Path), metavar="F", help="CA of the aggregator."),
        click.option("--token-file", type=click.Path(path_type=Path), metavar="F", help="File with the bearer token."),
        click.option(
            "--run-dir", type=click.Path(path_type=Path), metavar="D", help="Sockets, locks, CPU device files."
        ),
        click.option("--state-dir", type=click.Path(path_type=Path), metavar="D", help="What must survive a restart."),
        click.option(
            "--config", type=click.Path(path_type=Path), metavar="F", help=f"TOML file (default {DEFAULT_FILE})."
        ),
    ):
        command = option(command)
    return command


def load_settings(options: Mapping[str, Any], *, section: str) -> Settings:
    """The settings of a command: its options over the variables over the file. ConfigError with one line."""
    given = dict(options)
    file = given.pop("config", None) or _file_from_environment()
    arguments = {KEYS.get(name, name): value for name, value in given.items()}
    settings = load(
        Settings,
        file=file,
        environ=os.environ,
        arguments=arguments,
        sections=(section, "node", "probe"),
        defaults={
            "node.name": socket.gethostname(),
            "node.state_dir": _state_dir(),
            "node.run_dir": _run_dir(),
            "aggregator.state_dir": _state_dir(),
        },
    )
    # Workers run in a directory of their own: a relative path would mean another place to them.
    node = dataclasses.replace(
        settings.node,
        state_dir=settings.node.state_dir.absolute(),
        run_dir=settings.node.run_dir.absolute(),
        host_root=settings.node.host_root.absolute() if settings.node.host_root else None,
    )
    settings = dataclasses.replace(settings, node=node)
    root = settings.node.host_root
    if root is not None and not root.is_dir():
        raise ConfigError(f"{root}: no such directory; --host-root names one that holds proc/, sys/, etc/ of a machine")
    return dataclasses.replace(settings, file=file)


def _file_from_environment() -> Path | None:
    named = os.environ.get("HEALTHD_CONFIG")
    if named:
        return Path(named)
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def _state_dir() -> Path:
    """Root's is the system's; a person's is their own."""
    if os.geteuid() == 0:
        return Path("/var/lib/healthd")
    home = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(home) / "healthd"


def _run_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/run/healthd")
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "healthd" if base else Path(tempfile.gettempdir()) / f"healthd-{os.geteuid()}"
