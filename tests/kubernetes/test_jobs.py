"""Gated Jobs while a cluster is what clusters are: pods are deleted, nodes go and come, the aggregator moves."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.manifests import ROOT
from tests.kubernetes.chart_kit import gating, rolled_out
from tests.kubernetes.jobs_kit import AGGREGATOR, BRIEFLY, FOR_EVER, HOST, JOB_SECONDS, JOBS, Fleet, node_of
from tests.kubernetes.kit import SYSTEM, Cluster, gate_exit_code, gated_job, secrets, until
from tests.system import missing
from tests.ui.stage import CHROMIUM, chromium

pytestmark = pytest.mark.kubernetes

DAEMON = "app.kubernetes.io/name=healthd-node"
HOOKS = 50
LAUNCHER = "launcher"
"""An account that may ask for nodes which its pod is not on."""


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The chart, whose gates say no where they have to."""
    if not cluster.ours:
        pytest.skip("asks the aggregator at the address of its pod: KUBEBUILDER_ASSETS instead of KUBECONFIG")
    keys = tmp_path_factory.mktemp("jobs")
    with gating(cluster, image, JOBS, keys, **{"callers.admins": f"{{{JOBS}/{LAUNCHER}}}"}):
        cluster.kubectl("create", "serviceaccount", LAUNCHER, "-n", JOBS)
        made = Fleet(cluster, image, keys)
        until("every node has reported", lambda: len(made.ask("/v1/nodes")["nodes"]) == len(cluster.nodes()))
        yield made


@pytest.fixture(autouse=True)
def free_again(fleet: Fleet) -> Iterator[None]:
    """After each test no job is left, every node is open to pods, and nothing holds one."""
    yield
    fleet.cluster.kubectl("delete", "jobs,pods", "--all", "-n", JOBS, "--wait=true", "--timeout=120s")
    fleet.cluster.kubectl("uncordon", *fleet.cluster.nodes())
    fleet.free()


# --- the two codes that trying again would not change --------------------------------------------------------------


@pytest.mark.parametrize(("code", "asked"), [(2, "--tier=quack"), (1, "--count=9")])
def test_what_cannot_be_fails_the_job_at_once(fleet: Fleet, code: int, asked: str) -> None:
    """1 and 2: impossible, as of nine nodes in a pool of three, and a mistake in the lines; no pod is made anew."""
    name = f"ends-with-{code}"
    job = gated_job(JOBS, name, 1, fleet.image, command=BRIEFLY)
    pod = job["spec"]["template"]["spec"]
    pod["serviceAccountName"] = LAUNCHER
    (gate,) = pod["initContainers"]
    own = ("--join", "--size", "--rank", "--node")
    gate["command"] = [word for word in gate["command"] if not word.startswith(own)] + ["--pool=cpu", asked]
    fleet.cluster.apply(job)
    ended = until(f"{name} ends", lambda: fleet.ended(name), JOB_SECONDS, told=fleet.told)
    assert ended == ("Failed", "PodFailurePolicy")
    (pod,) = fleet.pods(name, gone=True)
    assert gate_exit_code(pod) == code


# --- the chart of a job, and the example of one without an aggregator ---------------------------------------------


def test_chart_of_a_job_gates_whole_nodes_of_its_instance_type(fleet: Fleet) -> None:
    """The devices are extended resources that the test says two nodes have: the scheduler counts them."""
    cluster, own = fleet.cluster, ("node-1", "node-2")
    device = {"op": "add", "path": "/status/capacity/aws.amazon.com~1neuron", "value": "1"}
    for node in own:
        cluster.kubectl("label", "node", node, "node.kubernetes.io/instance-type=trn1.2xlarge")
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps([device]))
    values = {
        "instanceType": "trn1.2xlarge",
        "nodes": "2",
        "image": fleet.image,
        "resources.cpu": "100m",
        "resources.memory": "256Mi",
        "sharedMemory": "64Mi",
        "command": "{sleep,1s}",
        "gate.args": "{--tier=passive,--no-collective}",
    }
    given = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    cluster.helm("install", "charted", ROOT / "deploy/helm/healthd-job", "-n", JOBS, *given)
    try:
        fleet.completes("charted")
        assert {node_of(pod) for pod in fleet.pods("charted")} == set(own)
        fleet.free()
    finally:
        cluster.helm("uninstall", "charted", "-n", JOBS, "--wait")
        for node in own:
            cluster.kubectl("label", "node", node, "node.kubernetes.io/instance-type-")
            gone = {"op": "remove", "path": "/status/capacity/aws.amazon.com~1neuron"}
            cluster.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps([gone]))


