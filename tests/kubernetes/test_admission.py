"""Jobs without a gate, in namespaces that ask for one: warned of, refused, or given one, by the API server itself."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from checks.accelerators import descriptors
from tests.deploy.manifests import KUBERNETES
from tests.kubernetes.device_plugin import DevicePlugin
from tests.kubernetes.kit import SYSTEM, Cluster, until
from tests.kubernetes.overlays_kit import own

pytestmark = pytest.mark.kubernetes

IMAGE = "registry.example.com/healthd:0.1.0"
JOBS = "tests-gated"
GATED = "healthd.internal/gated"
UNGATED = "healthd.internal/ungated"
TRAIN = ["python", "train.py"]


def container(command: list[str] | None = None, *, name: str = "train", **limits: object) -> dict[str, Any]:
    """With `limits` of devices, by default one GPU."""
    made: dict[str, Any] = {"name": name, "image": "registry.example.com/train:1"}
    made["resources"] = {"limits": limits.get("limits", {"nvidia.com/gpu": 1})}
    return made if command is None else {**made, "command": command}


def pod(*containers: dict[str, Any], **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one", "namespace": JOBS},
        "spec": {"restartPolicy": "Never", "containers": list(containers or [container(TRAIN)]), **spec},
    }


def job(template: dict[str, Any], **spec: object) -> dict[str, Any]:
    """A Job of such pods."""
    metadata = {key: value for key, value in template["metadata"].items() if key in ("labels", "annotations")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "one", "namespace": JOBS},
        "spec": {"template": {"metadata": metadata, "spec": template["spec"]}, **spec},
    }


def excused(item: dict[str, Any], why: str) -> dict[str, Any]:
    made = copy.deepcopy(item)
    made["metadata"]["annotations"] = {UNGATED: why}
    return made


def documents(name: str) -> list[dict[str, Any]]:
    text = (KUBERNETES / "examples" / f"{name}.yaml").read_text(encoding="utf-8")
    items = [item for item in yaml.safe_load_all(text) if item["kind"] == "Job"]
    for item in items:
        item["metadata"]["namespace"] = JOBS
    return items


CLAIM = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}
SCRIPT = [
    "sh",
    "-c",
    "set -e\n/opt/healthd/bin/healthd gate --aggregator=https://a:8090 --job=one\nexec python train.py",
]
GATE = container(["healthd", "gate", "--aggregator=https://a:8090", "--job=one"], name="first", limits={})
PASS = {
    "no device": pod(container(TRAIN, limits={"cpu": "4"})),
    "none of a device": pod(container(TRAIN, limits={"nvidia.com/gpu": 0})),
    "an init container": pod(initContainers=[GATE]),
    "a script": pod(container(SCRIPT)),
    "a preflight": pod(container(["/opt/healthd/bin/healthd", "preflight", "--nnodes=2", "--", *TRAIN])),
    "an entry point": pod(initContainers=[{"name": "first", "image": IMAGE, "args": ["gate", "--job=one"]}]),
    "a reason": excused(pod(), "the image's entry point asks"),
    "a job with a reason": job(excused(pod(), "the image's entry point asks")),
    "the example": documents("gated-job")[0],
    "the example of preflight": documents("preflight-job")[0],
}
REFUSE = {
    "a pod": (pod(), "nvidia.com/gpu"),
    "a job": (job(pod()), "nvidia.com/gpu"),
    "a partition": (pod(container(TRAIN, limits={"nvidia.com/mig-1g.10gb": 1})), "nvidia.com/mig-1g.10gb"),
    "cores": (pod(container(TRAIN, limits={"aws.amazon.com/neuroncore": 2})), "aws.amazon.com/neuroncore"),
    "a claim": (pod(container(TRAIN, limits={}), **CLAIM), "claim gpu"),
    "another program": (pod(container(["healthd", "check"])), "nvidia.com/gpu"),
    "a word that looks like it": (pod(container(["not-healthd", "gate"])), "nvidia.com/gpu"),
    "a reason that is empty": (excused(pod(), ""), "nvidia.com/gpu"),
}


def answers(cluster: Cluster, items: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """What the server says of each that passes no gate, by its key here; one call for all."""
    named = {f"of-{number}": name for number, name in enumerate(items)}
    asked = []
    for name, key in named.items():
        asked.append(copy.deepcopy(items[key]))
        asked[-1]["metadata"]["name"] = name
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": asked})
    line = ("create", "--dry-run=server", "--warnings-as-errors", "-f", "-")
    lines = cluster.kubectl(*line, text=text, wrong=None).splitlines()
    return {
        named[found[1]]: told
        for told in lines
        if (found := re.search(r"(?:Pod|Job) (of-\d+) asks for .* and passes no gate of healthd", told))
    }


@pytest.mark.parametrize("version", ["cluster", "oldest"])
def test_ungated_jobs_are_warned_of_or_refused(request: pytest.FixtureRequest, version: str, tmp_path: Path) -> None:
    server: Cluster = request.getfixturevalue(version)
    with server.namespace(JOBS, {GATED: "true"}):
        for component, word in (("ungated-jobs", "Warning: "), ("ungated-jobs-deny", "forbidden")):
            folder = policies(tmp_path / component, component)
            server.kubectl("apply", "--server-side", "-k", folder)
            assert server.kubectl("diff", "--server-side", "-k", folder) == ""
            until("in force", lambda word=word: word in "".join(answers(server, {"a pod": pod()}).values()))
            told = answers(server, {**{name: item for name, (item, _) in REFUSE.items()}, **PASS})
            assert set(told) == set(REFUSE), told
            for name, (_, sentence) in REFUSE.items():
                assert f"asks for {sentence} and" in told[name]
                assert word in told[name]
        server.kubectl("label", "namespace", JOBS, f"{GATED}-")
        until("a namespace without the label is let alone", lambda: not answers(server, {"a pod": pod()}))
        status = server.get("validatingadmissionpolicy", "healthd-ungated-jobs")["status"]
        assert status["typeChecking"] == {}, "the server finds nothing to say of the expressions"
        server.kubectl("delete", "-k", folder)


def test_devices_are_those_that_the_node_daemon_knows() -> None:
    policy = (KUBERNETES / "components/ungated-jobs/policy.yaml").read_text(encoding="utf-8")
    known = "|".join(sorted(name.replace(".", "[.]") for one in descriptors() for name in one.kubernetes_resources))
    assert f"'^({known})'" in policy
    assert f"'^({known})'" in (KUBERNETES / "components/gate-injection/policy.yaml").read_text(encoding="utf-8")


INDEXED = {"completionMode": "Indexed", "completions": 2, "parallelism": 2}
JOBSET = {"labels": {"jobset.sigs.k8s.io/jobset-name": "set"}}
AS_IT_IS = {
    "no device": job(pod(container(TRAIN, limits={}))),
    "a gate of its own": job(pod(initContainers=[GATE])),
    "a reason": job(excused(pod(), "a demonstration")),
    "the same node again": job({**pod(), "spec": {**pod()["spec"], "restartPolicy": "OnFailure"}}),
    "fewer at a time": job(pod(), **{**INDEXED, "parallelism": 1}),
    "no index": job(pod(), completions=2, parallelism=2),
    "a JobSet": job({**pod(), "metadata": JOBSET}, **INDEXED),
}


@pytest.fixture(name="injecting", scope="module")
def _injecting(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The policy in force, in the namespace of the examples' jobs."""
    if "mutatingadmissionpolicies" not in cluster.kubectl("api-resources"):
        pytest.skip(f"{cluster.version()} serves no MutatingAdmissionPolicy; 1.36 does")
    folder = policies(tmp_path_factory.mktemp("own") / "injection", "gate-injection", "ungated-jobs-deny")
    with cluster.namespace(SYSTEM), cluster.namespace(JOBS, {GATED: "inject"}):
        cluster.kubectl("apply", "--server-side", "-k", folder)
        try:
            assert cluster.kubectl("diff", "--server-side", "-k", folder) == ""
            until("the policy is in force", lambda: "initContainers" in made_of(cluster, job(pod()))["spec"])
            yield cluster
        finally:
            cluster.kubectl("delete", "-k", folder, "--ignore-not-found")


