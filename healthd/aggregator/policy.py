"""What gates and rules go by: `Policy`, the operator's choice, and `Tuning`, which is not theirs. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from checks.contract import Tier
from healthd.core.model import Mode, ValidationKind

RUN_SECONDS: Mapping[Tier, float] = {
    Tier.PASSIVE: 60.0,
    Tier.QUICK: 300.0,
    Tier.DEEP: 1800.0,
    Tier.SOAK: 14400.0,
}

LONGEST_LEASE_SECONDS = 30 * 86400.0
"""The longest time of a lease that may be asked for: longer than jobs, shorter than for ever."""

MOST_RUNTIME_SECONDS = 366 * 86400.0
"""The longest expected runtime of a job: a year. AWS announces events some weeks ahead."""
HISTORY_DAYS = 28.0
"""How long the events of nodes are kept, and how long a rule's quarantine counts as a repeat. Four weeks."""
OUT_LEAST = 2
"""Nodes of a pool that healthd may keep out by itself however small the pool is: a tenth of a small pool is nobody."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """
    Bounds that follow from how healthd itself works (how long it holds requests, what a turn costs), so that no fleet
    has a reason to set them: not a part of the settings. Tests and simulations pass their own.
    """

    settle_seconds: float = 60.0
    """After a start nothing is called impossible for so long. Two held syncs: each node could have reported twice."""

    member_seconds: float = 60.0
    """A member that has not asked for so long is gone. Four times as long as one request of a hook is held back."""

    lease_ack_seconds: float = 30.0
    """Within how many seconds a node must have stored its lease. One held sync of 25 s and some."""

    collective_contact_seconds: float = 30.0
    """A node that has not even confirmed its order for so long holds up the others no longer. One held sync."""

    collective_grace_seconds: float = 2.0
    """Once a rank is lost, the others of its group have so long to say what they see. Then the group is called off."""

    prune_seconds: float = 3600.0
    """How often what is old is dropped from the database. It grows by some MB an hour at the very most."""

    keep_events: int = 200
    """The newest events kept of each node and job. What people look at when they ask what happened there."""

    max_open_gates: int = 1000
    """More open gates than that are refused. Ten times as many as were measured: each costs a step at every change."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """
    What an operator may decide differently from us: each key depends on the fleet, its jobs or its network.

    Every field has its meaning, unit and the reason for its default below it. What depends on healthd alone is in
    `tuning`, or a constant beside its use.
    """

    tier: Tier = Tier.QUICK
    """Evidence asked of a node when the request names no tier. quick: what every job should run before it starts."""

    max_age_seconds: float = 3600.0
    """How old evidence may be when the request does not say. An hour: short jobs in a row need no new run each."""

    open_gates_per_token: int = 64
    """Most gates that a token or service account of some nodes alone may have open, and requests that are held for it.
    One that speaks for all nodes has no such limit. 64: more than a node ever starts at once."""

    open_gates_per_node: int = 8
    """Most open gates of such tokens that name the same node, and requests of such tokens that are held for it. A node
    starts one job, or a few on some of its devices."""

    wait_seconds: float = 600.0
    """How long a gate holds when the request does not say. Ten minutes: a reboot fits."""

    runtime_seconds: float = 0.0
    """How long a job is expected to run when the request does not say: nodes for which EC2 has scheduled a stop, a
    reboot or the like before its end are left out, and nodes on EC2 whose events are not known. 0: events only warn."""

    mode: Mode = Mode.ENFORCE
    """enforce or observe, when the request does not say. It means what it says unless told otherwise."""

    require: tuple[str, ...] = ()
    """Checks that must be among the evidence of every node. None: what the node has enabled is what is asked."""

    admit_degraded: bool = True
    """Whether a node with warnings only may be admitted. Yes: a warning is not a reason to lose a night."""

    node_grace_seconds: float = 60.0
    """How long a gate holds for a node that nobody ever heard of. A minute: daemons and pods start in that time."""

    join_seconds: float = 1200.0
    """How long members of a group may take to come together. Twenty minutes: images are pulled."""

    silent_seconds: float = 60.0
    """A node that was not heard for so long is excluded. Two held syncs of 25 s and some."""

    run_seconds: Mapping[Tier, float] = field(default_factory=lambda: RUN_SECONDS)
    """Within how long an ordered run must be done, by tier; what is not named stays. Generous: the run bounds itself.
    A node that compiles in the middle (`on_cold_cache`) has its `compile_timeout` besides."""

    lease_grace_seconds: float = 900.0
    """How long a node waits for the workload of a lease to be seen. 15 min: images are pulled."""

    lease_seconds: float = 86400.0
    """How long a lease lasts where no node can see when the job ends, and the request does not say: counted from when
    the job was last seen. At least the expected runtime. A day: most jobs are over by then, and the hook says at
    admission how long it is; a job that runs longer unseen asks for more (`--lease`)."""

    recovery_seconds: float = 300.0
    """After the loss of the database nothing is admitted for so long: nodes that back off come by then. 0: never."""

    collective: bool = True
    """Whether a gate for several nodes runs collectives over them together before it admits. What a job does first."""

    collective_checks: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    """Which collectives, in this order. The three that training steps are made of."""

    collective_deep_checks: tuple[str, ...] = ("data_parallel_step",)
    """What runs over the nodes besides from the deep tier on, and alone in a validation of the kind `training`. Steps
    of all ranks together: what a job does, with gradients that must come out the same on all."""

    nccom_launch: Literal["off", "ssh", "slurm"] = "off"
    """How nccom-test gets onto the nodes, where all nodes of a group are Neuron: by ssh, or as a step of a Slurm job.
    off: ranks of torch run the collectives, as on all other nodes; they need neither keys between nodes nor a job of
    Slurm."""

    collective_ports: tuple[int, int] = (29500, 29999)
    """First and last TCP port on which the first rank of a group waits for the others. Where torch's own default is."""

    collective_start_seconds: float = 60.0
    """How long the ranks of a node may take to start. Importing torch from a cold network file system takes long."""

    collective_join_seconds: float = 30.0
    """How long ranks that have started wait for each other. Longer than any TCP retry that ends well."""

    collective_timeout_seconds: float = 30.0
    """For each collective over a group. A sound one takes milliseconds to seconds; a hang has to end some time."""

    validation_seconds: float = 300.0
    """For collectives and the search for who is at fault, all rounds together. Half of the default wait."""

    topology_labels: tuple[str, ...] = ("switch", "rack", "block", "topology.kubernetes.io/zone")
    """Labels that say what nodes share; nodes that fail together are looked at by them."""

    keep_days: float = 90.0
    """How long decided gates and their evidence are kept. A quarter: long enough to look for patterns."""

    keep_gates: int = 20000
    """The most decided gates that are kept, whatever their age. About 2 GB with the evidence of 64 nodes each."""

    forget_days: float = 28.0
    """A node that was not heard for so long is forgotten, with what rules hold against it; not while it has a lease or
    a person keeps it out. Four weeks, as its history. After a day already it counts neither as one of its pool nor
    among those that are kept out of it."""

    rules: bool = True
    """Whether rules may quarantine nodes at all. No in an aggregator that lives for one job's start."""

    rules_observe: tuple[str, ...] = ()
    """Rules (soft, hard, accused) or reason codes that only say what they would have done. None: they mean it."""

    out_ratio: float = 0.1
    """The share of a pool that healthd may keep out by itself, by rules of quarantine and out of the scheduler's way.
    A tenth: more at once is rather a fault of ours, or of the site. What a person says is always done."""

    tuning: Tuning = field(default_factory=Tuning, metadata={"internal": True})
    """What no operator sets."""

    def __post_init__(self) -> None:
        for tier, seconds in self.run_seconds.items():
            if not seconds > 0:
                raise ValueError(f"run: {tier.value} must be more than 0 s, not {seconds:g}")
        object.__setattr__(self, "run_seconds", {**RUN_SECONDS, **self.run_seconds})
        first, last = self.collective_ports
        if not 1024 <= first <= last <= 65535:
            raise ValueError(f"collective_ports: must be two ports from 1024 to 65535, not {first} and {last}")
        if self.collective and not self.collective_checks:
            raise ValueError("collective_checks: name at least one, or set collective to false")
        self._check_times()
        if not self.keep_days > 0:
            raise ValueError(f"keep_days: must be more than 0, not {self.keep_days:g}")
        if self.keep_gates < 0:
            raise ValueError(f"keep_gates: must be 0 or more, not {self.keep_gates}")
        if not 1 <= self.forget_days <= 3650:
            raise ValueError(f"forget_days: must be from 1 to 3650, not {self.forget_days}")
        if not 0 <= self.out_ratio <= 1:
            raise ValueError(f"out_ratio: must be from 0 to 1, not {self.out_ratio}")
        for name in self.rules_observe:
            if name not in ("soft", "hard", "accused") and not re.fullmatch("[A-Z][A-Za-z0-9]{1,63}", name):
                raise ValueError(f"rules_observe: {name!r} is neither soft, hard, accused nor a reason code")

    def _check_times(self) -> None:
        if not 0 <= self.runtime_seconds <= MOST_RUNTIME_SECONDS:
            raise ValueError(f"runtime: must be from 0 to a year, not {self.runtime_seconds:g} s")
        if not 0 < self.lease_seconds <= LONGEST_LEASE_SECONDS:
            raise ValueError(f"lease: must be more than 0 s and at most 30 d, not {self.lease_seconds:g} s")

    def checks_over_nodes(self, kind: ValidationKind, tier: Tier) -> tuple[str, ...]:
        """What nodes run together. Never empty: without deep checks a validation of training runs collectives."""
        if kind is ValidationKind.TRAINING:
            return self.collective_deep_checks or self.collective_checks
        deep = self.collective_deep_checks if tier.rank >= Tier.DEEP.rank else ()
        return tuple(dict.fromkeys((*self.collective_checks, *deep)))

    def most_out(self, pool_size: int) -> int:
        """How many nodes of a pool of this size healthd may keep out by itself."""
        return max(OUT_LEAST, int(pool_size * self.out_ratio + 1e-9))
