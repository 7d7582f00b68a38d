"""The settings of checks on this node: what `healthd check` needs, and every other command has too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks.contract import Limit, Program
from healthd.cli.settings.probes import BaselineSettings, LimitSettings, ProbeSettings
from healthd.cli.settings.run_dir import check_run_dir
from healthd.core.config.load import locate
from healthd.core.config.schema import nearest
from healthd.core.config.values import parse_duration
from healthd.core.errors import ConfigError
from healthd.core.file_trust import check_file, check_folder
from healthd.node.settings import NodeSettings

if TYPE_CHECKING:
    from healthd.runner.settings import Baseline, RunnerSettings


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
        from checks.learned import ORIGIN
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


def _silences(configured: str, learned: str) -> bool:
    name, _, label = configured.partition("@")[0].partition("/")
    plain, _, learned_label = learned.partition("/")
    return name == plain and label in ("", learned_label)
