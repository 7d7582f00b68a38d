"""
The process in which checks run: started by the runner, never by people.

    PYTHON -I /path/to/checks/worker/worker.py RESULT_DESCRIPTOR PARENT_PID

Commands come as JSON lines on standard input, results leave as bounded JSON lines on the descriptor (see
`checks.worker.protocol`). This file is run by its path and loads the `checks` beside it by path, so that neither
site-packages nor PYTHONPATH can put another package of that name in its place.
"""

from __future__ import annotations

import os
import sys

# Before anything else is imported: what a library prints must not get among the results, nor vanish.
if __name__ == "__main__":
    os.dup2(2, 1)

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checks.accelerators import Accelerator
    from checks.accelerators.neuron.cache import ColdCacheError
    from checks.contract import Check, Context, Device, Limit, Missing
    from checks.host.machine import Host
    from checks.worker.compiling import Compiling
    from checks.worker.faults import Fault

# On an idle machine it costs nothing; against one other busy process a worker keeps a quarter of a core.
NICE = 5


def load_own_checks() -> None:
    """Make `checks` the package that this file is in, whatever else goes by that name."""
    from importlib.util import module_from_spec, spec_from_file_location

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = spec_from_file_location("checks", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the checks in {folder}")
    package = module_from_spec(spec)
    sys.modules["checks"] = package
    spec.loader.exec_module(package)


class Worker:
    """One child: at most one device, one command after the other."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._id = 0
        self._setup: dict[str, Any] = {}
        self._checks: dict[str, Check] = {}
        self._inventory: dict[str, Any] = {}
        self._device: Device | None = None
        self._compiling: Compiling | None = None
        self._host: Host | None = None
        self._identity: dict[str, Any] = {}  # hardware, accelerator, versions: what learned limits are chosen by
        self._resources = ExitStack()  # the hold on the device ends with the process

    def serve(self, lines: Any) -> None:
        """Answer commands until the input ends."""
        from checks.json_text import parse_json

        handlers = {
            "load": self.load,
            "setup": self.setup,
            "survey": self.survey,
            "warm": self.warm,
            "run": self.run,
            "judge": self.judge,
            "catalogue": self.catalogue,
        }
        for line in lines:
            command = parse_json(line)
            self._id = command["id"]
            try:
                handlers[command["kind"]](command)
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a check raises is a result
                self._raised(error)

    # --- commands -----------------------------------------------------------------------------------------------------

    def load(self, _: Mapping[str, Any]) -> None:
        """
        Import what a passive round of the node needs, before it is asked for. Says nothing, whatever happens: the
        command that needs what cannot be imported will.
        """
        with suppress(Exception):
            from checks.worker.loading import load_host

            load_host()

    def setup(self, command: Mapping[str, Any]) -> None:
        """Load what will run; take and open the device, if this worker has one; then say ready."""
        from checks.host.machine import Host

        self._setup = dict(command)
        if command["host_root"]:
            from pathlib import Path

            self._host = Host(Path(command["host_root"]))
        else:
            self._host = Host(None)
        versions = {"python": sys.version.split()[0]}
        target = command["target"]
        self._inventory = command["inventory"]  # of the survey, where this child takes the place of one that is gone
        cold: list[str] = []
        if target is not None:
            from checks.worker.compiling import Compiling

            accelerator = self._accelerator()
            compiling = Compiling(command.get("compile"), command)
            cold = compiling.cold()  # before torch: who may not compile knows at once that there is nothing
            options = {**command["options"], **compiling.options()}
            self._resources.enter_context(accelerator.hold(target, options))
            self._device = accelerator.bind(target, self._inventory, options)
            versions["torch"] = str(self._device.torch.__version__)
            survey = command.get("identity") or {"hardware": None, "accelerator": None}
            self._identity = {**survey, "versions": {**survey.get("versions", {}), **versions}}
            self._compiling = compiling  # not before: commands that were sent ahead come even when setup has failed
        self._say("ready", versions=versions, cold=len(cold))

    def survey(self, command: Mapping[str, Any]) -> None:
        """What is on the machine, and who holds it. Later commands of this worker see the same inventory."""
        from checks.host.identity import read_identity

        host = self._on()
        accelerator = self._accelerator()
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
        self._say("surveyed", inventory=inventory, holders=holders, **identity)

    def warm(self, command: Mapping[str, Any]) -> None:
        """Compile what is not compiled yet, by running those checks once unjudged; one process at a time does."""
        from checks.worker.compiling import Stopwatch

        compiling = self._compiling
        if compiling is None:
            raise RuntimeError("only the worker of a device can compile")
        self._say("started", check="warm")
        with compiling.alone() as cleared:
            for text in cleared:
                self._say("warmed", check="", seconds=0.0, text=f"removed: {text}")
            for graphs in compiling.graphs:
                if not compiling.is_due(graphs):
                    continue
                check = self._check(graphs.check)
                self._say("warmed", check=check.name, seconds=0.0, text="compiling")
                watch = Stopwatch(self._device)
                given = {"params": graphs.params, "tier": graphs.tier, "group": None, "previous": None}
                for _ in check.run(self._context(check, given, [])):
                    pass
                seconds = watch.seconds(first_run=True)
                compiling.ended(check.name, seconds)
                self._say("warmed", check=check.name, seconds=seconds, text="compiled")
        self._say("done", dropped=0)

    def run(self, command: Mapping[str, Any]) -> None:
        """Run one check on this worker's device, or on the node."""
        from checks.worker.compiling import Stopwatch, with_fallbacks
        from checks.worker.faults import Fault, apply_faults

        check = self._check(command["check"])
        faults = [Fault(*fault) for fault in command["faults"]]
        context = self._context(check, command, faults)
        target = f"rank:{context.group.rank}" if context.group else self._setup["target"] or "node"
        self._say("started", check=check.name)
        if self._compiling is not None:
            self._compiling.require(check.name)
        watch = Stopwatch(self._device)
        items = apply_faults(
            faults,
            lambda: check.run(context),
            target=target,
            group=context.group is not None,
            output=self._output,
        )
        dropped = self._stream(items if context.group else with_fallbacks(self._device, items))
        seconds = watch.seconds()
        if self._compiling is not None:
            self._compiling.ended(check.name, seconds)
        self._say("done", dropped=dropped, compile_seconds=seconds)

    def judge(self, command: Mapping[str, Any]) -> None:
        """Let a check compare what its workers measured."""
        from checks.worker.protocol import to_evidence, to_missing

        check = self._check(command["check"])
        if check.judge is None:
            raise ValueError(f"{check.name} has no judge")
        missing: list[Missing] = [to_missing(item) for item in command["missing"]]
        self._say("started", check=check.name)
        dropped = self._stream(check.judge([to_evidence(item) for item in command["evidence"]], missing))
        self._say("done", dropped=dropped)

    def catalogue(self, command: Mapping[str, Any]) -> None:
        """Say what each check that is configured is, one line each."""
        for check, origin in self._all().values():
            self._say(
                "catalogue",
                name=check.name,
                tier=check.tier.value,
                scope=check.scope.value,
                interval_seconds=check.interval_seconds,
                timeout_seconds=check.timeout_seconds,
                judged=check.judge is not None,
                doc=check.doc[:8000],
                origin=origin,
            )
        self._say("done", dropped=0)

    # --- what they share ----------------------------------------------------------------------------------------------

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

    def _all(self) -> dict[str, tuple[Check, str]]:
        from checks.worker.loading import load_all

        return load_all(self._setup)

    def _context(self, check: Check, command: Mapping[str, Any], faults: Sequence[Fault]) -> Context[Any]:
        from checks.contract import Context, Group, Tier, load_params
        from checks.worker.faults import COUNTING_CHECK, faulty, without_missing
        from checks.worker.protocol import to_limits, to_previous

        group = command["group"]
        inventory = self._inventory
        if check.name == COUNTING_CHECK:
            inventory = without_missing(inventory, faults)
        return Context(
            host=self._on(),
            params=load_params(check.params_type, command["params"]),
            tier=Tier(command["tier"]),
            device=faulty(self._device, faults) if self._device is not None else None,
            group=Group(**{**group, "targets": tuple(group["targets"])}) if group else None,
            previous=to_previous(command["previous"]),
            inventory=inventory,
            limits={**self._learned(), **to_limits(self._setup["limits"])},
        )

    def _learned(self) -> dict[str, Limit]:
        """Learned limits for this machine and the versions at work here; none where that is not known."""
        from checks.learned import choose

        sets = self._setup.get("learned")
        return choose(sets, **self._identity) if sets and self._identity else {}

    def _stream(self, items: Any) -> int:
        """Send what a check yields as it comes; findings above the bound are counted, the worst of them told."""
        from checks.contract import SEVERITY, Evidence, Finding, Progress
        from checks.worker.protocol import MAX_FINDINGS, from_evidence, from_finding, from_progress

        findings = dropped = 0
        worst_dropped: Finding | None = None
        for item in items:
            if isinstance(item, Finding):
                findings += 1
                if findings < MAX_FINDINGS:
                    self._say("finding", finding=from_finding(item))
                    continue
                dropped += 1
                if worst_dropped is None or SEVERITY[item.status] > SEVERITY[worst_dropped.status]:
                    worst_dropped = item
            elif isinstance(item, Evidence):
                self._say("evidence", evidence=from_evidence(item))
            elif isinstance(item, Progress):
                self._say("progress", progress=from_progress(item))
            else:
                raise TypeError(f"yielded {type(item).__name__}; a check yields Finding, Evidence or Progress")
        if worst_dropped is not None:
            self._say("finding", finding=from_finding(worst_dropped))
        return max(0, dropped - 1)

    def _say(self, kind: str, **members: Any) -> None:
        from checks.worker.protocol import encode

        line = encode({"kind": kind, "id": self._id, **members})
        while line:
            line = line[os.write(self._output, line) :]

    def _raised(self, error: BaseException) -> None:
        """An exception is a result as well: its type, its words and where it came from."""
        import time
        import traceback

        from checks.host.machine import HostError
        from checks.worker.protocol import MAX_TRACEBACK_CHARACTERS, shorten

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._say(
            "raised",
            type=type(error).__name__,
            message=shorten(str(error)),
            # What the machine did not let a check see has a reason of its own, and so has a cold cache.
            reason=error.reason if isinstance(error, (HostError, _cold_cache())) else None,
            traceback=text[-MAX_TRACEBACK_CHARACTERS:],
            monotonic_seconds=time.monotonic(),
        )


def _cold_cache() -> type[ColdCacheError]:
    from checks.accelerators.neuron.cache import ColdCacheError

    return ColdCacheError


def main(arguments: Sequence[str]) -> None:
    """Serve the runner that started this process."""
    output, parent = int(arguments[0]), int(arguments[1])
    load_own_checks()
    from checks.host.guard import stand_guard

    stand_guard(parent)  # from here on this is the child of a guard, which ends all that comes of it
    # What a check starts must neither hold the pipe of the results nor read the commands.
    os.set_inheritable(output, False)
    commands = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    import faulthandler
    import resource

    # One byte is less than any core dump, and unlike zero it also keeps a dump from being piped to a program, which
    # can take minutes for a process with a model's memory.
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
    # Whoever else wants a processor gets it first: the daemon that must answer, and a job that nobody saw. Of groups of
    # processes in sessions of their own only the group's value counts.
    os.nice(NICE)
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(NICE))
    # When memory runs out, the kernel takes a probe before it takes a job.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    faulthandler.enable()  # the last words of a crash say where it was
    with os.fdopen(commands, "rb") as lines:
        Worker(output).serve(lines)
    # Whatever threads or exit handlers a library left behind, the work is done.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
