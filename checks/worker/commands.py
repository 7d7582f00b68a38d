"""
Runs the commands of a worker process: setup, survey, warm, run, judge, catalogue (see `checks.worker.protocol`).

Also here:

- compilation in a worker: whether its graphs are compiled, and compiling them once;
- what a device counts of a check beside its results: the time it compiled, and the work that it left to the host;
- sends what checks yield and raise from a worker process, as bounded lines of `checks.worker.protocol`;
- imports stand where they are needed: a passive round imports no torch, and only a part of the checks.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks.compile_cache import ColdCacheError, CompileCache, entry_of, make_key
from checks.contract import Device, Finding, Profile, Status
from checks.profiling.neuron import programs_in, programs_of, remember
from checks.worker.profiles import MAX_PROFILES, fits, split
from checks.worker.protocol import shorten

if TYPE_CHECKING:
    from checks.accelerators import Accelerator
    from checks.contract import Check, Context, Limit, Profiling
    from checks.host.machine import Host
    from checks.worker.faults import Fault

REMEDY = "run 'healthd warm' on this node, or share compile_cache of [probe] with nodes like it"
# A single node cannot compile the graphs of ranks of several nodes.
REMEDY_BETWEEN_NODES = (
    "allow the probes to compile (on_cold_cache of [probe]), share compile_cache with a node that has been in such a "
    "group, or let nccom-test run collectives between nodes (nccom_launch of [policy])"
)


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
                self._results.raised(error, self._checks.get(command.get("check", "")))

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
        from checks.limits import hardware_in

        self._identity = {
            "hardware": hardware_in(identity["instance_type"], inventory),
            "accelerator": inventory["accelerator"],
            "versions": identity["versions"],
        }
        self._results.send("surveyed", looked_at=looked_at, inventory=inventory, holders=holders, **identity)

    def warm(self, command: Mapping[str, Any]) -> None:
        """Compile what is not compiled yet, by running those checks once unjudged; one process at a time does this."""
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
        floors, limits = (
            {name: to_record(Limit, limit) for name, limit in self._setup[kind].items()}
            for kind in ("floors", "limits")
        )
        from checks.limits import has_floors

        if self._device is not None and not has_floors(self._device.key):
            floors = {}
        return Context(
            host=self._on(),
            params=load_params(check.params_type, command["params"]),
            tier=Tier(command["tier"]),
            device=self._device_with(faults),
            group=Group(**{**group, "targets": tuple(group["targets"])}) if group else None,
            previous=to_previous(command["previous"]),
            inventory=inventory,
            limits={**floors, **self._learned(), **limits},
            profiling=_profiling(command),
        )

    def _device_with(self, faults: Sequence[Fault]) -> Device | None:
        if self._device is None or not faults:
            return self._device
        from checks.worker.fault_injection import faulty

        return faulty(self._device, faults)

    def _learned(self) -> dict[str, Limit]:
        """The learned limits for this machine and its versions; none where these are not known."""
        from checks.limits import choose

        sets = self._setup.get("learned")
        return choose(sets, **self._identity) if sets and self._identity else {}


class Compiling:
    """
    The compilation of one worker. `setup_compile` is the member `compile` of its setup: None, or {root, graphs, cold,
    retry}.

    `cold` says what to do where something is not compiled: `unknown` (report it) or `compile`.
    """

    def __init__(self, setup_compile: Mapping[str, Any] | None, setup: Mapping[str, Any]) -> None:
        self._compiles = bool(setup_compile) and setup_compile is not None and setup_compile["cold"] == "compile"
        self._retry = bool(setup_compile and setup_compile["retry"])
        self._cache: CompileCache | None = None
        self._own_ranks = len(((setup.get("options") or {}).get("group") or {}).get("targets") or ())
        self._before: frozenset[str] = frozenset()
        self.graphs: tuple[Graphs, ...] = ()
        if setup_compile:
            self.graphs = tuple(Graphs(**graphs) for graphs in setup_compile["graphs"])
            self._cache = cache_of(Path(setup_compile["root"]), setup["inventory"], setup["target"], setup["options"])

    def options(self) -> dict[str, Any]:
        """The options of `bind` in addition to those of the operator."""
        if self._cache is None:
            return {}
        return {"compile_folder": str(self._cache.folder), "retry_failed": self._retry}

    def cold(self) -> list[str]:
        """
        The entries that must be compiled first. Raises ColdCacheError where compiling is not allowed and nothing can
        run.

        Ranks run together or not at all; other checks that are compiled can run (see `require`).
        """
        if self._cache is None:
            return []
        missing = self._cache.missing([graphs.entry for graphs in self.graphs])
        if not self._compiles and any(graphs.ranks is None and graphs.entry not in missing for graphs in self.graphs):
            return []
        if missing and not self._compiles:
            names = ", ".join(dict.fromkeys(entry.partition("/")[0] for entry in missing))
            ranks = max((graphs.ranks or 0 for graphs in self.graphs), default=0)
            if self._own_ranks and ranks > self._own_ranks:
                raise ColdCacheError(f"nothing is compiled here for {names} of {ranks} ranks; {REMEDY_BETWEEN_NODES}")
            raise ColdCacheError(f"nothing is compiled here for {names}; {REMEDY}")
        return missing

    def require(self, check: str) -> None:
        """Raise ColdCacheError where a check's graphs are not compiled and compiling is not allowed."""
        wanted = [graphs.entry for graphs in self.graphs if graphs.check == check]
        if self._cache is not None and not self._compiles and self._cache.missing(wanted):
            raise ColdCacheError(f"nothing is compiled here for {check}; {REMEDY}")

    @contextmanager
    def alone(self) -> Iterator[list[str]]:
        """Be the only process that compiles; yields what was removed of earlier failures, in words."""
        if self._cache is None:
            yield []
            return
        with self._cache.compiling():
            yield self._cache.clear_stale() if self._retry else []

    def is_compiled(self, graphs: Graphs) -> bool:
        """Whether the graphs of a check are compiled; always true without a cache."""
        return self._cache is None or not self._cache.missing([graphs.entry])

    def is_due(self, graphs: Graphs) -> bool:
        """Whether this worker compiles a check ahead for all others; ranks compile together, when they run."""
        return self._compiles and graphs.ranks is None and not self.is_compiled(graphs)

    def started(self, check: str) -> None:
        """A check starts that may compile: what is there from now on is its own."""
        if self._cache is not None and self._compiles and any(graphs.check == check for graphs in self.graphs):
            self._before = programs_in(self._cache.folder)

    def programs(self, check: str) -> list[str]:
        """The compiled programs of a check, the largest first; empty where none are known."""
        if self._cache is None:
            return []
        entries = [graphs.entry for graphs in self.graphs if graphs.check == check and graphs.ranks is None]
        return [str(path) for entry in entries for path in programs_of(self._cache.folder, entry)]

    def ended(self, check: str, seconds: float) -> None:
        """A check has run to its end on this device, so its graphs are compiled."""
        for graphs in self.graphs:
            if graphs.check == check and self._cache is not None and self._compiles and not self.is_compiled(graphs):
                self._cache.record(graphs.entry, seconds)
                remember(self._cache.folder, graphs.entry, programs_in(self._cache.folder) - self._before)


