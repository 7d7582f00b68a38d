"""What an operator can set for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthd.core.config import tables_of
from healthd.core.integrations import device_tables
from healthd.integrations import INTEGRATIONS

_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_ACCOUNT = re.compile(r"[a-z0-9.-]{1,63}/[a-z0-9.-]{1,253}")
_OF_NAMESPACE = re.compile(r"[a-z0-9.-]{1,63}/[a-z0-9.*?-]{1,253}")
_ACCOUNTS = re.compile(r"[a-z0-9.*?-]{1,63}/[a-z0-9.*?-]{1,253}")
MOST_ACCOUNTS = 100
_CONDITION = re.compile(r"[a-z0-9][a-z0-9.-]{1,250}/[A-Za-z][A-Za-z0-9_.-]{0,62}")


_SIGN = re.compile(r"(taint|condition|label|annotation):([A-Za-z0-9][A-Za-z0-9._/-]{0,316})(?:=(.{0,256}))?")

MAINTENANCE = (
    "condition:MaintenanceInProgress",
    "condition:DrainInProgress",
    "condition:Drained",
    "condition:GracefulNodeShutdownInProgress",
    "taint:medik8s.io/drain",
    "taint:aws-node-termination-handler/scheduled-maintenance",
    "taint:aws-node-termination-handler/asg-lifecycle-termination",
    "taint:aws-node-termination-handler/spot-itn",
    "taint:karpenter.sh/disrupted",
    "taint:baremetal.cluster.gke.io/maintenance",
)
"""
Signs of maintenance by default. The conditions are those of kubernetes.io, "Node lifecycle conditions" (1.37, alpha),
without MaintenancePlanned: nothing has happened then. The taints: medik8s/node-maintenance-operator
(`controllers/taint.go`, NodeMaintenance), aws/aws-node-termination-handler (`pkg/node/node.go`), Karpenter's
disruption taint, Google Distributed Cloud's maintenance mode.
"""


@dataclass(frozen=True, kw_only=True)
class MaintenanceSign:
    """What a Kubernetes node in maintenance bears. `value` None: whatever value it has."""

    kind: str
    name: str
    value: str | None


def parse_maintenance_sign(text: str) -> MaintenanceSign:
    """`taint:KEY`, `condition:TYPE` (True), `label:KEY[=VALUE]`, `annotation:KEY[=VALUE]`; ValueError for all else."""
    match = _SIGN.fullmatch(text)
    if match is None or (match[3] is not None and match[1] in ("taint", "condition")):
        raise ValueError(
            f"maintenance: {text!r} must be taint:KEY, condition:TYPE, label:KEY[=VALUE] or annotation:KEY[=VALUE]"
        )
    return MaintenanceSign(kind=match[1], name=match[2], value=match[3])


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """The node's health as a condition of its Kubernetes node, written from inside the cluster."""

    condition: str | None = None
    """Type of the condition, such as `healthd.internal/Fit` (`.internal` is a domain reserved for private use). None:
    no condition is written."""

    accelerated_hardware_ready: bool = False
    """Also write `AcceleratedHardwareReady`. Dangerous: if node repair is on, False replaces or reboots the instance
    after ten minutes, without a drain. Turn it on only if you want exactly that."""

    events: bool = False
    """Create a Kubernetes Event when the condition's status or reason changes, for `kubectl describe node`. Needs the
    right to create events; the manifests grant it and turn this on."""

    watch_pods: bool = True
    """Watch the pod that a lease names at the API server, so that the lease ends with it. Needs the rights to list and
    watch pods, which the manifests grant; nothing is requested while no lease names a pod. Without it, the control
    groups and the kubelet's list of pods show when the pod has ended."""

    maintenance: tuple[str, ...] = MAINTENANCE
    """What marks the Kubernetes node as in maintenance: `taint:KEY`, `condition:TYPE`, `label:KEY[=VALUE]`,
    `annotation:KEY[=VALUE]`. Gates exclude such a node, and failures on it do not count against it. A plain cordon
    does not count, because it may be the answer to a fault; `taint:node.kubernetes.io/unschedulable` makes it count.
    Needs the rights to list and watch nodes, which the manifests grant. Empty: the node is not watched."""

    node: str | None = None
    """Name of the node in Kubernetes; None: the node's name here."""

    heartbeat_seconds: float = 300.0
    """The condition is rewritten this often even if nothing changed. Five minutes, like the kubelet: every write goes
    to etcd."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with `token` and `ca.crt`, where Kubernetes puts it. Both are read again for each request."""

    api_server: str | None = None
    """URL of the API server; None: from the variables of every pod (KUBERNETES_SERVICE_HOST)."""

    def __post_init__(self) -> None:
        if self.heartbeat_seconds < 30:
            raise ValueError(
                f"heartbeat: must be at least 30 s, not {self.heartbeat_seconds:g} s; each write costs etcd"
            )
        for sign in self.maintenance:
            parse_maintenance_sign(sign)
        if self.events and not self.on:
            raise ValueError("events: report changes of the condition; set 'condition' too")
        if self.condition is not None and not _CONDITION.fullmatch(self.condition):
            raise ValueError(
                f"condition: {self.condition!r} must be DOMAIN/Name; names without a domain belong to Kubernetes"
            )

    @property
    def on(self) -> bool:
        """Whether anything is to be written."""
        return self.condition is not None or self.accelerated_hardware_ready


