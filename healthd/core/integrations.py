"""How an integration describes itself to the core. An integration is a leaf: the core never imports one by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class CommandAt:
    """A command of `healthd`, and where its click command is."""

    name: str
    place: str
    exit_codes: tuple[int, int, int] | None = None
    """What wrong usage or settings, any other error of ours, and an unforeseen one come to; None: as most commands."""


@dataclass(frozen=True, kw_only=True)
class Integration:
    """One line of `healthd.integrations`. Places are `module:name`, imported when they are used; None: it has none."""

    name: str
    """Its folder in `healthd/integrations` and `tests/integrations`."""

    commands: tuple[CommandAt, ...] = ()
    """Its commands."""

    settings: tuple[str, str] | None = None
    """Key of its table at the top of the file, for its commands, and where the record of the table is."""

    node_settings: tuple[str, str] | None = None
    """Key of its table below `[node]`, and where the record of the table is."""

    node_service: str | None = None
    """What runs in the node daemon: a `healthd.node.services.NodeService`."""

    node_credential: str | None = None
    """What writes the credential of a node with `sync.instance_identity`: a `healthd.node.services.Credential`."""

    step_source: str | None = None
    """What tells of the steps of running jobs: a `healthd.node.services.MakeStepSource`."""

    job_comparison: str | None = None
    """What compares the nodes of running jobs in an aggregator: a function of its clock that gives a
    `healthd.aggregator.fleet.running_jobs.JobComparison`."""

    check_params: str | None = None
    """Parameters that the daemon gives to checks, where the settings give a check none: a function of the daemon's
    settings that gives them by check."""

    job_scheduler: str | None = None
    """What gives devices of hosts to jobs: a `healthd.node.occupancy.model.JobScheduler`."""

    allocation_settings: tuple[str, str] | None = None
    """Key of its table below `[node.allocations]` (`NAME_*`: its keys stand there as NAME_KEY), and where its record
    is."""

    job_variables: tuple[str, ...] = ()
    """Variables of which one at least is set wherever it has started something."""

    job_workload: tuple[str, str] | None = None
    """The variable that has the id of a job in all of its processes, and how the name of its workload begins."""

    workload_watch: str | None = None
    """What sees the end of pods that have a lease: a `healthd.node.occupancy.watching.MakeWorkloadWatch`."""

    launcher: str | None = None
    """What starts the processes of a job and gives them their rank: a `healthd.hooks.launchers.Launcher`."""

    aggregator_settings: tuple[str, str] | None = None
    """Key of its table below `[aggregator]` (`NAME_*`: its keys stand there as NAME_KEY), and where its record is."""

    job_events: str | None = None
    """What hears how jobs ended: a function of the aggregator's settings and the name of its database that gives a
    `healthd.aggregator.jobs.sinks.JobEvents`, None where it is off."""

    identities: str | None = None
    """Who says whose a token is that no file has: a function of the aggregator's settings that gives a
    `healthd.aggregator.identity.tokens.Platform`, None where it is off. Its table is a `Callers`."""

    hooked_job: str | None = None
    """The job that a workload is, by the name of the workload, where the scheduler's hook asks a gate for every job: a
    function that gives a `healthd.aggregator.jobs.ungated.HookedJob`, None for other workloads."""

    actuator: str | None = None
    """What takes nodes out of the scheduler `name`, where `actuator.kind` is that: a
    `healthd.aggregator.drain.targets.MakeActuator`."""

    actuator_settings: tuple[str, str] | None = None
    """Key of its table below `[actuator]`, and where the record of the table is."""

    device_actuator: str | None = None
    """What takes out single devices before an actuator takes out their node: a
    `healthd.aggregator.drain.targets.MakeDeviceActuator`."""

    device_settings: tuple[str, str] | None = None
    """Key of the settings for that in the table of an actuator (`NAME_*`: NAME_KEY each), and where the record is."""


@runtime_checkable
class Callers(Protocol):
    """A table that lets callers in, by which an aggregator may listen beyond loopback."""

    @property
    def on(self) -> bool:
        """Whether it lets any in."""


def top_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key at the top of the file -> where the record is."""
    return dict(one.settings for one in integrations if one.settings is not None)


def node_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key below `[node]` -> where the record is."""
    return dict(one.node_settings for one in integrations if one.node_settings is not None)


def allocation_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key below `[node.allocations]` -> where the record is."""
    return dict(one.allocation_settings for one in integrations if one.allocation_settings is not None)


def aggregator_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key below `[aggregator]` -> where the record is."""
    return dict(one.aggregator_settings for one in integrations if one.aggregator_settings is not None)


def actuators(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Name of a scheduler -> where its actuator is made."""
    return {one.name: one.actuator for one in integrations if one.actuator is not None}


def actuator_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key below `[actuator]` -> where the record is."""
    return dict(one.actuator_settings for one in integrations if one.actuator_settings is not None)


def device_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key in the table of an actuator -> where the record of what takes out devices is."""
    return dict(one.device_settings for one in integrations if one.device_settings is not None)


def table_of(tables: Mapping[str, Any], key: str, record: type[R]) -> R:
    """The table of an integration among those that are set; with its defaults where it is not."""
    found = tables.get(key)
    return found if isinstance(found, record) else record()


def any_on(tables: Mapping[str, Any]) -> bool:
    """Whether one of the tables lets callers in."""
    return any(isinstance(table, Callers) and table.on for table in tables.values())
