"""Who a node is: what a real API server says of tokens that real kubelets project, and what comes of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.identity.tokens import AuthError, Caller, Scope
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.clients.kubernetes import ApiServer
from healthd.integrations.kubernetes.service_accounts import TokenReviews
from healthd.integrations.kubernetes.settings import KubernetesCallers
from tests.aggregator.identity_kit import sync
from tests.kubernetes.chart_kit import rolled_out
from tests.kubernetes.cluster_kit import phase
from tests.kubernetes.kit import CHART, Cluster, until, values, volume_of_gate
from tests.kubernetes.kit import SYSTEM as HEALTHD

pytestmark = pytest.mark.kubernetes

SYSTEM, JOBS = "tests-identity", "tests-identity-jobs"
AUDIENCE = "healthd"
KEY, OTHER_KEY = "0123456789abcdef-node-key", "another-key-another-key"
REVIEWER = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": SYSTEM},
    "rules": [{"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}],
}
GRANTED = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": SYSTEM},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": SYSTEM},
    "subjects": [{"kind": "ServiceAccount", "name": "aggregator", "namespace": SYSTEM}],
}


def account(name: str, namespace: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}


def pod(name: str, namespace: str, service_account: str, node: str) -> dict[str, Any]:
    """A pod with a token as the chart projects it."""
    source = {"serviceAccountToken": {"audience": AUDIENCE, "expirationSeconds": 3600, "path": "token"}}
    container = {
        "name": "main",
        "image": "localhost/pause:1",
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/healthd", "readOnly": True}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "nodeName": node,
            "serviceAccountName": service_account,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "token", "projected": {"sources": [source]}}],
        },
    }


@dataclass
class Site:
    """A cluster with accounts of an aggregator, daemons and jobs; `server` is as the aggregator speaks to it."""

    cluster: Cluster
    server: ApiServer

    def settings(self) -> KubernetesCallers:
        return KubernetesCallers(
            audience=AUDIENCE,
            nodes=(f"{SYSTEM}/daemon",),
            hooks=(f"{JOBS}/*",),
            admins=(f"{SYSTEM}/admin",),
            service_account=self.server.service_account,
            api_server=self.server.url,
        )

    def start(self, name: str, node: str, *, namespace: str = SYSTEM, service_account: str = "daemon") -> str:
        """Start a pod; its token."""
        self.cluster.apply(pod(name, namespace, service_account, node))
        self.cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", f"pod/{name}", "-n", namespace)
        return self.read(name, "/var/run/secrets/healthd/token", namespace=namespace)

    def stop(self, name: str, *, namespace: str = SYSTEM) -> None:
        self.cluster.kubectl("delete", "pod", name, "-n", namespace, "--timeout=60s")

    def read(self, name: str, file: str, *, namespace: str = SYSTEM) -> str:
        return self.cluster.kubectl("exec", name, "-n", namespace, "--", "cat", file).strip()

    def who(self, token: str) -> Caller | None:
        """Whom an aggregator that has just started takes the token for."""
        digest = hashlib.sha256(token.encode()).digest()
        return asyncio.run(TokenReviews(self.settings(), self.server).identify(token, digest))

    def refusal(self, token: str) -> tuple[int, str]:
        with pytest.raises(AuthError) as error:
            self.who(token)
        return error.value.status, str(error.value)


@contextlib.contextmanager
def site_of(cluster: Cluster, folder: Path) -> Iterator[Site]:
    """The accounts, and what the kubelet would mount into the aggregator's pod in a folder."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))["clusters"][0]["cluster"]
    if "certificate-authority-data" in config:
        authority = base64.b64decode(config["certificate-authority-data"])
    else:
        authority = Path(config["certificate-authority"]).read_bytes()
    (folder / "ca.crt").write_bytes(authority)
    with contextlib.ExitStack() as stack:
        for name in (SYSTEM, JOBS):
            stack.enter_context(cluster.namespace(name))
        stack.callback(cluster.kubectl, "delete", "clusterrole,clusterrolebinding", SYSTEM, "--ignore-not-found")
        accounts = [account(name, SYSTEM) for name in ("aggregator", "daemon", "admin", "stranger")]
        cluster.apply(*accounts, REVIEWER, GRANTED)
        (folder / "token").write_text(cluster.kubectl("create", "token", "aggregator", "-n", SYSTEM))
        until("default accounts are there", lambda: len(cluster.items("serviceaccounts", "-n", JOBS)) > 0)
        yield Site(cluster, ApiServer(url=config["server"], service_account=folder))


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of(cluster, tmp_path_factory.mktemp("account")) as made:
        yield made


