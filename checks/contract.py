"""
The contract between a check and whoever runs it: words, records and the `@check` decorator.

A check is a pure generator of what it can see: it does not sleep, retry, log or catch broadly, and
knows nothing of HTTP, of processes or of the service. Standard library alone, Python 3.10.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from checks.host import Host


class Status(str, enum.Enum):
    """Of a finding or a result. Ordered by `worst`, never by `<`: "unknown" is not "less than" fail."""

    SKIP = "skip"
    PASS = "pass"
    WARN = "warn"
    UNKNOWN = "unknown"
    FAIL = "fail"


SEVERITY: Mapping[Status, int] = {status: rank for rank, status in enumerate(Status)}


def worst(statuses: Iterable[Status]) -> Status:
    """The most severe status; UNKNOWN where there is none at all, because silence is not health."""
    return max(statuses, key=SEVERITY.__getitem__, default=Status.UNKNOWN)


class Tier(str, enum.Enum):
    """How much a run may cost. A run of one tier runs the checks of that tier and of all lighter ones."""

    PASSIVE = "passive"
    QUICK = "quick"
    DEEP = "deep"
    SOAK = "soak"

    @property
    def rank(self) -> int:
        """0 for passive up to 3 for soak."""
        return _TIER_RANK[self.value]


# Asked for each result of each node that a gate judges: a look-up, not a search.
_TIER_RANK: Mapping[str, int] = {tier.value: rank for rank, tier in enumerate(Tier)}


class Blame(str, enum.Enum):
    """Whose fault it is. Only NODE may mark a node."""

    NODE = "node"
    PATH = "path"
    CHECK = "check"
    CONTROL = "control"


class Action(str, enum.Enum):
    """What to do about a reason."""

    NONE = "none"
    RETRY = "retry"
    RESET_DEVICE = "reset_device"
    REBOOT = "reboot"
    REPLACE = "replace"
    INSPECT = "inspect"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """
    What a measurement must keep within. `origin` says who set it.

    config (the operator), baseline (learned), catalogue (the instance type), program (a plug-in), derived (from what
    the machine is), default (the check's own) or none.
    """

    lower: float | None
    upper: float | None
    origin: str


NO_LIMIT = Limit(lower=None, upper=None, origin="none")


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


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """
    What a worker measured on its own device, for a check that compares devices.

    Only evidence of one `key` (device kind, instruction set, library versions) may be compared.
    `data` holds JSON values.
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


P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Context(Generic[P]):
    """
    All that a check may see.

    `device` is None in passive checks and `group` None outside collectives. `inventory` is what the accelerator
    reported (see `checks.accelerators`). `limits` maps measurement names to limits, most specific first:
    `name@target`, then `name`.
    """

    host: Host
    params: P
    tier: Tier
    device: Device | None
    group: Group | None
    previous: Previous | None
    inventory: Mapping[str, Any]
    limits: Mapping[str, Limit]

    def limit(self, name: str, target: str = "") -> Limit:
        """The limit in force for a measurement; NO_LIMIT where nobody set one: then the speed is shown unjudged."""
        return self.limits.get(f"{name}@{target}") or self.limits.get(name) or NO_LIMIT


Run = Callable[[Context[Any]], Iterator["Finding | Evidence | Progress"]]
Judge = Callable[[Sequence[Evidence], Sequence[Missing]], Iterator[Finding]]


class Scope(str, enum.Enum):
    """Where a check runs: once for the node, once on each device, or as one group with a rank on each device."""

    NODE = "node"
    DEVICE = "device"
    GROUP = "group"


@dataclass(frozen=True, kw_only=True)
class Check:
    """
    One named measurement with a judgement: what `@check` makes of a generator function.

    `timeout_seconds` counts from the moment the worker is ready. `interval_seconds` is how often the daemon repeats it
    unprompted.
    """

    name: str
    run: Run
    judge: Judge | None
    tier: Tier
    interval_seconds: float
    timeout_seconds: float
    scope: Scope
    doc: str

    @property
    def active(self) -> bool:
        """Active checks use the devices, so they only run where no job has them."""
        return self.tier is not Tier.PASSIVE

    @property
    def params_type(self) -> type[Any]:
        """The dataclass of the check's parameters, read from the annotation `Context[Params]`."""
        context = next(iter(typing.get_type_hints(self.run).values()))
        (params_type,) = typing.get_args(context) or (type(None),)
        return typing.cast("type[Any]", params_type)

    def __call__(self, ctx: Context[Any]) -> Iterator[Finding | Evidence | Progress]:
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
) -> Callable[[Run], Check]:
    """Make a check of a generator function; its name is the function's, its page in the docs is the docstring."""
    if Tier(tier) is Tier.PASSIVE and Scope(scope) is not Scope.NODE:
        raise ValueError(f"a check with scope={scope!r} uses devices, so its tier cannot be 'passive'; use 'quick'")

    def decorate(run: Run) -> Check:
        return Check(
            name=run.__name__,
            run=run,
            judge=judge,
            tier=Tier(tier),
            interval_seconds=interval_seconds,
            timeout_seconds=timeout_seconds,
            scope=Scope(scope),
            doc=run.__doc__ or "",
        )

    return decorate


def load_params(params_type: type[Any], values: Mapping[str, Any]) -> Any:
    """
    The parameters of a check from plain values.

    Raises ValueError naming the key and the nearest right one, or the type that was wanted.
    """
    known = {f.name: f for f in dataclasses.fields(params_type)} if dataclasses.is_dataclass(params_type) else {}
    for key in values:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(sorted(known)) or 'none'}"
            raise ValueError(f"no parameter {key!r}{hint}")
    hints = typing.get_type_hints(params_type) if known else {}
    return params_type(**{key: _convert(key, value, hints[key]) for key, value in values.items()})


def _convert(key: str, value: Any, wanted: Any) -> Any:
    """Plain JSON or TOML values into the few types that parameters may have: bool, int, float, str, tuples, None."""
    origin = typing.get_origin(wanted)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"parameter {key!r} must be a list, not {value!r}")
        return tuple(_convert(key, item, typing.get_args(wanted)[0]) for item in value)
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
    raise ValueError(f"parameter {key!r} must be {names}, not {value!r}")
