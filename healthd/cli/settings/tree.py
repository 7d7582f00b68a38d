"""All settings in one tree, and what each part of healthd gets of it."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from healthd.core.config import Tables, Won, free_table, locate, nearest, parse_duration, table, tables_of
from healthd.core.errors import ConfigError
from healthd.core.integrations import table_of, top_tables
from healthd.integrations import INTEGRATIONS

if TYPE_CHECKING:
    from checks.contract import Limit, Program
    from healthd.aggregator.drain.settings import ActuatorSettings
    from healthd.aggregator.policy import Policy
    from healthd.aggregator.screening.settings import ScreeningSettings
    from healthd.aggregator.settings import AggregatorSettings
    from healthd.cli.settings.checks import BaselineSettings, LimitSettings, ProbeSettings
    from healthd.cli.settings.gate import GateSettings
    from healthd.cli.settings.preflight import PreflightSettings
    from healthd.core.http.client import Endpoint
    from healthd.node.settings import NodeSettings
    from healthd.runner.settings import Baseline, RunnerSettings


R = TypeVar("R")

ALIKE = 0.85
"""How much a name resembles another (difflib) that is taken for a slip; one wrong letter in eight reaches it."""


@dataclass(frozen=True, kw_only=True, init=False)
class Settings(Tables):
    """
    The whole tree: one table of the file each.

    A command imports the tables alone that it uses: defining all of them takes longer than a gate's question.
    """

    node: NodeSettings = table("healthd.node.settings:NodeSettings")
    """The node daemon, and what `healthd check` shares with it."""

    probe: ProbeSettings = table("healthd.cli.settings.checks:ProbeSettings")
    """How checks are run."""

    checks: dict[str, dict[str, Any]] = free_table(dict[str, dict[str, Any]])
    """Parameters by check, and for any of them `timeout`."""

    limits: dict[str, LimitSettings] = table("healthd.cli.settings.checks:LimitSettings", named=True)
    """Limits by measurement."""

    programs: dict[str, Program] = table("checks.contract:Program", named=True)
    """Programs as checks, by name."""

    baselines: dict[str, BaselineSettings] = table("healthd.cli.settings.checks:BaselineSettings", named=True)
    """Limits for one kind of machine, by any name."""

    aggregator: AggregatorSettings = table("healthd.aggregator.settings:AggregatorSettings")
    """The aggregator."""

    policy: Policy = table("healthd.aggregator.policy:Policy")
    """What gates go by."""

    gate: GateSettings = table("healthd.cli.settings.gate:GateSettings")
    """The gate's hook."""

    preflight: PreflightSettings = table("healthd.cli.settings.preflight:PreflightSettings")
    """The gate with no standing service."""

    actuator: ActuatorSettings = table("healthd.aggregator.drain.settings:ActuatorSettings")
    """How the aggregator gets bad nodes out of a scheduler's way; off by default."""

    screening: ScreeningSettings = table("healthd.aggregator.screening.settings:ScreeningSettings")
    """Deep tests of free nodes in idle hours; off by default."""

    integrations: Mapping[str, Any] = tables_of(lambda: top_tables(INTEGRATIONS))
    """The tables of integrations that are set, by key; see `of`."""

    file: Path | None = field(metadata={"internal": True})
    """The file that was read; no setting itself."""

    won: tuple[Won, ...] | None = field(metadata={"internal": True})
    """The variables that were taken in the place of keys of the file; no setting either."""

    def of(self, key: str, record: type[R]) -> R:
        """The table of an integration; with its defaults where nothing is set."""
        return table_of(self.integrations, key, record)

    def endpoint(self) -> Endpoint:
        """The aggregators that hooks and people ask, and how to speak to them. ConfigError."""
        from healthd.core.http.addresses import aggregators_in
        from healthd.core.http.client import Endpoint

        urls = aggregators_in(self.gate.aggregator, where="--aggregator")
        return Endpoint(urls=urls, token=None, ca_file=self.gate.ca_file, token_file=self.gate.token_file)

    def executor(
        self,
        name: str,
        urls: tuple[str, ...],
        folder: Path,
        *,
        address: str,
        ask_seconds: float,
        token_file: Path | None,
    ) -> NodeSettings:
        """The node daemon as the executor of a preflight: it keeps nothing, and works on order alone."""
        from healthd.node.occupancy.own import inside_a_job
        from healthd.node.settings import Unprompted

        sync = dataclasses.replace(
            self.node.sync,
            aggregators=urls,
            token_file=token_file,
            instance_identity=False,
            ca_file=None,
            wait_seconds=ask_seconds,
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
            # Inside of a job the devices that can be seen are its own; what others have of the host does not matter.
            allocations=dataclasses.replace(
                self.node.allocations, read=self.node.allocations.read and not inside_a_job(os.environ)
            ),
            sync=sync,
            integrations={},
        )

    def compile_cache(self) -> Path:
        """Where compiled probes are kept."""
        return (self.probe.compile_cache or self.node.state_dir / "compile-cache").absolute()

    def limits_by_name(self) -> Mapping[str, Limit]:
        """The operator's limits as checks see them."""
        from checks.contract import Limit

        return {
            name: Limit(lower=limit.lower, upper=limit.upper, origin="config") for name, limit in self.limits.items()
        }

    def limits_by_kind(self) -> tuple[Baseline, ...]:
        """
        The limits for kinds of machines as checks see them.

        A limit under `limits` replaces those of kinds on the same measurement (see `checks.limits.replaces`).
        """
        if not self.baselines:
            return ()
        from checks.contract import Limit
        from checks.limits import ORIGIN, replaces
        from healthd.runner.settings import Baseline

        return tuple(
            Baseline(
                hardware=one.hardware,
                accelerator=one.accelerator,
                versions=one.versions,
                limits={
                    name: Limit(lower=limit.lower, upper=limit.upper, origin=ORIGIN)
                    for name, limit in one.limits.items()
                    if not any(replaces(other, name) for other in self.limits)
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
        self._check_limits()
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
            floors=probe.floors,
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
        from healthd.core.file_trust import check_file, check_folder

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

    def _check_limits(self) -> None:
        """
        ConfigError for a limit that nothing would ask for.

        Where checks of one's own are configured, a name that resembles none of ours may be of theirs. Programs judge
        their numbers themselves.
        """
        if not self.limits:
            return
        import difflib

        from checks.limits import limited_names

        known = limited_names()
        elsewhere = bool(self.probe.third_party or self.probe.directories)
        for name in self.limits:
            plain = name.partition("@")[0].partition("/")[0]
            near = difflib.get_close_matches(plain, known, n=1, cutoff=ALIKE if elsewhere else 0.0)
            if plain not in known and near:
                raise ConfigError(
                    f"{self.where('limits', name)}: no check has a limit {plain!r}; did you mean {near[0]!r}?"
                )

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


# --- the run directory ------------------------------------------------------------------------------------------------


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
