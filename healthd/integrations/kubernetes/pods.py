"""
Watches the pods that leases name, and reports when they have ended.

Three sources, the best first: the API server (a watch on that one pod: it knows UID and phase), the control group of
the UID, the kubelet's list of pods (by name). None is queried while no lease names a pod. A source only counts as
evidence that a pod has ended if it has shown that pod before: an unknown name may belong to another cluster. A source
that does not respond is no evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from healthd.clients.kubernetes import (
    FIRST_PAUSE_SECONDS,
    ApiServer,
    KubernetesError,
    keep_following,
    members,
    pods_path,
    records,
    watch_seconds,
)
from healthd.core.tasks import Tasks, wait_for
from healthd.core.threads import in_thread
from healthd.core.workload import Pod
from healthd.integrations.kubernetes import kubelet
from healthd.integrations.kubernetes.server import server_of_pod
from healthd.integrations.kubernetes.settings import KubeletSettings, KubernetesSettings
from healthd.node.occupancy.watching import PodFate
from healthd.node.settings import AllocationSettings, NodeSettings

log = logging.getLogger(__name__)

NEEDS = "list and watch on pods"
IDLE_SECONDS = 3600.0
# How often a pod is listed anew that the kubelet has no more and the API server still shows.
RELIST_SECONDS = 30.0
# Beyond the kubelet's own time limit, before a look at this machine counts as stuck.
SLACK_SECONDS = 1.0
FINAL_PHASES = ("Succeeded", "Failed")

# Where kubelets put the groups of pods: cgroup v2 and v1 (whose hierarchies all have the same groups), with systemd or
# without; by quality of service. Source: k8s.io/kubernetes/pkg/kubelet/cm.
_HIERARCHIES = ("", "cpu", "memory", "pids")
_SYSTEMD = (
    "kubepods.slice/kubepods-pod{}.slice",
    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice",
    "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice",
)
_PLAIN = ("kubepods/pod{}", "kubepods/burstable/pod{}", "kubepods/besteffort/pod{}")


class Source(str, enum.Enum):
    """Who has shown a pod."""

    API = "api"
    CGROUP = "cgroup"
    KUBELET = "kubelet"


@dataclass(frozen=True, kw_only=True)
class ApiPod:
    """A pod as the API server has it."""

    uid: str
    phase: str


@dataclass(frozen=True, kw_only=True)
class PodLooks:
    """
    What each source says of a pod now. `api_answers`: `api` is what the server has, None for no pod of that name.
    `cgroup` and `kubelet` say whether it is there; None where that cannot be told.
    """

    api_answers: bool = False
    api: ApiPod | None = None
    cgroup: bool | None = None
    kubelet: bool | None = None


def judge_pod(pod: Pod, looks: PodLooks, seen_by: tuple[str, ...]) -> PodFate:
    """
    Whether a pod goes on, by who has shown it until now: pure. `pod` has the UID by which it was seen first.

    One that the API server has no more goes on as long as its processes are seen: it may have been deleted by force.
    """
    found = looks.api
    if looks.api_answers and found is not None and pod.uid in (None, found.uid):
        if found.phase in FINAL_PHASES:
            return PodFate(ended=f"pod {pod.full_name} has ended ({found.phase})")
        return PodFate(there=True, seen_by=_showing(looks), uid=found.uid)
    if looks.cgroup:
        return PodFate(there=True, seen_by=_showing(looks), uid=pod.uid)
    if looks.api_answers and seen_by:
        if found is not None:
            return PodFate(ended=f"pod {pod.full_name} was replaced by another pod with its name")
        if not looks.kubelet:
            return PodFate(ended=f"pod {pod.full_name} no longer exists")
    if looks.cgroup is False and Source.CGROUP in seen_by:
        return PodFate(ended=f"the control group of pod {pod.full_name} no longer exists")
    if looks.kubelet:
        return PodFate(there=True, seen_by=_showing(looks), uid=pod.uid)
    if looks.kubelet is False and Source.KUBELET in seen_by:
        return PodFate(ended=f"the kubelet no longer has pod {pod.full_name}")
    return PodFate()


def _showing(looks: PodLooks) -> tuple[str, ...]:
    shown = {Source.API: looks.api is not None, Source.CGROUP: looks.cgroup, Source.KUBELET: looks.kubelet}
    return tuple(source.value for source, there in shown.items() if there)


def cgroup_there(root: Path, uid: str | None) -> bool | None:
    """Whether the host has a control group of the pod; None where the groups of pods are not to be seen."""
    try:
        return _cgroup_there(root, uid)
    except OSError:
        return None


def _cgroup_there(root: Path, uid: str | None) -> bool | None:
    visible = False
    for name in _HIERARCHIES:
        place = root / "sys/fs/cgroup" / name
        for base, patterns, own in (
            ("kubepods.slice", _SYSTEMD, (uid or "").replace("-", "_")),
            ("kubepods", _PLAIN, uid),
        ):
            if uid is None or not (place / base).is_dir():
                continue
            visible = True
            if any((place / pattern.format(own)).is_dir() for pattern in patterns):
                return True
    return False if visible else None


class PodWatch:
    """
    A `healthd.node.occupancy.watching.WorkloadWatch`: keeps what each source says of the pods up to date.

    `server` None: there is no API server to ask.
    """

    def __init__(
        self,
        server: ApiServer | None,
        host_root: Path | None,
        allocations: AllocationSettings,
        *,
        tasks: Tasks,
        look_seconds: float,
        environ: Mapping[str, str] = os.environ,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._server = server
        self._root = host_root or Path("/")
        self._allocations = allocations
        self._tasks = tasks
        self._look_seconds = look_seconds
        self._namespace = kubelet.own_namespace(Path("/"), environ)
        self._first_pause_seconds = first_pause_seconds
        self._looks: dict[str, PodLooks] = {}
        self._pods: dict[str, Pod] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._local: asyncio.Future[tuple[frozenset[str] | None, Mapping[str, bool | None]]] | None = None
        self._list_anew_at = -math.inf
        self._wake = asyncio.Event()
        self._complaint = ""
        self.on_change: Callable[[], None] = lambda: None

    @property
    def looks(self) -> Mapping[str, PodLooks]:
        """What is seen now of each pod that is followed, by NAMESPACE/NAME."""
        return self._looks

    def fate(self, pod: Pod, seen_by: tuple[str, ...]) -> PodFate:
        """As in `WorkloadWatch`."""
        return judge_pod(pod, self._looks.get(pod.full_name, PodLooks()), seen_by)

    def follow(self, pods: tuple[Pod, ...]) -> None:
        """From now on look at these pods, and at no others."""
        wanted = {pod.full_name: pod for pod in pods}
        if wanted == self._pods:
            return
        for name, before in self._pods.items():
            if name not in wanted or before.uid not in (None, wanted[name].uid):  # gone, or another one of its name
                self._looks.pop(name, None)
                if name in self._watches:
                    self._watches.pop(name).cancel()
        self._pods = wanted
        self._wake.set()

    async def run(self) -> None:
        """Look for ever. What the API server said before counts no more once this has ended."""
        try:
            while True:
                self._start_watches()
                await self._look()
                await wait_for(self._wake, self._look_seconds if self._pods else IDLE_SECONDS)
        finally:
            for watch in self._watches.values():
                watch.cancel()
            self._watches.clear()
            self._looks.clear()

    def _start_watches(self) -> None:
        for name, pod in self._pods.items():
            if (ended := self._watches.get(name)) is not None and ended.done():
                del self._watches[name]
                ended.result()  # it never returns: what it raised is an error of ours
            if self._server is not None and name not in self._watches:
                work = self._watch(self._server, pod)
                self._watches[name] = self._tasks.start(f"watch over pod {name}", work)

    # --- this machine -------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Look at the control groups and ask the kubelet. A look that is stuck is no answer."""
        pods = dict(self._pods)
        if not pods:
            return
        if self._local is None or self._local.done():
            self._local = in_thread("look at pods", lambda: self._see(pods))
        done, _ = await asyncio.wait([self._local], timeout=self._allocations.timeout_seconds + SLACK_SECONDS)
        names, groups = self._local.result() if done else (None, {})
        for name in pods:
            listed = None if names is None else name in names
            self._note(name, replace(self._looks.get(name, PodLooks()), cgroup=groups.get(name), kubelet=listed))
            self._list_anew_if_stale(name)

    def _see(self, pods: Mapping[str, Pod]) -> tuple[frozenset[str] | None, Mapping[str, bool | None]]:
        return self._listed(), {name: cgroup_there(self._root, pod.uid) for name, pod in pods.items()}

    def _list_anew_if_stale(self, name: str) -> None:
        """A watch whose connection broke without a word says for minutes what was true before."""
        look, now = self._looks.get(name, PodLooks()), asyncio.get_running_loop().time()
        stale = look.api is not None and look.kubelet is False and not look.cgroup
        if stale and name in self._watches and now >= self._list_anew_at:
            self._list_anew_at = now + RELIST_SECONDS
            self._watches.pop(name).cancel()
            self._start_watches()

    def _listed(self) -> frozenset[str] | None:
        if not self._allocations.read:
            return None
        socket, timeout = self._allocations.of("kubelet", KubeletSettings).socket, self._allocations.timeout_seconds
        try:
            return kubelet.read_names(self._root, socket, timeout, namespace=self._namespace)
        except OSError:
            return None  # where devices are concerned `occupancy` says what is wrong

    # --- the API server -----------------------------------------------------------------------------------------------

    async def _watch(self, server: ApiServer, pod: Pod) -> None:
        """Follow one pod for ever: list it, watch it from there, and begin anew when that ends."""

        def failed(error: KubernetesError) -> None:
            self._note_api(pod, None, answers=False)
            self._complain(error)

        await keep_following(lambda: self._follow(server, pod), failed, first_pause_seconds=self._first_pause_seconds)

    async def _follow(self, server: ApiServer, pod: Pod) -> None:
        """Note a pod as it is and as it changes, until the server ends that."""
        query = {"fieldSelector": f"metadata.name={pod.name}"}
        told = server.follow(pods_path(pod.namespace), query, seconds=watch_seconds(), needs=NEEDS)
        async with contextlib.aclosing(told) as answers:
            async for answer in answers:
                found = members(answer, "object")
                if isinstance(found, dict):
                    self._note_api(pod, None if answer.get("type") == "DELETED" else _api_pod(found))
                elif members(answer, "kind") == "PodList":
                    self._complaint = ""
                    self._note_api(pod, next(map(_api_pod, records(answer, "items")), None))
                else:
                    raise KubernetesError(f"API server {server.url}: its answer is not a list of pods")

    def _note(self, name: str, look: PodLooks) -> None:
        if name in self._pods and look != self._looks.get(name):
            self._looks[name] = look
            self.on_change()

    def _note_api(self, pod: Pod, found: ApiPod | None, *, answers: bool = True) -> None:
        look = self._looks.get(pod.full_name, PodLooks())
        self._note(pod.full_name, replace(look, api_answers=answers, api=found))

    def _complain(self, error: KubernetesError) -> None:
        """Log each new error once."""
        text = f"pods of leases: {error}"
        if text != self._complaint:
            log.warning("%s", text)
        self._complaint = text


def _api_pod(found: dict[str, object]) -> ApiPod:
    uid, phase = members(found, "metadata", "uid"), members(found, "status", "phase")
    if not isinstance(uid, str) or not uid:
        raise KubernetesError("API server: a pod without a uid")
    return ApiPod(uid=uid, phase=phase if isinstance(phase, str) else "")


def watch(settings: NodeSettings, tasks: Tasks) -> PodWatch:
    """A `healthd.node.occupancy.watching.MakeWorkloadWatch`."""
    wanted = settings.of("kubernetes", KubernetesSettings)
    return PodWatch(
        server_of_pod(wanted) if wanted.watch_pods else None,
        settings.host_root,
        settings.allocations,
        tasks=tasks,
        look_seconds=settings.lease.watch_seconds,
    )