@contextlib.asynccontextmanager
async def serving(site: Site, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=folder, integrations={"kubernetes": site.settings()})
    async with (
        aggregator(settings, Policy()) as (address, _),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=30.0) as client,
    ):
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_each_daemon_speaks_for_the_node_on_which_its_pod_runs(site: Site, tmp_path: Path) -> None:
    nodes = site.cluster.nodes()
    tokens = {node: site.start(f"daemon-{number}", node) for number, node in enumerate(nodes)}

    async def main() -> dict[tuple[str, str], int]:
        async with serving(site, tmp_path) as client:
            return {
                (speaker, node): (await sync(client, node, headers=bearer(token))).status_code
                for speaker, token in tokens.items()
                for node in nodes
            }

    found = asyncio.run(main())
    assert found == {(speaker, node): 200 if speaker == node else 403 for speaker in nodes for node in nodes}


async def test_hook_is_its_pod_and_asks_for_jobs_of_its_namespace(site: Site, tmp_path: Path) -> None:
    node = site.cluster.nodes()[0]
    token = site.start("train-0", node, namespace=JOBS, service_account="default")
    uid = site.cluster.get("pod", "train-0", "-n", JOBS)["metadata"]["uid"]
    hook = await asyncio.to_thread(site.who, token)
    assert hook is not None
    assert hook.hook is not None
    assert (hook.nodes, hook.hook.full_name, hook.hook.uid) == ((node,), f"{JOBS}/train-0", uid)

    async with serving(site, tmp_path) as client:
        join = {"group": "train", "size": 1, "rank": 0, "member": "m", "node": node}
        asked = await client.post("/v1/gates", json={"job": "train", "join": join}, headers=bearer(token))
        assert asked.json()["request"]["job"] == f"{JOBS}/train"
        away = {**join, "node": "elsewhere"}
        refused = await client.post("/v1/gates", json={"job": "train", "join": away}, headers=bearer(token))
        assert refused.status_code == 403
        assert (await sync(client, node, headers=bearer(token))).status_code == 403


async def test_pod_that_took_the_place_of_another_is_let_in_with_its_own_key(site: Site, tmp_path: Path) -> None:
    node = site.cluster.nodes()[0]

    async with serving(site, tmp_path) as client:
        old = await asyncio.to_thread(site.start, "replaced", node)
        assert (await sync(client, node, KEY, headers=bearer(old))).status_code == 200
        await asyncio.to_thread(site.stop, "replaced")
        new = await asyncio.to_thread(site.start, "replaced", node)
        assert new != old
        assert (await sync(client, node, OTHER_KEY, "i2", headers=bearer(new))).status_code == 200
        admin = site.cluster.kubectl("create", "token", "admin", "-n", SYSTEM, f"--audience={AUDIENCE}").strip()
        shown = (await client.get(f"/v1/nodes/{node}", headers=bearer(admin))).json()
        assert not shown["duplicate"]
        assert f"by pod {SYSTEM}/replaced" in [event["message"] for event in shown["events"]]


def test_token_of_a_pod_that_is_gone_is_refused(site: Site) -> None:
    """Within ten seconds: so long the API server itself remembers what it has accepted."""
    token = site.start("gone", site.cluster.nodes()[0])
    assert site.who(token) is not None
    site.stop("gone")
    status, why = until("the token is good no more", lambda: _refused(site, token)) or (0, "")
    assert status == 401
    assert "Kubernetes does not accept this token" in why


def test_tokens_that_are_not_meant_for_us_are_refused(site: Site) -> None:
    site.start("others", site.cluster.nodes()[0])
    own = site.read("others", "/var/run/secrets/kubernetes.io/serviceaccount/token")
    assert "not for audience 'healthd'" in site.refusal(own)[1]

    def made(name: str) -> str:
        return site.cluster.kubectl("create", "token", name, "-n", SYSTEM, f"--audience={AUDIENCE}").strip()

    assert "is not bound to a pod" in site.refusal(made("daemon"))[1]
    assert "is not authorized" in site.refusal(made("stranger"))[1]
    admin = site.who(made("admin"))
    assert admin is not None
    assert Scope.ADMIN in admin.scopes
    head, claims, _ = made("admin").split(".")
    assert site.refusal(f"{head}.{claims}.c2lnbmF0dXJl")[0] == 401, "signed by nobody"