@dataclass(frozen=True)
class Graphs:
    """The graphs of one check as it will be run. `ranks` is None except for collectives."""

    check: str
    tier: str
    params: Mapping[str, Any]
    ranks: int | None

    @property
    def entry(self) -> str:
        """Its name in the manifest."""
        return entry_of(self.check, self.tier, self.params, self.ranks)


def cache_of(root: Path, inventory: Mapping[str, Any], target: str | None, options: Mapping[str, Any]) -> CompileCache:
    """The cache of a worker's device, by what this interpreter has installed. Imports no torch."""
    from checks.accelerators import find_descriptor
    from checks.host.python_packages import read_versions

    described = find_descriptor(inventory.get("accelerator"))
    told = described.compiled_with if described is not None else None
    flags, lnc = told(inventory, options) if told is not None else ((), None)
    return CompileCache(root, make_key(inventory, target, flags, lnc, read_versions()))


class Stopwatch:
    """How long a device has compiled since the start of the stopwatch: by its own count, else by the clock."""

    def __init__(self, device: Device | None) -> None:
        self._count = getattr(device, "compile_seconds", None)
        self._started = time.monotonic()
        self._before = self._count() if self._count is not None else None

    def seconds(self, *, first_run: bool = False) -> float:
        """Seconds of compilation; without a count of the device 0.0, or with `first_run` the whole time."""
        if self._count is not None and self._before is not None:
            return max(0.0, float(self._count()) - float(self._before))
        return time.monotonic() - self._started if first_run else 0.0


