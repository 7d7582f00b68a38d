"""The contract between a check and the runner: terms, records, what a check can see, and the `@check` decorator."""

from __future__ import annotations

import collections.abc
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from checks.words import SEVERITY as SEVERITY
from checks.words import Action as Action
from checks.words import Blame as Blame
from checks.words import Scope as Scope
from checks.words import Status as Status
from checks.words import Tier as Tier
from checks.words import worst as worst

if TYPE_CHECKING:
    from checks.host.machine import Host

__all__ = [
    "BUILT_IN",
    "DEVICE_RESETS",
    "NO_LIMIT",
    "SEVERITY",
    "Action",
    "Blame",
    "Check",
    "CheckDeclaration",
    "CheckInfo",
    "Context",
    "Device",
    "Evidence",
    "Finding",
    "Group",
    "Judge",
    "Limit",
    "Measurement",
    "Mesh",
    "MeshOperation",
    "Missing",
    "NoParams",
    "P",
    "ParameterError",
    "Previous",
    "Profile",
    "Profiling",
    "Program",
    "Progress",
    "Run",
    "Scope",
    "Series",
    "Status",
    "Tier",
    "check",
    "load_params",
    "make_finding",
    "worst",
]

PROFILE_FORMAT = "trace-event-json-gzip"
"""The Trace Event Format of Chrome and Perfetto, as JSON, compressed by gzip."""

MAX_PROFILE_BYTES = 1 << 20
"""Of the content of one profile."""

DEVICE_RESETS = "device_resets"
"""
The key of evidence that says when devices were last reset: `resets` by target, in seconds of the kernel log's clock,
and `now` by the same clock. Results from before a reset do not stand for the device.
"""

P = TypeVar("P")