def test_aggregator_that_may_not_review_says_which_right_it_lacks(site: Site) -> None:
    token = site.start("unseen", site.cluster.nodes()[0])
    site.cluster.kubectl("delete", "clusterrolebinding", SYSTEM)
    try:
        status, why = until("the right is gone", lambda: _refused(site, token)) or (0, "")
        assert status == 503
        assert "give the service account the right to create on tokenreviews" in why
    finally:
        site.cluster.apply(GRANTED)
    until("the right is back", lambda: not _refused(site, token))


def _refused(site: Site, token: str) -> tuple[int, str] | None:
    try:
        site.who(token)
    except AuthError as error:
        return error.status, str(error)
    return None


@pytest.mark.nightly
def test_oldest_kubernetes_names_the_node_of_a_pod_too(oldest: Cluster, tmp_path: Path) -> None:
    """Without nodes of its own: a Node and a pod on it as objects, and a token as the kubelet would ask for it."""
    with site_of(oldest, tmp_path) as site:
        oldest.apply(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-9"}},
            pod("bound", SYSTEM, "daemon", "node-9"),
        )
        try:
            bound = ("--bound-object-kind=Pod", "--bound-object-name=bound", f"--audience={AUDIENCE}")
            token = oldest.kubectl("create", "token", "daemon", "-n", SYSTEM, *bound).strip()
            caller = site.who(token)
            assert caller is not None
            assert (caller.nodes, caller.pod and caller.pod.full_name) == (("node-9",), f"{SYSTEM}/bound")
        finally:
            oldest.kubectl("delete", "pod", "bound", "-n", SYSTEM, "--force", "--grace-period=0")
            oldest.kubectl("delete", "node", "node-9")


def hook(namespace: str, image: str, rank: int) -> dict[str, Any]:
    """A pod of a job whose gate is as in the guide: the projected token, the CA, no account of its own."""
    host = f"https://healthd-aggregator.{HEALTHD}.svc:8090"
    files = ["--token-file=/etc/healthd/gate/token", "--ca-file=/etc/healthd/gate/ca.crt"]
    asked = [
        "--job=train",
        "--join=train",
        "--size=2",
        f"--rank={rank}",
        "--node=$(NODE_NAME)",
        "--tier=passive",
        "--no-collective",
    ]

    def of_pod(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    container = {
        "name": "gate",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["gate", f"--aggregator={host}", *files, *asked, "--wait=2m"],
        "env": [
            of_pod("NODE_NAME", "spec.nodeName"),
            of_pod("POD_NAME", "metadata.name"),
            of_pod("POD_NAMESPACE", "metadata.namespace"),
            of_pod("POD_UID", "metadata.uid"),
        ],
        "volumeMounts": [{"name": "gate", "mountPath": "/etc/healthd/gate", "readOnly": True}],
    }
    spread = {"matchLabels": {"job": "train"}}
    apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": spread}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"train-{rank}", "namespace": namespace, "labels": {"job": "train"}},
        "spec": {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}},
            "containers": [container],
            "volumes": [volume_of_gate()],
        },
    }


@pytest.mark.nightly
def test_jobs_of_one_name_in_two_namespaces_are_gated_with_the_tokens_of_their_pods(
    cluster: Cluster, image: str, system: Path
) -> None:
    """The chart as it stands, and hooks that nobody gave a secret."""
    may = {"aggregator.settings.HEALTHD_GATE_CALLERS_MAY": "tier\\,collective"}
    cluster.helm("install", "healthd", CHART, "-n", HEALTHD, *values(image, **may))
    rolled_out(cluster)
    names = ("tests-team-a", "tests-team-b")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(cluster.namespace(name))
            cluster.authority(system, name)
            cluster.apply(*(hook(name, image, rank) for rank in range(2)))
            for rank in range(2):
                until(
                    "the hook has ended",
                    lambda name=name, rank=rank: phase(cluster, name, f"train-{rank}") in ("Succeeded", "Failed"),
                    120.0,
                )
                assert phase(cluster, name, f"train-{rank}") == "Succeeded", cluster.kubectl(
                    "logs", f"train-{rank}", "-n", name
                )
        for name in names:
            told = cluster.fleet(system, "explain", f"{name}/train")
            assert "ADMIT" in told
        missing = cluster.fleet(system, "explain", "train", wrong=True)
        assert "no job 'train'" in missing