def with_fallbacks(device: Device | None, items: Iterator[Any]) -> Iterator[Any]:
    """What a check yields, and an unknown finding where the host's processor did work of the device."""
    fallbacks = getattr(device, "fallbacks", None)
    if device is None or fallbacks is None:
        yield from items
        return
    fallbacks()
    yield from items
    names: Sequence[str] = fallbacks()
    if names:
        text = (
            f"the host's processor computed {', '.join(names[:8])} for the device, so the device was not tested with it"
        )
        yield Finding(status=Status.UNKNOWN, reason="HostFallback", message=text, target=device.target)


class ResultWriter:
    """Writes to the descriptor `output`, as answers to the command `command_id`."""

    def __init__(self, output: int) -> None:
        self.output = output
        self.command_id = 0
        self._pid = os.getpid()

    def stream(self, items: Iterable[Any]) -> int:
        """
        Send what a check yields as it comes; the number of findings that were left out.

        Of findings above the bound the worst is sent. Profiles above theirs are left out.
        """
        from checks.contract import SEVERITY, Evidence, Finding, Progress
        from checks.worker.protocol import MAX_FINDINGS, from_evidence, from_finding, from_progress

        findings = dropped = profiles = 0
        worst_dropped: Finding | None = None
        for item in items:
            if isinstance(item, Finding):
                findings += 1
                if findings < MAX_FINDINGS:
                    self.send("finding", finding=from_finding(item))
                    continue
                dropped += 1
                if worst_dropped is None or SEVERITY[item.status] > SEVERITY[worst_dropped.status]:
                    worst_dropped = item
            elif isinstance(item, Evidence):
                self.send("evidence", evidence=from_evidence(item))
            elif isinstance(item, Progress):
                self.send("progress", progress=from_progress(item))
            elif isinstance(item, Profile):
                if profiles >= MAX_PROFILES or not fits(item):
                    continue  # its finding stands; the runner removes the name of a profile that did not come
                profiles += 1
                for part in split(item):
                    self.send("profile", profile=part)
            else:
                raise TypeError(f"yielded {type(item).__name__}; a check yields Finding, Evidence, Progress or Profile")
        if worst_dropped is not None:
            self.send("finding", finding=from_finding(worst_dropped))
        return max(0, dropped - 1)

    def send(self, kind: str, **members: Any) -> None:
        """
        Send one message.

        A copy of this process, made by a check that forks, sends no results: it says that it tried, which makes the
        check unknown, and ends here, before it takes the commands of this process.
        """
        if os.getpid() != self._pid:
            self._write("second_writer", pid=os.getpid())
            os._exit(1)
        self._write(kind, **members)

    def _write(self, kind: str, **members: Any) -> None:
        from checks.worker.protocol import encode

        line = encode({"kind": kind, "id": self.command_id, **members})
        while line:
            line = line[os.write(self.output, line) :]

    def raised(self, error: BaseException, check: Check | None = None) -> None:
        """
        Report an exception, which is a result as well: its type, its message and its traceback.

        Of a check of the operator's own, the message also says where in the check's file.
        """
        import time
        import traceback

        from checks.host.machine import HostError
        from checks.worker.protocol import MAX_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            error = error.__cause__  # what a generator raises, Python wraps
        place = _place_in(check, error)
        self.send(
            "raised",
            type=type(error).__name__,
            message=shorten(str(error), MAX_MESSAGE_CHARACTERS - len(place)) + place,
            # Errors of the host have a reason of their own, and so has a cold cache.
            reason=error.reason if isinstance(error, (HostError, _cold_cache())) else None,
            traceback=text[-MAX_TRACEBACK_CHARACTERS:],
            monotonic_seconds=time.monotonic(),
        )


def _place_in(check: Check | None, error: BaseException) -> str:
    """` (FILE:LINE)`, the innermost line in the check's own file; empty for built-in checks, or where there is none."""
    import traceback

    from checks.contract import BUILT_IN

    if check is None or check.origin == BUILT_IN:
        return ""
    codes = [getattr(function, "__code__", None) for function in (check.run, check.judge)]
    files = {code.co_filename for code in codes if code is not None}
    frames = traceback.extract_tb(error.__traceback__)
    return next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(frames) if frame.filename in files), "")


def _cold_cache() -> type[ColdCacheError]:
    from checks.compile_cache import ColdCacheError

    return ColdCacheError


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
