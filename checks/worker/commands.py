"""Runs the commands of a worker process: setup, survey, warm, run, judge, catalogue (see `checks.worker.protocol`)."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from checks.worker.results import ResultWriter

if TYPE_CHECKING:
    from checks.accelerators import Accelerator
    from checks.contract import Check, Context, Device, Limit, Profiling
    from checks.host.machine import Host
    from checks.worker.compiling import Compiling
    from checks.worker.faults import Fault

# Imports stand where they are needed: a passive round imports no torch, and only a part of the checks.


class Worker:
    """Runs the commands of one worker process, one after the other; it has at most one device."""

    def __init__(self, output: int) -> None:
        self._results = ResultWriter(output)
        self._setup: dict[str, Any] = {}
        self._checks: dict[str, Check] = {}
        self._inventory: dict[str, Any] = {}
        self._device: Device | None = None
        self._compiling: Compiling | None = None
        self._host: Host | None = None
        self._identity: dict[str, Any] = {}  # hardware, accelerator, versions: they choose the learned limits
        self._resources = ExitStack()  # the hold on the device ends with the process

    def serve(self, lines: Iterable[bytes]) -> None:
        """Answer commands until the input ends."""
        from checks.json_text import parse_json

        handlers = {
            "load": self.load,
            "setup": self.setup,
            "survey": self.survey,
            "warm": self.warm,
            "run": self.run,
            "judge": self.judge,
            "capture": self.capture,
            "catalogue": self.catalogue,
            "host_catalogue": self.host_catalogue,
        }
        for line in lines:
            command = parse_json(line)
            self._results.command_id = command["id"]
            try:
                handlers[command["kind"]](command)
            except (Exception, SystemExit) as error:  # noqa: BLE001  anything that a check raises is a result
                self._results.raised(error)

    # --- commands -----------------------------------------------------------------------------------------------------

    def load(self, _: Mapping[str, Any]) -> None:
        """
        Import what a passive round of the node needs, before it is asked for. Reports nothing: a command that needs
        what cannot be imported reports the failure.
        """
        with suppress(Exception):
            from checks.worker.loading import load_host

            gc.disable()  # what is imported stays
            load_host()
        gc.enable()

    def setup(self, command: Mapping[str, Any]) -> None:
        """Prepare for commands: hold and open the device, if this worker has one; then report ready."""
        from checks.host.machine import Host

        self._setup = dict(command)
        if command["host_root"]:
            from pathlib import Path

            self._host = Host(Path(command["host_root"]))
        else:
            self._host = Host(None)
        versions = {"python": sys.version.split()[0]}
        target = command["target"]
        self._inventory = command["inventory"]  # of an earlier survey, where this worker replaces another one
        cold: list[str] = []
        if target is not None:
            from checks.worker.compiling import Compiling

            accelerator = self._accelerator()
            compiling = Compiling(command.get("compile"), command)
            cold = compiling.cold()  # before torch is imported: where nothing may be compiled, that is reported at once
            options = {**command["options"], **compiling.options()}
            self._resources.enter_context(accelerator.hold(target, options))
            self._device = accelerator.bind(target, self._inventory, options)
            versions["torch"] = str(self._device.torch.__version__)
            survey = command.get("identity") or {"hardware": None, "accelerator": None}
            self._identity = {**survey, "versions": {**survey.get("versions", {}), **versions}}
            self._compiling = compiling  # not earlier: commands that were sent ahead are run even when setup has failed
        self._results.send("ready", versions=versions, cold=len(cold))

    def survey(self, command: Mapping[str, Any]) -> None:
        """
        Report the devices of the machine and who holds them. Later commands of this worker use the same inventory.
        """
        from checks.host.identity import read_identity

        looked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        host, accelerator = self._on(), self._accelerator()
        options = self._setup["options"]
        inventory = accelerator.find(host, options)
        holders = accelerator.holders(host, inventory, options)
        configured = options.get("instance_type")
        identity = read_identity(host, configured=configured, inventory=inventory)
        self._inventory = {**inventory, "holders": holders, **({"instance_type": configured} if configured else {})}
        from checks.learned import hardware_in

        self._identity = {
            "hardware": hardware_in(identity["instance_type"], inventory),
            "accelerator": inventory["accelerator"],
            "versions": identity["versions"],
        }
        self._results.send("surveyed", looked_at=looked_at, inventory=inventory, holders=holders, **identity)

    def warm(self, command: Mapping[str, Any]) -> None:
        """Compile what is not compiled yet, by running those checks once unjudged; one process at a time does this."""
        from checks.worker.device_counts import Stopwatch

        compiling = self._compiling
        if compiling is None:
            raise RuntimeError("only the worker of a device can compile")
        self._results.send("started", check="warm")
        with compiling.alone() as cleared:
            for text in cleared:
                self._results.send("warmed", check="", seconds=0.0, text=f"removed: {text}")
            for graphs in compiling.graphs:
                if not compiling.is_due(graphs):
                    continue
                check = self._check(graphs.check)
                self._results.send("warmed", check=check.name, seconds=0.0, text="compiling")
                compiling.started(check.name)
                watch = Stopwatch(self._device)
                given = {"params": graphs.params, "tier": graphs.tier, "group": None, "previous": None}
                for _ in check.run(self._context(check, given, [])):
                    pass
                seconds = watch.seconds(first_run=True)
                compiling.ended(check.name, seconds)
                self._results.send("warmed", check=check.name, seconds=seconds, text="compiled")
        self._results.send("done", dropped=0)

    def run(self, command: Mapping[str, Any]) -> None:
        """Run one check on this worker's device, or on the node."""
        from checks.worker.device_counts import Stopwatch, with_fallbacks

        check = self._check(command["check"])
        faults = _faults(command)
        context = self._context(check, command, faults)
        target = f"rank:{context.group.rank}" if context.group else self._setup["target"] or "node"
        self._results.send("started", check=check.name)
        if self._compiling is not None:
            self._compiling.require(check.name)
            self._compiling.started(check.name)
        watch = Stopwatch(self._device)
        items: Iterator[Any]
        if faults:
            from checks.worker.fault_injection import apply_faults

            group, output = context.group is not None, self._results.output
            items = apply_faults(faults, lambda: check.run(context), target=target, group=group, output=output)
        else:
            items = check.run(context)
        dropped = self._results.stream(items if context.group else with_fallbacks(self._device, items))
        seconds = watch.seconds()
        if self._compiling is not None:
            self._compiling.ended(check.name, seconds)
        programs: list[str] = []
        if self._compiling is not None and context.profiling is not None:
            programs = self._compiling.programs(check.name)[:1]
        self._results.send("done", dropped=dropped, compile_seconds=seconds, programs=programs)

    def capture(self, command: Mapping[str, Any]) -> None:
        """Profile a compiled program on a core that no worker has."""
        from checks.profiling.neuron import capture
        from checks.worker.profile_parts import split

        self._results.send("started", check=command["check"])
        for part in split(capture(self._on(), command["program"], command["target"], command["check"])):
            self._results.send("profile", profile=part)
        self._results.send("done", dropped=0)

    def judge(self, command: Mapping[str, Any]) -> None:
        """Let a check compare what its workers measured."""
        from checks.contract import Evidence, Missing
        from checks.worker.protocol import to_record

        check = self._check(command["check"])
        if check.judge is None:
            raise ValueError(f"{check.name} has no judge")
        evidence = [to_record(Evidence, item) for item in command["evidence"]]
        missing = [to_record(Missing, item) for item in command["missing"]]
        self._results.send("started", check=check.name)
        dropped = self._results.stream(check.judge(evidence, missing))
        self._results.send("done", dropped=dropped)

    def catalogue(self, command: Mapping[str, Any]) -> None:
        """Report each configured check, one line each."""
        from checks.worker.loading import declare, load_all

        for check in load_all(self._setup).values():
            self._results.send("catalogue", **declare(check))
        self._results.send("done", dropped=0)

    def host_catalogue(self, _: Mapping[str, Any]) -> None:
        """The same for the built-in checks of the host alone; needs no setup."""
        from checks.worker.loading import declare, load_host

        for check in load_host().values():
            self._results.send("catalogue", **declare(check))
        self._results.send("done", dropped=0)

    # --- common to commands -------------------------------------------------------------------------------------------

    def _on(self) -> Host:
        if self._host is None:
            raise RuntimeError("no setup has come before this command")
        return self._host

    def _accelerator(self) -> Accelerator:
        from checks.accelerators import find_accelerator

        return find_accelerator(self._setup["accelerator"], self._on())

    def _check(self, name: str) -> Check:
        if name not in self._checks:
            from checks.worker.loading import load_check

            self._checks[name] = load_check(name, self._setup)
        return self._checks[name]

    def _context(self, check: Check, command: Mapping[str, Any], faults: Sequence[Fault]) -> Context[Any]:
        from checks.contract import Context, Group, Limit, Tier, load_params
        from checks.worker.protocol import to_previous, to_record

        group = command["group"]
        inventory = self._inventory
        if faults:
            from checks.worker.faults import COUNTING_CHECK, without_missing

            inventory = without_missing(inventory, faults) if check.name == COUNTING_CHECK else inventory
        limits = {name: to_record(Limit, limit) for name, limit in self._setup["limits"].items()}
        return Context(
            host=self._on(),
            params=load_params(check.params_type, command["params"]),
            tier=Tier(command["tier"]),
            device=self._device_with(faults),
            group=Group(**{**group, "targets": tuple(group["targets"])}) if group else None,
            previous=to_previous(command["previous"]),
            inventory=inventory,
            limits={**self._learned(), **limits},
            profiling=_profiling(command),
        )

    def _device_with(self, faults: Sequence[Fault]) -> Device | None:
        if self._device is None or not faults:
            return self._device
        from checks.worker.fault_injection import faulty

        return faulty(self._device, faults)

    def _learned(self) -> dict[str, Limit]:
        """The learned limits for this machine and its versions; none where these are not known."""
        from checks.learned import choose

        sets = self._setup.get("learned")
        return choose(sets, **self._identity) if sets and self._identity else {}


def _faults(command: Mapping[str, Any]) -> list[Fault]:
    """The faults that are injected into the check."""
    if not command["faults"]:
        return []
    from checks.worker.faults import Fault

    return [Fault(*fault) for fault in command["faults"]]


def _profiling(command: Mapping[str, Any]) -> Profiling | None:
    """Whether the probe may be profiled: ranks wait for each other, and are not."""
    import time

    from checks.contract import Profiling

    wanted = command.get("profile", "off")
    if wanted == "off" or command["group"] is not None:
        return None
    return Profiling(always=wanted == "always", until=time.monotonic() + command["timeout_seconds"])
