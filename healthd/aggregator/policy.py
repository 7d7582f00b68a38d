"""What gates and rules go by: `Policy`, the operator's choice, and `Tuning`, which is not theirs. Pure data."""

from __future__ import annotations

import dataclasses
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


SILENT_SECONDS = 60.0


def longest_hold(silent_seconds: float) -> float:
    """How long nodes may be held at most that are taken for silent after so long: the reverse of `silent_after`."""
    return max((silent_seconds - 10.0) / 2, silent_seconds / 3)


def silent_after(hold_max_seconds: float) -> float:
    """
    How long a node may be silent where its requests are held for so long: one that was lost, the next, and the way.

    A new leader knows nobody, and its nodes come back once they notice that the old one is gone: at worst when the
    request that it held is over. So this is also the least that a takeover must wait for a node.
    """
    return max(SILENT_SECONDS, 2 * hold_max_seconds + 10.0)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """
    Bounds that follow from how healthd itself works (how long it holds requests, what a turn costs), so that no fleet
    has a reason to set them: not a part of the settings. Tests and simulations pass their own.
    """

    settle_seconds: float = SILENT_SECONDS
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
    """Required evidence if the request names no tier. quick: what every job should run before it starts."""

    max_age_seconds: float = 3600.0
    """Maximum age of the evidence if the request does not name one. An hour: short jobs in a row need no new run
    each."""

    open_gates_per_token: int = 64
    """Maximum number of open gates, and of waiting requests, of a token or service account that is limited to some
    nodes. Tokens for all nodes have no such limit. 64: more than a node ever starts at once."""

    open_gates_per_node: int = 8
    """Maximum number of open gates, and of waiting requests, of such tokens for the same node. A node starts one job,
    or a few on some of its devices."""

    wait_seconds: float = 600.0
    """How long a gate waits if the request does not say. Ten minutes: a reboot fits."""

    runtime_seconds: float = 0.0
    """Expected runtime of a job if the request does not name one: nodes with a stop or reboot scheduled by EC2 before
    its end are excluded, and so are EC2 nodes whose events are unknown. 0: events only warn."""

    mode: Mode = Mode.ENFORCE
    """enforce or observe, if the request does not say."""

    require: tuple[str, ...] = ()
    """Checks that must be among the evidence of every node. Empty: the checks that the node has enabled are
    required."""

    admit_degraded: bool = True
    """Whether a node with warnings only may be admitted. Yes: a warning is not worth a lost night."""

    node_grace_seconds: float = 60.0
    """How long a gate waits for a node that has never reported. A minute: daemons and pods start in that time."""

    join_seconds: float = 1200.0
    """Time for the members of a group to join. Twenty minutes, because images are pulled."""

    silent_seconds: float = SILENT_SECONDS
    """A node that has not reported for this long is excluded. A little more than two syncs of 25 s. Left at 60 s,
    it follows from `aggregator.hold_max`: two of these and 10 s. If it is set to less, requests are held for less."""

    run_seconds: Mapping[Tier, float] = field(default_factory=lambda: RUN_SECONDS)
    """Time limit of an ordered run, by tier; tiers that are not named keep their default. Generous, because the run has
    its own limits. A node that compiles during the run (`on_cold_cache`) gets its `compile_timeout` in addition."""

    lease_grace_seconds: float = 900.0
    """How long a node waits for the workload of a lease to appear. 15 min, because images are pulled."""

    lease_seconds: float = 86400.0
    """How long a lease lasts if no node can observe the job's end and the request does not say, counted from when the
    job was last observed; at least the expected runtime. A day: most jobs are over by then, and the hook prints the
    duration at admission. For longer unobserved jobs use `--lease`."""

    recovery_seconds: float = 300.0
    """How long nothing is admitted after the loss of the database; nodes that back off report in that time. 0: no
    wait."""

    collective: bool = True
    """Whether a gate for several nodes runs collectives over them before it admits, as the job will."""

    collective_checks: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    """Which collectives, in this order: the three that training steps consist of."""

    collective_deep_checks: tuple[str, ...] = ("data_parallel_step",)
    """Checks over the nodes that also run from the deep tier on, and alone in a validation of the kind `training`:
    steps of all ranks together, as in a job, with gradients that must match on all."""

    nccom_launch: Literal["off", "ssh", "slurm"] = "off"
    """How nccom-test is started on the nodes if all nodes of a group are Neuron: by ssh, or as a step of a Slurm job.
    off: ranks of torch run the collectives, as on all other nodes; they need neither keys between nodes nor a Slurm
    job."""

    collective_ports: tuple[int, int] = (29500, 29999)
    """First and last TCP port on which the first rank of a group waits for the others, around torch's own default."""

    collective_start_seconds: float = 60.0
    """Time for the ranks of a node to start. Importing torch from a cold network file system takes long."""

    collective_join_seconds: float = 30.0
    """How long started ranks wait for each other. Longer than any successful TCP retry."""

    collective_timeout_seconds: float = 30.0
    """Time limit of each collective over a group. A healthy one takes milliseconds to seconds."""

    validation_seconds: float = 300.0
    """Time limit of collectives and the search for the culprit, all rounds together. Half of the default wait."""

    topology_labels: tuple[str, ...] = ("switch", "rack", "block", "topology.kubernetes.io/zone")
    """Labels that describe what nodes share; they are used to group nodes that fail together."""

    keep_days: float = 90.0
    """How long decided gates and their evidence are kept. A quarter: long enough to look for patterns."""

    keep_gates: int = 20000
    """Maximum number of decided gates kept, whatever their age. About 2 GB with the evidence of 64 nodes each."""

    forget_days: float = 28.0
    """A node that has not reported for this long is removed, with the state of its quarantine rules, unless it has a
    lease or an operator has quarantined it. Four weeks, like its history. After one day it no longer counts as a member
    of its pool."""

    rules: bool = True
    """Whether rules may quarantine nodes. Off in an aggregator that only lives while one job starts."""

    rules_observe: tuple[str, ...] = ()
    """Rules (soft, hard, accused) or reason codes that only report what they would do. Empty: all rules act."""

    out_ratio: float = 0.1
    """The share of a pool that healthd may take out by itself, by quarantine and by the actuator. A tenth: more at once
    suggests a fault of healthd or of the site. Actions of operators have no such limit."""

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
                raise ValueError(f"rules_observe: {name!r} is not soft, hard, accused or a reason code")

    def _check_times(self) -> None:
        if not 0 <= self.runtime_seconds <= MOST_RUNTIME_SECONDS:
            raise ValueError(f"runtime: must be from 0 to a year, not {self.runtime_seconds:g} s")
        if not 0 < self.lease_seconds <= LONGEST_LEASE_SECONDS:
            raise ValueError(f"lease: must be more than 0 s and at most 30 d, not {self.lease_seconds:g} s")

    def with_hold(self, hold_max_seconds: float) -> Policy:
        """
        The policy of an aggregator that may hold requests for so long.
        """
        silent = silent_after(hold_max_seconds) if self.silent_seconds == SILENT_SECONDS else self.silent_seconds
        settle = self.tuning.settle_seconds
        if settle == SILENT_SECONDS:
            settle = silent_after(min(hold_max_seconds, longest_hold(silent)))
        tuning = dataclasses.replace(self.tuning, settle_seconds=settle)
        return dataclasses.replace(self, silent_seconds=silent, tuning=tuning)

    def checks_over_nodes(self, kind: ValidationKind, tier: Tier) -> tuple[str, ...]:
        """What nodes run together. Never empty: without deep checks a validation of training runs collectives."""
        if kind is ValidationKind.TRAINING:
            return self.collective_deep_checks or self.collective_checks
        deep = self.collective_deep_checks if tier.rank >= Tier.DEEP.rank else ()
        return tuple(dict.fromkeys((*self.collective_checks, *deep)))

    def most_out(self, pool_size: int) -> int:
        """How many nodes of a pool of this size healthd may keep out by itself."""
        return max(OUT_LEAST, int(pool_size * self.out_ratio + 1e-9))