BUILT_IN = "built-in"
"""The origin of the checks that come with healthd."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """
    What a measurement must keep within. `origin` says who set it.

    config (the operator), baseline (learned), floor (half of a published peak), catalogue (the instance type), program
    (a plug-in), derived (from what the machine is), default (the check's own) or none.
    """

    lower: float | None
    upper: float | None
    origin: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """
    One number with its limits.

    `name` ends in the unit and is unique over all checks (`matmul_flops_per_second`); None as value means
    that it was looked for and not found. `labels` tells apart what shares a name, by bounded words
    (dtype, size_bytes).
    """

    name: str
    value: float | None
    lower: float | None
    upper: float | None
    origin: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """
    One observation of a check about one target.

    `reason` is a code of `checks.reasons` (None with pass alone); `blame` and `action` None mean the reason's
    own. Made by `checks.limits` wherever a number is judged.
    """

    status: Status
    reason: str | None
    message: str
    target: str
    measurements: tuple[Measurement, ...] = ()
    blame: Blame | None = None
    action: Action | None = None
    profile: str | None = None
    """The id of the profile that shows where the time went; None where none was taken, or nobody keeps it."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one more repetition of a probe did, operation by operation; a check yields it before its findings."""

    id: str
    """Lower-case letters, digits, `_`, `.` and `-`: it is the name of a file."""
    target: str
    """The device."""
    said: str
    """The operations that took most of the time, in words."""
    format: str
    """Of the content: `PROFILE_FORMAT`."""
    content: bytes
    """At most `MAX_PROFILE_BYTES`."""


def make_finding(
    status: Status, reason: str | None, message: str, target: str = "node", action: Action | None = None
) -> Finding:
    """A finding without numbers, and so none that passes: a pass has a measurement."""
    return Finding(status=status, reason=reason, message=message, target=target, action=action)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """
    What a worker measured on its own device, for a check that compares devices.

    Only evidence of one `key` (device kind, instruction set, library versions) may be compared.
    `data` holds JSON values. Where it has `digests` (by place, in the order of computation), `dtype` and `stable`, the
    digests are also compared over nodes.
    """

    target: str
    key: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """
    A sign of life of a rank, so that a hang has an address.

    `event` is joined (the rank is here), entered or left (of the operation `step`);
    `monotonic_seconds` is CLOCK_MONOTONIC of the machine.
    """

    step: str
    event: str
    monotonic_seconds: float


@dataclass(frozen=True, kw_only=True)
class Missing:
    """
    A target that was to give evidence and gave none, as `judge` sees it.

    `reason` is Timeout, Crashed, CheckError, Garbage, MissingDevice or Busy; `message` the last words;
    `progress` what had been heard, oldest first; `order` counts up in the order in which the targets ended, so
    that the first to die can be told from its victims (None: it never ended by itself). `action` None is the reason's.
    """

    target: str
    reason: str
    message: str
    progress: tuple[Progress, ...] = ()
    order: int | None = None
    action: Action | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """
    The collective that this worker is a rank of.

    `rendezvous` is a torch.distributed init URL (file:// inside a node, tcp:// between nodes) and names the
    group: the same value again means the same process group, still open. `targets` gives the device target of
    every rank. `seed` is common to all ranks. `leave` says that the group is not wanted after this check.
    """

    rank: int
    size: int
    rendezvous: str
    interface: str | None
    seed: int
    timeout_seconds: float
    targets: tuple[str, ...]
    leave: bool = False


@dataclass(frozen=True, kw_only=True)
class Previous:
    """The last evidence of the same check, for counters: None of it across a reboot."""

    evidence: tuple[Evidence, ...]
    elapsed_seconds: float
    boot_id: str | None


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """That a probe may be profiled: of what is slow, and with `always` of everything that is timed."""

    always: bool
    until: float
    """When the check must have ended (monotonic): a profile must not cost it its results."""


class Device(Protocol):
    """
    The device that a worker is bound to; every check works through it, so that faults can sit where real ones do.

    `torch` is the module and `torch_device` what tensors are made on. `key` names what may be compared with what.
    `matmul_rows` is the size of a square product that keeps the device at work for some milliseconds. `members` are the
    devices that this one is made of, where one process drives several as a `Mesh`; else it is empty.

    Work may be recorded and done later: what it does is certain after `synchronize`, `read` and `measure` alone.
    """

    target: str
    key: str
    torch: Any
    torch_device: Any
    matmul_rows: int
    members: tuple[Device, ...]

    @property
    def collective_backend(self) -> str:
        """Of torch.distributed, for ranks on such devices. Raises RuntimeError where there is none."""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    def available_bytes(self) -> int | None:
        """Memory that a probe could allocate now; None when it cannot be told."""

    def read(self, tensor: Any) -> Any:
        """The tensor as the host sees it, contiguous, on the CPU: the one door by which results reach a judgement."""

    def measure(self, operation: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
        """Seconds of each of `repeats` runs of `operation`, synchronized, after `warmup` runs that do not count."""


class MeshOperation(Protocol):
    """A collective of a mesh, with its inputs in place."""

    def run(self) -> object:
        """Do it once more."""

    def outputs(self) -> tuple[Any, ...]:
        """What the last run left on each member, in the order of `members`: to be read through that member."""


class Mesh(Device, Protocol):
    """Several devices driven by one process, where processes on single ones cannot talk to each other."""

    def collective(self, name: str, contributions: Any) -> MeshOperation:
        """
        An all_gather, all_reduce or reduce_scatter of what each member contributes  # [members, elements], on the host.

        Raises ValueError for another name.
        """


@dataclass(frozen=True, kw_only=True)
class Context(Generic[P]):
    """
    All that a check may see.

    `device` is None in passive checks and `group` None outside collectives. `inventory` is what the accelerator
    reported (see `checks.accelerators`). `limits` maps measurement names to limits, most specific first:
    `name@target`, then `name`. `profiling` None means that nobody wants profiles.
    """

    host: Host
    params: P
    tier: Tier
    device: Device | None
    group: Group | None
    previous: Previous | None
    inventory: Mapping[str, Any]
    limits: Mapping[str, Limit]
    profiling: Profiling | None = None

    def limit(self, name: str, target: str = "") -> Limit:
        """The limit in force for a measurement; NO_LIMIT where nobody set one: then the speed is shown unjudged."""
        return self.limits.get(f"{name}@{target}") or self.limits.get(name) or NO_LIMIT


@dataclass(frozen=True, kw_only=True)
class Series:
    """A measurement of each device that Prometheus gets, as `healthd_device_` and the name of the measurement."""

    measurement: str
    help: str
    labels: tuple[str, ...] = ()
    """The measurement's labels that the series keeps, beside `device`."""


@dataclass(frozen=True, kw_only=True)
class Program:
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
class CheckDeclaration:
    """What a check declares and a node tells of it."""

    name: str
    """Unique among all checks."""
    tier: Tier
    """The lightest tier whose runs contain it."""
    scope: Scope
    """Whether it runs on the node, on each device, or on a group of ranks."""
    interval_seconds: float
    """How often the daemon repeats it unprompted."""
    timeout_seconds: float
    """Its time limit on one worker, from the moment the worker is ready."""
    doc: str
    """Its docstring."""
    accelerators: bool = False
    """Whether it looks at accelerators and at nothing else, so that a fault of hardware that it finds is theirs."""
    accelerator_faults: tuple[str, ...] = ()
    """`CODE: words` of a check that looks at more: findings of this reason that begin so are faults of accelerators."""
    collective: bool = False
    """Whether it measures a collective, of which Prometheus gets bus bandwidth and time by size."""
    series: tuple[Series, ...] = ()
    """What Prometheus gets of its measurements of each device."""


@dataclass(frozen=True, kw_only=True)
class CheckInfo(CheckDeclaration):
    """All that a check declares, without its code."""

    judged: bool = False
    """It compares devices: its workers give evidence, which is judged afterwards."""
    origin: str = BUILT_IN
    """Where it comes from: `BUILT_IN`, or a file, an entry point or a program."""


@dataclass(frozen=True, kw_only=True)
class Check(CheckInfo):
    """One named measurement with a judgement: what `@check` makes of a generator function."""

    run: Run
    judge: Judge | None = None

    def info(self) -> CheckInfo:
        return CheckInfo(**{field.name: getattr(self, field.name) for field in dataclasses.fields(CheckInfo)})

    @property
    def active(self) -> bool:
        """Active checks use the devices, so they only run where no job has them."""
        return self.tier is not Tier.PASSIVE

    @property
    def params_type(self) -> type[Any]:
        """The dataclass of the check's parameters, read from the annotation `Context[Params]`; without one: none."""
        context = next(iter(typing.get_type_hints(self.run).values()), None)
        (params_type,) = typing.get_args(context) or (type(None),)
        return typing.cast("type[Any]", params_type)

    def __call__(self, ctx: Context[Any]) -> Iterator[Finding | Evidence | Progress | Profile]:
        """Run it here and now: what tests do."""
        return self.run(ctx)


@dataclass(frozen=True)
class NoParams:
    """For checks that have nothing to set."""


def check(
    *,
    tier: str,
    interval_seconds: float,
    timeout_seconds: float,
    scope: str = "node",
    judge: Judge | None = None,
    accelerators: bool = False,
    accelerator_faults: tuple[str, ...] = (),
    collective: bool = False,
    series: tuple[Series, ...] = (),
) -> Callable[[Run], Check]:
    """
    Make a check of a generator function; its name is the function's, its page in the docs is the docstring.

    `accelerators` and `collective` need only be said by a check of node scope: the others use the devices, and a check
    of a group is a collective.
    """
    if Tier(tier) is Tier.PASSIVE and Scope(scope) is not Scope.NODE:
        raise ValueError(f"a check with scope={scope!r} uses devices, so its tier cannot be 'passive'; use 'quick'")

    def decorate(run: Run) -> Check:
        return Check(
            name=run.__name__,
            run=run,
            judge=judge,
            judged=judge is not None,
            tier=Tier(tier),
            interval_seconds=interval_seconds,
            timeout_seconds=timeout_seconds,
            scope=Scope(scope),
            doc=run.__doc__ or "",
            accelerators=accelerators or Scope(scope) is not Scope.NODE,
            accelerator_faults=accelerator_faults,
            collective=collective or Scope(scope) is Scope.GROUP,
            series=series,
        )

    return decorate


class ParameterError(ValueError):
    """A parameter that a check cannot take. `path` leads to it from the table of the check."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


def load_params(params_type: type[Any], values: Mapping[str, Any]) -> Any:
    """
    The parameters of a check from plain values.

    Raises ParameterError naming the key and the nearest right one, or the type that was wanted. A record may refuse
    its values by a ParameterError too.
    """
    return _load(params_type, values, ())


def _load(params_type: type[Any], values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    known = {f.name: f for f in dataclasses.fields(params_type)} if dataclasses.is_dataclass(params_type) else {}
    for key in values:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(sorted(known)) or 'none'}"
            raise ParameterError(f"no parameter {'.'.join((*path, key))!r}{hint}", *path, key)
    for name, one in known.items():
        optional = one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
        if name not in values and not optional:
            raise ParameterError(f"{'.'.join((*path, name))!r} must be set", *path)
    hints = typing.get_type_hints(params_type) if known else {}
    converted = {key: _convert((*path, key), value, hints[key]) for key, value in values.items()}
    try:
        return params_type(**converted)
    except ParameterError as error:
        raise ParameterError(f"{'.'.join((*path, *error.path))}: {error}", *path, *error.path) from None


def _convert(path: tuple[str, ...], value: Any, wanted: Any) -> Any:
    """
    Plain JSON or TOML values into the few types that parameters may have: bool, int, float, str, tuples, None, and
    tables of records by name.
    """
    key = ".".join(path)
    origin = typing.get_origin(wanted)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ParameterError(f"parameter {key!r} must be a list, not {value!r}", *path)
        return tuple(_convert(path, item, typing.get_args(wanted)[0]) for item in value)
    if origin is collections.abc.Mapping:
        for name, members in value.items() if isinstance(value, Mapping) else (("", value),):
            if not isinstance(members, Mapping):
                raise ParameterError(f"parameter {'.'.join(filter(None, (key, name)))!r} must be a table", *path)
        return {name: _load(typing.get_args(wanted)[1], members, (*path, name)) for name, members in value.items()}
    options = typing.get_args(wanted) if origin is not None else (wanted,)
    if value is None and type(None) in options:
        return None
    if bool in options and isinstance(value, bool):
        return value
    if not isinstance(value, bool):
        for option in (int, float, str):
            if option in options and isinstance(value, option):
                return value
        if float in options and isinstance(value, int):
            return float(value)
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ParameterError(f"parameter {key!r} must be {names}, not {value!r}", *path)


NO_LIMIT = Limit(lower=None, upper=None, origin="none")


Run = Callable[[Context[Any]], Iterator["Finding | Evidence | Progress | Profile"]]


Judge = Callable[[Sequence[Evidence], Sequence[Missing]], Iterator[Finding]]