def test_example_of_a_job_that_checks_its_nodes_by_itself(fleet: Fleet) -> None:
    """deploy/kubernetes/examples/preflight-job.yaml, with another image, and no interpreter with torch in it."""
    service, job = yaml.safe_load_all((ROOT / "deploy/kubernetes/examples/preflight-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    healthd, preflight, pods, *_ = container["command"]
    line = [healthd, preflight, pods, "--tier=passive", "--no-collective", "--", "sh", "-c", "echo rank $HEALTHD_RANK"]
    container |= {"image": fleet.image, "command": line, "resources": {}}
    for one in (service, job):
        one["metadata"]["namespace"] = JOBS
    fleet.cluster.apply(service, job)
    fleet.completes("small")
    logs = [fleet.cluster.kubectl("logs", pod["metadata"]["name"], "-n", JOBS) for pod in fleet.pods("small")]
    assert sorted(log.splitlines()[-1] for log in logs) == ["rank 0", "rank 1"]


# --- while a gate waits: of three ranks two have come -------------------------------------------------------------


def test_pod_that_is_deleted_while_it_waits_is_replaced_in_the_same_gate(fleet: Fleet) -> None:
    fleet.start("replaced", 3, running=2)
    gate = fleet.waits("replaced", 2)
    first, *_ = (pod["metadata"]["name"] for pod in fleet.pods("replaced"))
    fleet.cluster.kubectl("delete", "pod", first, "-n", JOBS)
    until("another pod has come", lambda: len(fleet.pods("replaced")) == 2 and fleet.waits("replaced", 2), JOB_SECONDS)
    fleet.patch("replaced", parallelism=3)
    fleet.completes("replaced")
    assert gate["id"] in {one["id"] for one in fleet.gates(job=f"{JOBS}/replaced")}


def test_job_that_is_suspended_while_it_waits_gives_its_place_up_and_starts_when_it_is_resumed(fleet: Fleet) -> None:
    fleet.start("suspended", 3, running=2)
    fleet.waits("suspended", 2)
    fleet.patch("suspended", suspend=True)
    until("its pods are gone", lambda: not fleet.pods("suspended", gone=True), JOB_SECONDS, told=fleet.told)
    # Nobody waits there any more, so others start.
    fleet.start("meanwhile", 3)
    fleet.completes("meanwhile")
    fleet.patch("suspended", suspend=False, parallelism=3)
    fleet.completes("suspended")


def test_job_that_is_deleted_while_it_runs_frees_its_nodes(fleet: Fleet) -> None:
    fleet.start("deleted", 3, command=FOR_EVER)
    until("it runs", lambda: len(fleet.leases()) == 3, JOB_SECONDS, told=fleet.told)
    fleet.delete("deleted")


def test_deadline_of_a_job_ends_its_wait(fleet: Fleet) -> None:
    """What ends attempts that a gate sends away again and again."""
    fleet.start("late", 3, running=2, spec={"activeDeadlineSeconds": 30})
    ended = until("its deadline has come", lambda: fleet.ended("late"), JOB_SECONDS, told=fleet.told)
    assert ended == ("Failed", "DeadlineExceeded")
    until("its pods are gone", lambda: not fleet.pods("late", gone=True), JOB_SECONDS, told=fleet.told)
    fleet.start("after", 3)
    fleet.completes("after")


def test_page_tells_of_a_gate_that_holds(fleet: Fleet) -> None:
    """In a browser, with the token of a person's service account."""
    if not Path(CHROMIUM).exists():
        pytest.skip(missing(CHROMIUM))
    fleet.start("shown", 3, running=2)
    gate = fleet.waits("shown", 2)
    with chromium() as browser:
        context = browser.new_context(ignore_https_errors=True)  # of the chart's own CA
        page = context.new_page()
        page.goto(f"https://{fleet.address()}:8090/gates/{gate['id']}")
        page.fill("input[name=token]", (fleet.keys / "admin.token").read_text(encoding="utf-8").strip())
        page.click("button[type=submit]")
        main = page.locator("main")
        main.get_by_text("missing: rank 2").first.wait_for()
        assert f"{JOBS}/shown" in main.inner_text()
        context.close()


def test_pod_that_the_kernel_kills_for_its_memory_frees_its_node(fleet: Fleet) -> None:
    greedy = ("python3", "-c", "held = bytearray(1 << 30); print(len(held.replace(b'0', b'1')))")
    fleet.start("greedy", 2, command=greedy, memory="64Mi")
    ended = until("greedy ends", lambda: fleet.ended("greedy"), JOB_SECONDS, told=fleet.told)
    assert ended[0] == "Failed"
    killed = [pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in fleet.pods("greedy", gone=True)]
    assert "OOMKilled" in {one["reason"] for one in killed}, killed
    fleet.free()
    fleet.start("modest", 3)
    fleet.completes("modest")


# --- the aggregator and the daemons -------------------------------------------------------------------------------


def test_rolling_update_of_the_daemons_under_a_gate_that_holds(fleet: Fleet) -> None:
    fleet.start("rolled", 3, running=2)
    gate = fleet.waits("rolled", 2)
    before = set(fleet.cluster.pods(SYSTEM, DAEMON))
    fleet.cluster.kubectl("rollout", "restart", "daemonset/healthd-node", "-n", SYSTEM)
    rolled_out(fleet.cluster)
    assert not before & set(fleet.cluster.pods(SYSTEM, DAEMON))
    assert fleet.waits("rolled", 2)["id"] == gate["id"]
    fleet.patch("rolled", parallelism=3)
    fleet.completes("rolled")


def test_certificate_that_is_renewed_under_a_gate_that_holds_is_served_and_costs_no_place(fleet: Fleet) -> None:
    """In the Secret, as cert-manager does it; the kubelet brings it to the pod."""
    address = (fleet.address(), 8090)
    before = ssl.get_server_certificate(address)
    fleet.start("renewed", 3, running=2)
    gate = fleet.waits("renewed", 2)
    secrets(fleet.cluster, fleet.keys)
    until(
        "the new certificate is served",
        lambda: ssl.get_server_certificate(address) != before,
        JOB_SECONDS,
        told=fleet.told,
    )
    assert fleet.waits("renewed", 2)["id"] == gate["id"]
    fleet.patch("renewed", parallelism=3)
    fleet.completes("renewed")


def test_fifty_hooks_keep_their_places_while_the_aggregator_moves_to_another_node(fleet: Fleet) -> None:
    """A job has the nodes; the hooks of fifty others wait for them, in five pods."""
    fleet.start("first", 3, command=FOR_EVER)
    until("the first job runs", lambda: len(fleet.leases()) == 3, JOB_SECONDS, told=fleet.told)
    ask = f"healthd gate --aggregator=https://{HOST}:8090 --token-file=/etc/healthd/gate/token"
    ask += " --ca-file=/etc/healthd/gate/ca.crt --tier=passive --wait=30m --node=$NODE_NAME"
    # The shell hands on the signal that ends the pod, so that each hook withdraws its gate.
    ten = f"for i in 0 1 2 3 4 5 6 7 8 9; do {ask} --job=hook-$NODE_NAME-$RANK-$i & done"
    line = f"trap 'trap : TERM; kill 0; wait' TERM; {ten}; wait"
    job = gated_job(JOBS, "many", HOOKS // 10, fleet.image, command=BRIEFLY)
    pod = job["spec"]["template"]["spec"]
    del pod["affinity"]
    pod["terminationGracePeriodSeconds"] = 30
    pod["initContainers"][0]["command"] = ["sh", "-c", line]
    fleet.cluster.apply(job)

    def waiting() -> dict[str, str]:
        """The jobs of the hooks whose gates are open, by gate, the newest first."""
        found = [one for one in fleet.gates(limit=200) if one["decision"] == "hold"]
        return {one["id"]: one["job"] for one in found if one["job"].startswith(f"{JOBS}/hook-")}

    before = until(f"{HOOKS} hooks wait", lambda: waiting() if len(waiting()) == HOOKS else {}, 180.0, told=fleet.told)
    (pod_before,) = fleet.cluster.items("pods", "-n", SYSTEM, "-l", AGGREGATOR)
    old = node_of(pod_before)
    fleet.cluster.kubectl("cordon", old)
    try:
        fleet.cluster.kubectl(
            "delete", "pod", pod_before["metadata"]["name"], "-n", SYSTEM, "--grace-period=0", "--force"
        )
        away = time.monotonic()

        def back() -> bool:
            try:
                return bool(fleet.gates(limit=1))
            except (httpx.HTTPError, KeyError, ValueError):
                return False

        until("another aggregator answers", back, JOB_SECONDS, told=fleet.told)
        outage = time.monotonic() - away
        (pod_after,) = fleet.cluster.items("pods", "-n", SYSTEM, "-l", AGGREGATOR)
        assert node_of(pod_after) != old
    finally:
        fleet.cluster.kubectl("uncordon", old)
    print(f"the aggregator was away for {outage:.1f} s")
    assert waiting() == before
    fleet.cluster.kubectl("delete", "job", "first", "-n", JOBS, "--wait=true")
    # Newest first: the last of a node in the list has waited longest. Its pod has the node then.
    longest = {hook.rsplit("-", 2)[0]: one for one, hook in before.items()}
    until(
        "one on each node is admitted",
        lambda: not set(longest.values()) & waiting().keys(),
        JOB_SECONDS,
        told=fleet.told,
    )
    assert waiting().keys() == before.keys() - set(longest.values())


# --- nodes --------------------------------------------------------------------------------------------------------


def ready(cluster: Cluster, node: str) -> str:
    conditions = cluster.get("node", node)["status"]["conditions"]
    return next(str(one["status"]) for one in conditions if one["type"] == "Ready")


def test_node_without_its_kubelet_keeps_its_lease_and_is_left_out_by_the_scheduler(fleet: Fleet) -> None:
    """Nobody says that the pod has ended: not to know is not the end."""
    fleet.start("stays", 3, command=FOR_EVER)
    until("it runs", lambda: len(fleet.leases()) == 3, JOB_SECONDS, told=fleet.told)
    held = fleet.leases()
    with fleet.cluster.down("kubelet-3"):
        until("the node is not ready", lambda: ready(fleet.cluster, "node-3") != "True", JOB_SECONDS)
        assert fleet.leases() == held
    until("the node is ready", lambda: ready(fleet.cluster, "node-3") == "True", JOB_SECONDS)
    assert fleet.leases() == held


def test_node_that_is_deleted_and_joins_again_under_its_name_takes_jobs_again(fleet: Fleet) -> None:
    """Its kubelet is away meanwhile, so that containers of the job and the daemon run on without a pod."""
    cluster = fleet.cluster
    fleet.start("orphan", 3, command=FOR_EVER)
    until("it runs", lambda: len(fleet.leases()) == 3, JOB_SECONDS, told=fleet.told)
    uid = cluster.get("node", "node-3")["metadata"]["uid"]
    with cluster.down("kubelet-3"), cluster.down("kube-proxy-3"):
        cluster.kubectl("delete", "node", "node-3")
        fleet.cluster.kubectl("delete", "job", "orphan", "-n", JOBS, "--cascade=foreground", "--wait=false")
        until("its pods are forgotten", lambda: not fleet.pods("orphan", gone=True), JOB_SECONDS, told=fleet.told)
    until("the node is there again", lambda: "node-3" in cluster.nodes(), JOB_SECONDS)
    until("the node is ready", lambda: ready(cluster, "node-3") == "True", JOB_SECONDS)
    assert cluster.get("node", "node-3")["metadata"]["uid"] != uid
    rolled_out(cluster)
    fleet.free()
    fleet.start("joined", 3)
    fleet.completes("joined")
    assert "node-3" in {node_of(pod) for pod in fleet.pods("joined")}
    assert not [row["node"] for row in fleet.ask("/v1/nodes")["nodes"] if row["duplicate"]]


@pytest.mark.parametrize("how", ["drained", "evicted", "preempted"])
def test_pod_that_has_to_go_frees_its_node_and_is_made_anew(fleet: Fleet, how: str) -> None:
    name, cluster = f"is-{how}", fleet.cluster
    fleet.start(name, 2, command=FOR_EVER, prefer="node-3", cpu="1")
    until("it runs", lambda: len(fleet.leases()) == 2, JOB_SECONDS, told=fleet.told)
    (pod,) = (pod for pod in fleet.pods(name) if node_of(pod) == "node-3")
    if how == "drained":
        cluster.kubectl("drain", "node-3", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
    elif how == "evicted":
        meta = {"name": pod["metadata"]["name"], "namespace": JOBS}
        body = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
        cluster.kubectl(
            "create", "--raw", f"/api/v1/namespaces/{JOBS}/pods/{meta['name']}/eviction", "-f", "-", text=body
        )
    else:
        preempt(cluster, fleet.image)
    uid = pod["metadata"]["uid"]
    ours = f"pod:{JOBS}/{pod['metadata']['name']}/{uid}"
    until("its lease has ended", lambda: ours not in fleet.leases().values(), 30.0, told=fleet.told)
    until("it is made anew", lambda: len(fleet.pods(name)) == 2 and uid not in str(fleet.pods(name)), JOB_SECONDS)
    assert fleet.ended(name) is None


def preempt(cluster: Cluster, image: str) -> None:
    """A pod that may have what others have, and wants nearly all of node-3's processors."""
    free = cluster.get("node", "node-3")["status"]["allocatable"]["cpu"]
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "tests-urgent"}}
    container = {"name": "main", "image": image, "command": list(FOR_EVER)}
    container["resources"] = {"requests": {"cpu": str(int(free) - 1)}}
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": "node-3"},
        "priorityClassName": "tests-urgent",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    meta = {"name": "more-urgent", "namespace": JOBS}
    cluster.apply({**urgent, "value": 1000}, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod})
