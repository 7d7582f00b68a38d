"""A lease ends with its pod, by the API server, the control group or the kubelet; never because nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from healthd.core.tasks import Tasks
from healthd.core.workload import Pod, names_of, pod_of, problem_of
from healthd.integrations.kubernetes.pods import ApiPod, PodLooks, PodWatch, Source, cgroup_there, judge_pod
from healthd.node.occupancy.watching import PodFate
from healthd.node.orders.leases import LeaseStore
from healthd.node.orders.orders import Orders
from healthd.node.settings import ActiveSettings, AllocationSettings, Unprompted
from tests.clients.api_server_kit import Cluster, cluster
from tests.every import every
from tests.node.allocation_kit import kubelet_at, pod
from tests.node.node_kit import World, eventually, lease, lease_order, quiet, run

UID, OTHER = "0b8e3f6c-8f3e-4b53-9a3b-5d0c6d1f7a11", "0b8e3f6c-8f3e-4b53-9a3b-000000000000"
TRAIN = f"pod:ml/train-0/{UID}"
ON_ORDER = ActiveSettings(unprompted=Unprompted.OFF)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_pod_is_called_by_its_name_and_by_its_uid() -> None:
    assert pod_of(TRAIN) == Pod(namespace="ml", name="train-0", uid=UID)
    assert pod_of("pod:ml/train-0") == Pod(namespace="ml", name="train-0")
    assert names_of(TRAIN) == (TRAIN, "pod:ml/train-0", f"pod:{UID}")
    assert (names_of("slurm:7"), names_of(None)) == (("slurm:7",), ())
    assert [pod_of(text) for text in (None, f"pod:{UID}", "pod:/a", "pod:ml/", "pod:ML/a", "slurm:7")] == [None] * 6


@every("text", ["pod:ml/", "pod:ml/a/b/c", "pid:x", "pid:0", "pid:7@", "a\nb", "x" * 600])
def test_a_name_that_nobody_can_look_for_is_refused_with_its_form(text: str) -> None:
    assert problem_of(text).startswith("must be")
    assert problem_of(TRAIN) == problem_of("slurm:7") == problem_of("pid:7@12") == problem_of("anything else") == ""


# --- the judgement ----------------------------------------------------------------------------------------------------

HERE, API, BLIND = (Source.API,), ApiPod(uid=UID, phase="Running"), PodLooks()
SHOWN = PodFate(there=True, seen_by=HERE, uid=UID)


@every(
    ("looks", "seen_by", "ended"),
    [
        # The API server knows the phase, whatever else is seen.
        (
            PodLooks(api_answers=True, api=ApiPod(uid=UID, phase="Succeeded")),
            (),
            "pod ml/train-0 has ended (Succeeded)",
        ),
        (PodLooks(api_answers=True, api=ApiPod(uid=UID, phase="Failed"), cgroup=True), HERE, "has ended (Failed)"),
        (PodLooks(api_answers=True), HERE, "pod ml/train-0 no longer exists"),
        (PodLooks(api_answers=True, api=ApiPod(uid=OTHER, phase="Running")), HERE, "was replaced by another pod"),
        (PodLooks(api_answers=True, api=ApiPod(uid=OTHER, phase="Running"), kubelet=True), HERE, "was replaced"),
        # Without it: the group of its UID, then the kubelet's list, each for what it has shown before.
        (
            PodLooks(cgroup=False, kubelet=True),
            (Source.CGROUP,),
            "the control group of pod ml/train-0 no longer exists",
        ),
        (PodLooks(kubelet=False), (Source.KUBELET,), "the kubelet no longer has pod ml/train-0"),
        # Once shown by the kubelet, the API server's word counts too.
        (PodLooks(api_answers=True), (Source.KUBELET,), "pod ml/train-0 no longer exists"),
    ],
)
def test_a_pod_has_ended_by_the_word_of_one_that_knows_it(
    looks: PodLooks, seen_by: tuple[Source, ...], ended: str
) -> None:
    assert ended in judge_pod(Pod(namespace="ml", name="train-0", uid=UID), looks, seen_by).ended


@every(
    ("looks", "seen_by"),
    [
        (BLIND, ()),
        (BLIND, tuple(Source)),  # nobody answers: not knowing is not gone
        (PodLooks(api_answers=True), ()),  # a name that was never seen may be of another cluster
        (PodLooks(api_answers=True, api=ApiPod(uid=OTHER, phase="Running")), ()),
        (PodLooks(cgroup=False), HERE),  # it runs on another machine
        (PodLooks(kubelet=False), HERE),
    ],
)
def test_what_nobody_can_tell_ends_nothing(looks: PodLooks, seen_by: tuple[Source, ...]) -> None:
    assert judge_pod(Pod(namespace="ml", name="train-0", uid=UID), looks, seen_by) == PodFate()


@every(
    ("looks", "seen_by", "shown_by"),
    [
        (PodLooks(api_answers=True, api=API), (), HERE),
        (PodLooks(api_answers=True, api=API, cgroup=False, kubelet=False), tuple(Source), HERE),
        # Deleted by force: the kubelet has yet to end its processes.
        (PodLooks(api_answers=True, cgroup=True), HERE, (Source.CGROUP,)),
        (PodLooks(api_answers=True, kubelet=True), HERE, (Source.KUBELET,)),
        (PodLooks(cgroup=True, kubelet=False), tuple(Source), (Source.CGROUP,)),
        (PodLooks(kubelet=True), (), (Source.KUBELET,)),
    ],
)
def test_a_pod_that_is_seen_is_there(
    looks: PodLooks, seen_by: tuple[Source, ...], shown_by: tuple[Source, ...]
) -> None:
    found = judge_pod(Pod(namespace="ml", name="train-0", uid=UID), looks, seen_by)
    assert (found.there, found.seen_by, found.uid, found.ended) == (True, shown_by, UID, "")


def test_a_pod_whose_uid_is_not_told_is_the_one_that_was_seen_first() -> None:
    named, seen = Pod(namespace="ml", name="train-0"), PodLooks(api_answers=True, api=API)
    assert judge_pod(named, seen, ()) == SHOWN
    other = PodLooks(api_answers=True, api=ApiPod(uid=OTHER, phase="Running"))
    assert judge_pod(Pod(namespace="ml", name="train-0", uid=UID), other, HERE).ended


@pytest.mark.parametrize(
    ("group", "base"),
    [
        (
            f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice",
            "kubepods.slice",
        ),
        (f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice", "kubepods.slice"),
        (f"kubepods/besteffort/pod{UID}", "kubepods"),
        (f"memory/kubepods/pod{UID}", "memory/kubepods"),
    ],
)
def test_control_groups_are_found_wherever_kubelets_put_them(tmp_path: Path, group: str, base: str) -> None:
    root = tmp_path / "sys/fs/cgroup"
    assert cgroup_there(tmp_path, UID) is None
    (root / base).mkdir(parents=True)
    assert cgroup_there(tmp_path, UID) is False
    assert cgroup_there(tmp_path, None) is None
    (root / group).mkdir(parents=True)
    assert cgroup_there(tmp_path, UID) is True


# --- a node -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kube() -> Iterator[Cluster]:
    # Short, so that a socket's name has room.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, cluster(Path(folder) / "account") as made:
        yield made


class Node(World):
    """A node on plain CPUs whose host is a folder, with a watch over the pods of its leases."""

    def __init__(self, folder: Path, kube: Cluster | None, *, namespace: str = "healthd-system") -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, active=ON_ORDER)
        self.host = folder / "host"
        self.host.mkdir(exist_ok=True)
        self.pods = PodWatch(
            None if kube is None else kube.server,
            self.host,
            AllocationSettings(),
            tasks=self.tasks,
            look_seconds=0.05,
            environ={"POD_NAMESPACE": namespace},
            first_pause_seconds=0.02,
        )
        self.ledger = LeaseStore(folder / "orders.json", clock=self.time.clock, boot_id="boot-1")
        self.orders = Orders(
            self.book,
            self.scheduler,
            self.ledger,
            self.settings,
            clock=self.time.clock,
            tasks=self.tasks,
            pods=self.pods,
        )

    async def __aenter__(self) -> Node:
        await super().__aenter__()
        self.tasks.supervise("watch", self.orders.watch)
        self.tasks.supervise("pods", self.pods.run)
        await quiet()
        return self

    async def lease(self, workload: str = TRAIN) -> None:
        await self.take(lease_order(lease(workload=workload)))
        await eventually(lambda: self.status("L1") == "accepted")

    @property
    def seen_by(self) -> tuple[str, ...]:
        return tuple(source for held in self.ledger.held for source in held.seen_by)

    async def ended(self, why: str) -> None:
        await eventually(lambda: self.status("L1") == "done")
        assert why in self.orders.reports()["L1"].message

    async def goes_on(self) -> None:
        """For some looks of all who look."""
        await asyncio.sleep(0.3)
        assert self.status("L1") == "accepted"


@contextlib.asynccontextmanager
async def leased(folder: Path, kube: Cluster, workload: str = TRAIN) -> AsyncIterator[Node]:
    """A node whose lease names a pod that runs, and that the API server has shown."""
    kube.job_pod("train-0", uid=UID)
    async with Node(folder, kube) as node:
        await node.lease(workload)
        await eventually(lambda: "api" in node.seen_by)
        yield node


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize("workload", [TRAIN, "pod:ml/train-0"])
def test_a_lease_ends_when_its_pod_has_ended(tmp_path: Path, kube: Cluster, phase: str, workload: str) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube, workload) as node:
            kube.job_pod("train-0", uid=UID, phase=phase)
            await node.ended(f"pod ml/train-0 has ended ({phase})")
            # Nothing is asked while no lease names a pod.
            await eventually(lambda: not any("pod ml/train-0" in task.get_name() for task in asyncio.all_tasks()))

    run(main())


def test_a_lease_ends_when_its_pod_is_deleted(tmp_path: Path, kube: Cluster) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube) as node:
            kube.delete_pod("train-0")
            await node.ended("pod ml/train-0 no longer exists")

    run(main())


@pytest.mark.parametrize("workload", [TRAIN, "pod:ml/train-0"])
def test_another_pod_of_the_same_name_is_another_job(tmp_path: Path, kube: Cluster, workload: str) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube, workload) as node:
            kube.deaf = True  # it is gone and made anew before anybody looks
            kube.job_pod("train-0", uid=OTHER)
            kube.compact()
            await node.ended("replaced by another pod")

    run(main())


def test_a_container_that_is_started_again_in_its_pod_keeps_the_lease(tmp_path: Path, kube: Cluster) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube) as node:
            for _ in range(3):
                kube.job_pod("train-0", uid=UID, phase="Running")
                node.time.move(120.0)  # the devices are free meanwhile, for longer than `settle`
                await node.scheduler.refresh()
                await node.goes_on()

    run(main())


@pytest.mark.parametrize("away", ["restart", "server", "forbidden"])
def test_an_end_that_nobody_watched_is_seen_afterwards(tmp_path: Path, kube: Cluster, away: str) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube) as node:
            if away == "restart":
                await node.tasks.stop(1.0)
                kube.delete_pod("train-0")
            elif away == "server":
                kube.stop(down=True)
                await eventually(lambda: not node.pods.looks["ml/train-0"].api_answers)
                kube.delete_pod("train-0")
                await node.goes_on()
                kube.stop(down=False)
                await node.ended("no longer exists")
            else:
                kube.rights.clear()
                kube.compact()
                await eventually(lambda: not node.pods.looks["ml/train-0"].api_answers)
                kube.delete_pod("train-0")
                await node.goes_on()
        if away == "restart":
            async with Node(tmp_path, kube) as again:
                await again.ended("no longer exists")

    run(main())


def test_an_api_server_that_is_away_ends_nothing_for_as_long_as_the_lease_lasts(tmp_path: Path, kube: Cluster) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube) as node:
            kube.stop(down=True)
            await eventually(lambda: not node.pods.looks["ml/train-0"].api_answers)
            node.time.move(86000.0)
            await node.scheduler.refresh()
            await node.goes_on()
            node.time.move(401.0)
            await node.scheduler.refresh()
            await node.ended("its time of 24 h is over, and no node can observe its job")

    run(main())


def test_a_pod_of_another_cluster_ends_nothing(tmp_path: Path, kube: Cluster) -> None:
    """As of a virtual cluster, whose pods have other names here."""

    async def main() -> None:
        async with Node(tmp_path, kube) as node:
            await node.lease()
            await eventually(lambda: node.pods.looks["ml/train-0"].api_answers)
            await node.goes_on()

    run(main())


def test_a_watch_that_is_compacted_begins_anew(tmp_path: Path, kube: Cluster) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube) as node:
            lists = len([call for call in kube.calls if "watch" not in call.query])
            kube.compact()
            await eventually(lambda: len([call for call in kube.calls if "watch" not in call.query]) > lists)
            kube.delete_pod("train-0")
            await node.ended("no longer exists")

    run(main())


def test_a_lease_is_watched_with_one_call_that_stays(tmp_path: Path, kube: Cluster) -> None:
    async def main() -> None:
        async with leased(tmp_path, kube) as node:
            await eventually(lambda: kube.watches == 1)
            before = len(kube.calls)
            await node.goes_on()
            assert len(kube.calls) == before == 2
            assert {call.query["fieldSelector"] for call in kube.calls} == {"metadata.name=train-0"}

    run(main())


def test_a_server_that_holds_no_watch_open_is_not_stormed(tmp_path: Path, kube: Cluster) -> None:
    async def main() -> None:
        kube.short = True
        async with leased(tmp_path, kube) as node:
            before = len(kube.calls)
            await asyncio.sleep(0.5)  # pauses of 0.02, 0.04, 0.08, 0.16, 0.32 s, a quarter less by chance
            assert len(kube.calls) - before <= 14
            kube.delete_pod("train-0")
            await node.ended("no longer exists")

    run(main())


def test_the_next_pod_of_the_same_name_is_looked_at_anew(tmp_path: Path, kube: Cluster) -> None:
    """Although the watch over the one before is open, and tells nothing of it."""

    async def main() -> None:
        tasks = Tasks()
        watch = PodWatch(kube.server, tmp_path, AllocationSettings(), tasks=tasks, look_seconds=0.05, environ={})
        tasks.supervise("pods", watch.run)
        try:
            for uid in (UID, OTHER):
                kube.job_pod("train-0", uid=uid)
                watch.follow((Pod(namespace="ml", name="train-0", uid=uid),))
                assert watch.looks == {}
                await eventually(lambda: watch.looks.get("ml/train-0", BLIND).api_answers)
                assert watch.looks["ml/train-0"].api == ApiPod(uid=uid, phase="Running")
                await eventually(lambda: kube.watches > 0)
                kube.deaf = True
        finally:
            await tasks.stop(1.0)

    run(main())


def test_a_broken_connection_that_says_nothing_is_found_by_the_kubelet(kube: Cluster) -> None:
    listed = [pod("train-0", "ml"), pod("healthd-node-x", "healthd-system")]

    async def main() -> None:
        async with leased(kube.folder.parent / "n1", kube) as node:
            socket = node.host / "var/lib/kubelet/pod-resources/kubelet.sock"
            with kubelet_at(socket, lambda request, context: b"".join(listed)):
                await eventually(lambda: "kubelet" in node.seen_by)
                kube.deaf = True
                kube.delete_pod("train-0")
                await node.goes_on()
                del listed[0]
                await node.ended("no longer exists")

    run(main())


def test_without_an_api_server_the_kubelet_tells_the_end(tmp_path: Path) -> None:
    listed = [pod("train-0", "ml"), pod("healthd-node-x", "healthd-system")]

    async def main() -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            async with Node(Path(folder), None) as node:
                socket = node.host / "var/lib/kubelet/pod-resources/kubelet.sock"
                with kubelet_at(socket, lambda request, context: b"".join(listed)):
                    await node.lease()
                    await eventually(lambda: "kubelet" in node.seen_by)
                    whole = listed.copy()
                    listed.clear()  # it was just restarted, and the API server has not told it its pods yet
                    await node.goes_on()
                    listed[:] = whole[1:]
                    await node.ended("the kubelet no longer has pod ml/train-0")

    run(main())


def test_without_both_the_control_group_tells_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with Node(tmp_path, None) as node:
            group = node.host / f"sys/fs/cgroup/kubepods/burstable/pod{UID}"
            group.mkdir(parents=True)
            await node.lease()
            await eventually(lambda: "cgroup" in node.seen_by)
            await node.goes_on()
            group.rmdir()
            await node.ended("the control group of pod ml/train-0 no longer exists")

    run(main())
