"""What a check may see: the device it works through, the group it is a rank of, and the context that holds all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from checks.contract.records import NO_LIMIT, Evidence, Limit
from checks.contract.words import Tier

if TYPE_CHECKING:
    from checks.host.machine import Host


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


P = TypeVar("P")


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