@dataclass(frozen=True, kw_only=True)
class KubeletSettings:
    """Where the kubelet of the host answers."""

    socket: Path | None = None
    """Unix socket of the kubelet's pod resources; None: /var/lib/kubelet/pod-resources/kubelet.sock of the host."""


@dataclass(frozen=True, kw_only=True)
class KubernetesCallers:
    """
    Service accounts of Kubernetes that may speak here with the tokens that it projects into their pods. ValueError.

    Where an account is in several lists, `admins` beats `nodes`, then come `controllers`, `readers` and `hooks`.
    """

    audience: str | None = None
    """The audience that the tokens are bound to, such as `healthd`: no other service can use a token sent here. None:
    only tokens of the token table are accepted."""

    nodes: tuple[str, ...] = ()
    """Accounts of node daemons, as NAMESPACE/NAME, or patterns for the names of one namespace (`healthd/node-*`). Each
    may only act for the node on which its pod runs."""

    hooks: tuple[str, ...] = ()
    """Accounts of jobs, as NAMESPACE/NAME or patterns of it (`train/*`), with the scope `gate`. Each may only ask for
    jobs of its namespace and for the node on which its pod runs."""

    controllers: tuple[str, ...] = ()
    """Accounts with the scope `gate` for every node and every job, as NAMESPACE/NAME: `healthd kueue`, which gates the
    jobs of all queues."""

    readers: tuple[str, ...] = ()
    """Accounts with the scope `read`, such as Prometheus', as NAMESPACE/NAME."""

    admins: tuple[str, ...] = ()
    """Accounts with the scope `admin`, as NAMESPACE/NAME: anyone who can create their tokens (`kubectl create token`)
    may do everything here."""

    review_seconds: float = 300.0
    """How long a token review by the API server stays valid; a deleted pod keeps access for that long. Five minutes:
    each node costs the API server one call per period."""

    outage_seconds: float = 1800.0
    """How long a review stays valid while the API server cannot be reached. Half an hour covers an update of the
    control plane."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with `token` and `ca.crt` of the aggregator's own account, which may create `tokenreviews`. Both are
    read again for each request."""

    api_server: str | None = None
    """URL of the API server; None: from the variables of every pod (KUBERNETES_SERVICE_HOST)."""

    def __post_init__(self) -> None:
        accounts = {name: getattr(self, name) for name in ("nodes", "hooks", "controllers", "readers", "admins")}
        if self.audience is None:
            if named := next((name for name, some in accounts.items() if some), None):
                raise ValueError(f"{named}: goes with an audience that their tokens are bound to; set 'audience' too")
            return
        if not self.audience or not self.audience.isprintable() or len(self.audience) > 253:
            raise ValueError(f"audience: must be 1 to 253 printable characters, not {self.audience[:40]!r}")
        if not any(accounts.values()):
            raise ValueError(
                "audience: is set but no accounts are listed: set 'nodes', 'hooks', 'controllers', 'readers' or "
                "'admins'"
            )
        for name, listed in accounts.items():
            if len(listed) > MOST_ACCOUNTS:
                raise ValueError(f"{name}: {len(listed)} accounts; {MOST_ACCOUNTS} are allowed, or use patterns")
            form = {"hooks": _ACCOUNTS, "nodes": _OF_NAMESPACE}.get(name, _ACCOUNT)
            for account in listed:
                if not form.fullmatch(account) or account.count("*") > 4:
                    raise ValueError(f"{name}: {account[:80]!r} must be NAMESPACE/NAME, as healthd-system/healthd-node")
        if not 10 <= self.review_seconds <= self.outage_seconds <= 86400:
            raise ValueError(
                f"review: must be between 10 s and outage ({self.outage_seconds:g} s), and that a day at most, not "
                f"{self.review_seconds:g} s"
            )

    @property
    def on(self) -> bool:
        """Whether tokens of service accounts are taken at all."""
        return self.audience is not None


@dataclass(frozen=True, kw_only=True)
class KubernetesActuatorSettings:
    """The taint on nodes of Kubernetes, where `kind` is kubernetes."""

    taint_key: str = "healthd.internal/removed"
    """Key of the taint. `.internal` is reserved for private use, so no one else owns this domain."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with `token` and `ca.crt`, where Kubernetes puts it. Both are read again for each request."""

    api_server: str | None = None
    """URL of the API server; None: from the variables of every pod (KUBERNETES_SERVICE_HOST)."""

    devices: Mapping[str, Any] = tables_of(lambda: device_tables(INTEGRATIONS))
    """What is set for devices, by key: see `healthd.clients.kubernetes.MarkedNodes`."""

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.taint_key):
            raise ValueError(f"taint_key: {self.taint_key!r} is not a taint key; write domain/name")