def made_of(cluster: Cluster, item: dict[str, Any]) -> dict[str, Any]:
    """The pods' template of the Job that the server would store."""
    told = cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", text=json.dumps(item), wrong=None)
    made: dict[str, Any] = json.loads(told) if told.startswith("{") else {"spec": {"template": {"spec": {}}}}
    return {**made["spec"]["template"], "policy": made["spec"].get("podFailurePolicy", {}).get("rules", [])}


def test_job_without_a_gate_is_given_that_of_the_example(injecting: Cluster) -> None:
    own_gate = {"name": "data", "image": "registry.example.com/data:1"}
    volume = {"name": "data", "emptyDir": {}}
    item = job(pod(initContainers=[own_gate], volumes=[volume]), **INDEXED, activeDeadlineSeconds=600)
    made = made_of(injecting, item)
    gate, other = made["spec"]["initContainers"]
    (example,) = documents("gated-job")
    expected = example["spec"]["template"]["spec"]["initContainers"][0]
    assert other["name"] == "data", "the gate is before all else"
    assert gate["image"] == IMAGE
    options = {word.partition("=")[0] for word in gate["command"][2:]}
    assert options == {word.partition("=")[0] for word in expected["command"][2:]} - {"--execute"}
    env = {one["name"]: one for one in gate["env"]}
    assert env["JOB_COMPLETIONS"]["value"] == "2"
    for one in expected["env"]:
        if "valueFrom" in one:
            assert env[one["name"]]["valueFrom"]["fieldRef"]["fieldPath"] == one["valueFrom"]["fieldRef"]["fieldPath"]
    assert [one["name"] for one in made["spec"]["volumes"]] == ["data", "gate"]
    sources = example["spec"]["template"]["spec"]["volumes"][0]["projected"]["sources"]
    assert made["spec"]["volumes"][1]["projected"]["sources"] == sources
    actions = [(rule["action"], rule["onExitCodes"]["values"]) for rule in made["policy"]]
    assert actions == [("Ignore", [75]), ("FailJob", [1, 2])]


