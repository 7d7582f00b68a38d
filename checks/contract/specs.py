"""The check itself: the `@check` decorator, what it makes, and its parameters."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checks.contract.context import Context
from checks.contract.records import Evidence, Finding, Missing, Profile, Progress
from checks.contract.words import Scope, Tier

Run = Callable[[Context[Any]], Iterator["Finding | Evidence | Progress | Profile"]]
Judge = Callable[[Sequence[Evidence], Sequence[Missing]], Iterator[Finding]]

BUILT_IN = "built-in"
"""The origin of the checks that come with healthd."""


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
class CheckInfo:
    """What a check declares, without its code."""

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
    judged: bool = False
    """It compares devices: its workers give evidence, which is judged afterwards."""
    accelerators: bool = False
    """Whether it looks at accelerators and at nothing else, so that a fault of hardware that it finds is theirs."""
    accelerator_faults: tuple[str, ...] = ()
    """`CODE: words` of a check that looks at more: findings of this reason that begin so are faults of accelerators."""
    collective: bool = False
    """Whether it measures a collective, of which Prometheus gets bus bandwidth and time by size."""
    series: tuple[Series, ...] = ()
    """What Prometheus gets of its measurements of each device."""
    origin: str = BUILT_IN
    """Where it comes from: `BUILT_IN`, or a file, an entry point or a program."""


@dataclass(frozen=True, kw_only=True)
class Check(CheckInfo):
    """One named measurement with a judgement: what `@check` makes of a generator function."""

    run: Run
    judge: Judge | None = None

    def info(self) -> CheckInfo:
        """What it declares."""
        return CheckInfo(**{field.name: getattr(self, field.name) for field in dataclasses.fields(CheckInfo)})

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