def test_job_of_one_pod_needs_no_index_and_one_without_a_deadline_ends_by_its_failures(injecting: Cluster) -> None:
    made = made_of(injecting, job(pod()))
    env = {one["name"]: one.get("value") for one in made["spec"]["initContainers"][0]["env"]}
    assert (env["RANK"], env["JOB_COMPLETIONS"]) == ("0", "1")
    assert made["policy"][0]["action"] == "Count"


def test_rules_of_the_job_come_after_those_of_the_gate(injecting: Cluster) -> None:
    rule = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    made = made_of(injecting, job(pod(), podFailurePolicy={"rules": [rule]}))
    assert [one["action"] for one in made["policy"]] == ["Count", "FailJob", "Ignore"]


def test_job_that_cannot_be_joined_is_left_as_it_is_and_then_refused(injecting: Cluster) -> None:
    for name, item in AS_IT_IS.items():
        assert "gate" not in [one["name"] for one in made_of(injecting, item)["spec"].get("initContainers", ())], name
    assert set(answers(injecting, AS_IT_IS)) == set(AS_IT_IS) - {"no device", "a gate of its own", "a reason"}


def test_gate_that_was_added_knows_its_job_its_rank_and_its_node(injecting: Cluster, nodes_of_ours: Cluster) -> None:
    """By real kubelets: a program in the place of the gate says what it was told, and fails without token and CA."""
    assert nodes_of_ours.folder is not None
    script = (
        ": healthd gate $(JOB_NAME) && test -s /etc/healthd/gate/token && test -s /etc/healthd/gate/ca.crt "
        "&& echo $(JOB_NAME) $(RANK) of $(JOB_COMPLETIONS) on $(NODE_NAME) as $(POD_NAMESPACE)/$(POD_NAME)"
    )
    image = {"image": "localhost/pause:1", "imagePullPolicy": "Never"}
    gate = [{"name": "gate", **image, "command": ["sh", "-c", script]}]
    patch = json.dumps({"template": {"spec": {"containers": gate}}})
    node = injecting.nodes()[0]
    item = job(pod({**container(["true"]), **image}), **INDEXED)
    authority = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "healthd-ca", "namespace": JOBS}}
    injecting.apply({**authority, "data": {"ca.crt": "PEM"}})
    with DevicePlugin(nodes_of_ours.folder / node / "kubelet", "nvidia.com/gpu", 2):
        injecting.kubectl("patch", "podtemplate", "healthd-gate", "-n", SYSTEM, "--type=merge", "-p", patch)
        try:
            until("the template is known", lambda: "pause" in json.dumps(made_of(injecting, item)))
            injecting.apply(item)
            injecting.kubectl("wait", "--for=condition=complete", "--timeout=120s", "job/one", "-n", JOBS)
            told = [
                injecting.kubectl("logs", name, "-c", "gate", "-n", JOBS).split(" as ")[0]
                for name in injecting.pods(JOBS, "job-name=one")
            ]
            assert sorted(told) == [f"one {rank} of 2 on {node}" for rank in range(2)]
        finally:
            injecting.kubectl("delete", "job", "one", "-n", JOBS, "--ignore-not-found")
            template = KUBERNETES / "components/gate-injection/template.yaml"
            injecting.kubectl("apply", "--server-side", "--force-conflicts", "-n", SYSTEM, "-f", template)


def test_job_is_refused_while_the_gate_to_add_is_gone(injecting: Cluster) -> None:
    template = KUBERNETES / "components/gate-injection/template.yaml"
    injecting.kubectl("delete", "-n", SYSTEM, "-f", template)
    try:
        line = ("create", "--dry-run=server", "-f", "-")
        text = json.dumps(job(pod()))
        ask = lambda: injecting.kubectl(*line, text=text, wrong=None)  # noqa: E731
        until("refused", lambda: "policy 'healthd-gate-injection'" in (told := ask()) and "no params found" in told)
    finally:
        injecting.kubectl("apply", "--server-side", "--force-conflicts", "-n", SYSTEM, "-f", template)


def policies(folder: Path, *components: str) -> Path:
    """A kustomization of these components alone."""
    made = own(folder, IMAGE, "base", *components)
    text = (made / "kustomization.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.endswith("/base") and line != "resources:"]
    (made / "kustomization.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made
