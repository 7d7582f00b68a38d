"""
What deploy/kubernetes builds: valid for several versions of Kubernetes, no more rights than said, settings that exist.

What is proved here is the schema, and that what the manifests say fits what healthd reads; on a cluster:
tests/kubernetes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from checks.catalog import TYPES
from checks.contract import Tier
from checks.discover import builtin_checks
from deploy.kubernetes import generate
from healthd.aggregator.identity.tokens import check_exposure
from healthd.cli.hooks.answer import own_workload
from healthd.cli.hooks.gate import gate
from healthd.cli.hooks.preflight import preflight
from healthd.cli.settings.tree import Settings
from healthd.core.config import load
from healthd.core.evidence import judge_health
from healthd.core.model import Health
from healthd.integrations.kubernetes.actuator import LIST, READ, WRITE
from healthd.integrations.kubernetes.condition_writer import NEEDS, NEEDS_EVENTS
from healthd.integrations.kubernetes.maintenance import NEEDS as NODES_NEED
from healthd.integrations.kubernetes.pods import NEEDS as PODS_NEED
from healthd.integrations.kubernetes.service_accounts import NEEDS as NEEDS_REVIEWS
from healthd.integrations.kubernetes.settings import KubernetesCallers, KubernetesSettings
from healthd.node.checks.catalogue import QuickFacts, enabled_checks, quick_due_at, under_rule
from healthd.postmortem import EXIT_CODES
from tests.aggregator.world import result, state
from tests.deploy.kubernetes_kit import (
    OVERLAYS,
    assert_bound,
    node_pod,
    of_config_map,
    projected,
    rights,
    with_all_components,
)
from tests.deploy.manifests import (
    JOBS,
    KUBERNETES,
    OTHERS,
    ROOT,
    VERSIONS,
    built,
    kustomize,
    pods,
    strictly,
    templates,
    the,
)

pytestmark = pytest.mark.system("kubectl")

# Secrets that people make (docs/kubernetes.md says how), by the keys that are used.
SECRETS = {"healthd-tokens", "healthd-aggregator-tls", "healthd-prometheus"}
WITHOUT_COMPONENTS = {"healthd-aggregator-tls"}


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    return with_all_components(tmp_path_factory.mktemp("own"))


def examples() -> Iterator[dict[str, Any]]:
    for file in (*sorted((KUBERNETES / "examples").glob("*.yaml")), KUBERNETES / "readiness-rule.yaml"):
        yield from yaml.safe_load_all(file.read_text(encoding="utf-8"))


def containers(part: object) -> Iterator[dict[str, Any]]:
    """All containers in an object, also of a kind that an operator brings."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key in ("containers", "initContainers"):
                yield from value
            else:
                yield from containers(value)
    elif isinstance(part, list):
        for one in part:
            yield from containers(one)


# --- schemas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_valid_in_every_version(overlay: str) -> None:
    for item in built(overlay):
        strictly(item)


def test_all_components_together_are_valid(whole: tuple[dict[str, Any], ...]) -> None:
    for item in whole:
        strictly(item)
    assert {item["kind"] for item in (*whole, *examples())} >= OTHERS - {"Certificate"}  # of the chart alone


def test_every_known_instance_type_with_neuron_devices_gets_the_daemon() -> None:
    (term,) = node_pod("eks-neuron/active")["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    (types,) = (one["values"] for one in term["matchExpressions"])
    assert set(types) == {name for name, known in TYPES.items() if known.chip.accelerator == "neuron"}


def test_examples_are_valid() -> None:
    for item in examples():
        strictly(item)


def test_second_pool_is_valid_and_shares_nothing_with_the_first() -> None:
    second, first = kustomize(KUBERNETES / "examples/second-pool"), built("eks-neuron/active")
    for item in second:
        strictly(item)

    def name_of(item: dict[str, Any]) -> tuple[str, str]:
        return item["kind"], item["metadata"]["name"]

    assert not {name_of(item) for item in second} & {name_of(item) for item in first}
    daemons = [next(item for item in items if item["kind"] == "DaemonSet")["spec"] for items in (first, second)]
    selectors = [daemon["selector"]["matchLabels"] for daemon in daemons]
    assert selectors[0] != selectors[1]
    for daemon in daemons:
        assert daemon["selector"]["matchLabels"].items() <= daemon["template"]["metadata"]["labels"].items()
    binding = next(item for item in second if item["kind"] == "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == "healthd-node-inf"
    assert binding["subjects"][0]["name"] == daemons[1]["template"]["spec"]["serviceAccountName"] == "healthd-node-inf"


def test_validation_is_strict_enough_to_find_a_slip() -> None:
    slip = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "x"},
        "automountServiceAccountTokens": True,
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(slip, VERSIONS[0], strict=True)


# --- what is promised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name.endswith("observe")])
def test_observe_has_no_privilege_and_runs_nothing_on_devices(overlay: str) -> None:
    pod = node_pod(overlay)
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert not security.get("privileged")
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    assert not pod.get("hostPID")
    assert not pod.get("hostIPC")
    paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert paths == {"/var/lib/healthd", "/run/healthd", "/var/lib/kubelet/pod-resources"}
    settings = of_config_map(overlay, "healthd-node")
    assert settings.node.active.unprompted is not None
    assert settings.node.active.unprompted.value == "off"
    active = {name for name, check in builtin_checks().items() if check.tier.value != "passive"}
    assert active <= set(settings.node.disabled)


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name.endswith("active")])
def test_active_has_what_is_listed_and_runs_unprompted_once_after_a_boot(overlay: str) -> None:
    pod = node_pod(overlay)
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"] is True
    assert "capabilities" not in container["securityContext"]
    assert pod["hostPID"] is True
    paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert paths == {"/var/lib/healthd", "/run/healthd", "/var/lib/kubelet/pod-resources", "/dev", "/lib/modules"}
    settings = of_config_map(overlay, "healthd-node")
    assert settings.node.active.unprompted is not None
    assert settings.node.active.unprompted.value == "boot"
    assert not {"matmul", "all_reduce", "device_holders", "kernel_log"} & set(settings.node.disabled)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_daemon_can_become_healthy_though_no_gate_asks_for_anything(overlay: str) -> None:
    settings = of_config_map(overlay, "healthd-node")
    specs = enabled_checks(builtin_checks(), settings.node)
    assert settings.node.active.unprompted is not None
    specs = under_rule(specs, settings.node.active.unprompted)
    facts = QuickFacts(
        specs=specs,
        result=lambda _: None,
        attempted_at=None,
        released=False,
        forced=False,
        untested=False,
        jitter=0.0,
    )
    due_at = quick_due_at(facts, settings.node.active, now=5.0)
    ran = [spec for spec in specs if spec.tier is Tier.PASSIVE or (spec.tier is Tier.QUICK and due_at < math.inf)]
    known = state(overlay, [result(spec.name, tier=spec.tier) for spec in ran])
    health, reasons = judge_health(dataclasses.replace(known, checks=specs))
    assert (health, reasons) == (Health.HEALTHY, ())
    if due_at < math.inf and settings.probe.accelerator == "neuron":
        assert settings.probe.on_cold_cache == "compile", "what runs once and is cold would stay unknown"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_daemon_takes_no_device_from_the_jobs(overlay: str) -> None:
    (container,) = node_pod(overlay)["containers"]
    asked = {**container["resources"].get("requests", {}), **container["resources"].get("limits", {})}
    assert set(asked) == {"cpu", "memory"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_bad_hardware_neither_restarts_the_daemon_nor_hides_its_answer(overlay: str) -> None:
    (container,) = node_pod(overlay)["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/livez"
    assert {"operator": "Exists"} in node_pod(overlay)["tolerations"]


def test_no_pod_gets_variables_of_services() -> None:
    for overlay in OVERLAYS:
        for pod in pods(built(overlay)):
            assert pod["enableServiceLinks"] is False
    for pod in pods(examples()):
        assert pod["enableServiceLinks"] is False


def test_aggregator_is_one_and_lets_go_before_the_next_starts() -> None:
    for overlay in OVERLAYS:
        deployment = the(built(overlay), "Deployment", "healthd-aggregator")["spec"]
        assert deployment["replicas"] == 1
        assert deployment["strategy"] == {"type": "Recreate"}
        (container,) = deployment["template"]["spec"]["containers"]
        # Nodes have to reach it while it does not know its fleet yet.
        assert container["readinessProbe"]["httpGet"]["path"] == "/livez"
        assert deployment["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_images_are_named_in_one_place() -> None:
    where = [
        file.relative_to(KUBERNETES).as_posix()
        for file in KUBERNETES.rglob("*.yaml")
        if "registry.example.com/healthd" in file.read_text(encoding="utf-8")
    ]
    assert where == ["components/image/kustomization.yaml"]
    for overlay in OVERLAYS:
        for pod in pods(built(overlay)):
            for container in pod["containers"]:
                assert container["image"].startswith("registry.example.com/healthd")
                assert ":" in container["image"].rpartition("/")[2]


def test_secrets_are_those_that_the_guide_makes(whole: tuple[dict[str, Any], ...]) -> None:
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    used = set(re.findall(r"'secretName': '([^']+)'", str([*whole, *examples()])))
    used |= {
        ref
        for item in whole
        if item["kind"] == "PodMonitor"
        for ref in re.findall(r"'name': '(healthd-prom[^']*)'", str(item))
    }
    assert used == SECRETS
    for name in used:
        assert f"secret generic {name}" in guide or f"secret tls {name}" in guide
    for overlay in OVERLAYS:
        assert set(re.findall(r"'secretName': '([^']+)'", str(built(overlay)))) == WITHOUT_COMPONENTS


def test_nodes_and_hooks_send_tokens_that_are_bound_to_the_aggregators_audience(
    whole: tuple[dict[str, Any], ...],
) -> None:
    callers = of_config_map("", "healthd-aggregator", whole).aggregator.of("kubernetes", KubernetesCallers)
    hooks = [
        template["spec"]
        for item in examples()
        for template in templates(item)
        if "/etc/healthd/gate/token" in str(template)
    ]
    assert len(hooks) == 6
    for pod in (node_pod("eks-neuron/active"), *hooks):
        assert projected(pod)["audience"] == callers.audience
        assert projected(pod)["path"] == "token"
        assert projected(pod)["expirationSeconds"] >= 600, "Kubernetes refuses less"
    for items in (whole, kustomize(KUBERNETES / "examples/second-pool")):
        (daemon,) = [item for item in items if item["kind"] == "DaemonSet"]
        account = f"healthd-system/{daemon['spec']['template']['spec']['serviceAccountName']}"
        assert any(fnmatch.fnmatchcase(account, pattern) for pattern in callers.nodes)
    (admin,) = callers.admins
    the(whole, "ServiceAccount", admin.partition("/")[2])
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert f"create token {admin.partition('/')[2]} --audience {callers.audience}" in guide


# --- what the manifests say fits what healthd reads -----------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_variables_are_settings_and_names_are_checks(overlay: str) -> None:
    node = of_config_map(overlay, "healthd-node")
    assert set(node.node.disabled) <= set(builtin_checks())
    wanted = node.node.of("kubernetes", KubernetesSettings)
    assert wanted.condition == "healthd.internal/Fit"
    assert not wanted.accelerated_hardware_ready
    aggregator = of_config_map(overlay, "healthd-aggregator").aggregator
    assert not aggregator.insecure
    check_exposure(hosts=["0.0.0.0"], tokens=True, tls=aggregator.tls_cert is not None, insecure=False)
    for container in node_pod(overlay)["containers"]:
        ours = {item["name"]: "x=y" for item in container["env"] if item["name"].startswith("HEALTHD_")}
        load(
            Settings,
            file=None,
            environ=ours,
            arguments={},
            sections=("node",),
            defaults={"node.state_dir": Path("/x"), "node.run_dir": Path("/x")},
        )


def test_components_turn_on_what_they_say(whole: tuple[dict[str, Any], ...]) -> None:
    settings = of_config_map("", "healthd-aggregator", whole)
    assert settings.actuator.kind == "kubernetes"
    assert settings.actuator.mode == "observe", "nobody's nodes are tainted by the first apply"
    wanted = of_config_map("", "healthd-node", whole).node.of("kubernetes", KubernetesSettings)
    assert wanted.accelerated_hardware_ready
    rule = the(tuple(examples()), "NodeReadinessRule", "healthd-fit")["spec"]
    assert rule["dryRun"] is True
    assert rule["conditions"][0]["type"] == wanted.condition


def test_rights_are_those_that_the_code_uses(whole: tuple[dict[str, Any], ...]) -> None:
    of_pods = {f"{verb} on pods" for verb in PODS_NEED.removesuffix(" on pods").split(" and ")}
    of_nodes = {f"{verb} on nodes" for verb in NODES_NEED.removesuffix(" on nodes").split(" and ")}
    assert rights(whole, "healthd-node") == {"get on nodes", NEEDS, NEEDS_EVENTS, *of_pods, *of_nodes}
    assert rights(whole, "healthd-actuator") == {READ, WRITE, LIST}
    reviews = {one.removesuffix(".authentication.k8s.io") for one in rights(whole, "healthd-aggregator")}
    assert reviews == {NEEDS_REVIEWS}
    assert_bound(whole, "healthd-node", "healthd-node")
    assert_bound(whole, "healthd-actuator", "healthd-aggregator")
    assert_bound(whole, "healthd-aggregator", "healthd-aggregator")


def test_every_hook_says_which_pod_it_is() -> None:
    """So that the lease of its node ends with that pod."""
    told = {"POD_NAMESPACE": "metadata.namespace", "POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    hooks = [one for one in containers(list(examples())) if "--join" in str((one.get("command"), one.get("args")))]
    assert [one["name"] for one in hooks] == ["gate", "gate", "pytorch", "pytorch", "gate", "gate"]
    for hook in hooks:
        env = {one["name"]: one["valueFrom"] for one in hook["env"] if "valueFrom" in one}
        assert {name: env[name]["fieldRef"]["fieldPath"] for name in told} == told
    assert own_workload(dict.fromkeys(told, "a"), None) == "pod:a/a/a"


def test_token_of_the_api_server_is_mounted_only_where_it_is_used(whole: tuple[dict[str, Any], ...]) -> None:
    deployments = (("Deployment", "healthd-aggregator"), ("Deployment", "healthd-kueue"))
    for kind, name in (("DaemonSet", "healthd-node"), *deployments):
        assert the(whole, kind, name)["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    for account in [item for item in whole if item["kind"] == "ServiceAccount"]:
        assert account["automountServiceAccountToken"] is False, "nor in other pods of the account"
    for pod in pods(examples()):
        assert pod["automountServiceAccountToken"] is False


def test_monitors_find_the_pods_and_give_the_job_names_of_the_rules(whole: tuple[dict[str, Any], ...]) -> None:
    rules = (KUBERNETES / "components/monitoring/prometheus-rules.yaml").read_text(encoding="utf-8")
    for kind, name in (("DaemonSet", "healthd-node"), ("Deployment", "healthd-aggregator")):
        monitor = the(whole, "PodMonitor", name)["spec"]
        template = the(whole, kind, name)["spec"]["template"]
        labels = template["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        assert labels[monitor["jobLabel"]] == name
        ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
        assert name in rules


def test_rules_are_those_of_deploy_prometheus() -> None:
    assert generate.TARGET.read_text(encoding="utf-8") == generate.rules(), "run python -m deploy.kubernetes.generate"
    made = list(yaml.safe_load_all(generate.rules()))
    for item, name in zip(made, generate.SOURCES, strict=True):
        source = yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text(encoding="utf-8"))
        assert item["spec"] == source


def test_dashboards_are_found_by_the_sidecar(whole: tuple[dict[str, Any], ...]) -> None:
    found = [item for item in whole if item["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    assert len(found) == 3
    assert all(len(str(item)) < 900_000 for item in found), "a ConfigMap holds 1 MiB"


# --- the job --------------------------------------------------------------------------------------------------------


def test_gate_of_the_example_is_a_command_that_there_is() -> None:
    job = next(item for item in examples() if item["kind"] == "Job")
    (hook,) = job["spec"]["template"]["spec"]["initContainers"]
    assert [word.rpartition("/")[2] for word in hook["command"][:2]] == ["healthd", "gate"]
    options = {option for parameter in gate.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in hook["command"][2:]} <= options
    defined = {item["name"] for item in hook["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(hook["command"]))) <= defined


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_jobs_of_other_operators_type_commands_that_there_are(kind: str) -> None:
    job = next(item for item in examples() if item["kind"] == kind)
    containers = [
        container
        for template in templates(job)
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])
    ]
    (line,) = {
        line
        for container in containers
        if "/opt/healthd/bin/healthd" in (line := " ".join(container.get("command", []) + container.get("args", [])))
    }
    words = (
        line.replace("\\\n", " ").partition("/opt/healthd/bin/healthd ")[2].partition(" -- ")[0].splitlines()[0].split()
    )
    command = {"gate": gate, "preflight": preflight}[words[0]]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words[1:]} <= options
    for template in templates(job):
        assert template["spec"]["enableServiceLinks"] is False


def test_a_pytorchjob_is_tried_again_when_the_gate_said_so_and_fails_on_mistakes(tmp_path: Path) -> None:
    """The script of its container, with a gate that ends in each way; from 128 on the operator makes the pod anew."""
    job = next(item for item in examples() if item["kind"] == "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert [roles[role]["restartPolicy"] for role in ("Master", "Worker")] == ["ExitCode"] * 2
    assert roles["Master"]["template"] == roles["Worker"]["template"]
    (script,) = roles["Worker"]["template"]["spec"]["containers"][0]["args"]
    for code, ends in ((0, 7), (75, 175), (1, 1), (2, 2)):
        bin_folder = tmp_path / str(code)
        bin_folder.mkdir()
        for name, text in (("healthd", f"exit {code}"), ("python", "exit 7")):
            (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (bin_folder / name).chmod(0o755)
        own = script.replace("/opt/healthd/bin/healthd", str(bin_folder / "healthd"))
        done = subprocess.run(
            ["/bin/sh", "-c", own],
            env={"PATH": f"{bin_folder}:/usr/bin:/bin", "PET_NNODES": "4", "PET_NODE_RANK": "0"},
            check=False,
        )
        assert done.returncode == ends, f"gate ended with {code}"


def test_preflight_of_the_example_is_told_what_kubernetes_does_not_tell_a_pod() -> None:
    job, service = (
        next(item for item in examples() if item["kind"] == kind and item["metadata"]["name"] == "small")
        for kind in ("Job", "Service")
    )
    (work,) = job["spec"]["template"]["spec"]["containers"]
    assert work["command"][1:3] == ["preflight", f"--nnodes={job['spec']['completions']}"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True, "ranks meet before they are ready"


def test_a_job_below_a_parent_is_tried_again_where_its_verdict_says_so() -> None:
    job = next(item for item in examples() if item["kind"] == "Job" and item["metadata"]["name"] == "watched")
    (work,) = job["spec"]["template"]["spec"]["containers"]
    assert work["command"][1:4] == ["preflight", "--run", "--exit-style=verdict"]
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert {outlook: actions[code] for outlook, code in EXIT_CODES.items()} == {
        "retry elsewhere": "Ignore",
        "retry here": "Count",
        "do not retry": "FailJob",
        "stopped": "FailJob",
    }
    assert job["spec"]["backoffLimit"] >= job["spec"]["completions"], "else no counted retry would be left"


def test_gate_of_the_example_finds_what_was_compiled_before_and_may_compile() -> None:
    job = next(item for item in examples() if item["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    (hook,) = pod["initContainers"]
    given = {item["name"]: item["value"] for item in hook["env"] if item["name"].startswith("HEALTHD_")}
    defaults = {"node.name": "n1", "node.state_dir": Path("/x"), "node.run_dir": Path("/x")}
    probe = load(Settings, file=None, environ=given, arguments={}, sections=("gate",), defaults=defaults).probe
    assert probe.on_cold_cache == "compile"
    (mount,) = (one for one in hook["volumeMounts"] if one["mountPath"] == str(probe.compile_cache))
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    (state_volume,) = (
        one for one in node_pod("eks-neuron/active")["volumes"] if one["name"] == "state"
    )  # of the daemon, which compiles for the gates of its node and they for it
    assert volume["hostPath"]["path"] == f"{state_volume['hostPath']['path']}/compile-cache"


def test_gate_asks_for_all_that_the_job_has_and_its_no_is_no_failure() -> None:
    job = next(item for item in examples() if item["kind"] == "Job")["spec"]
    pod = job["template"]["spec"]
    (hook,), (work,) = pod["initContainers"], pod["containers"]
    assert hook["resources"] == work["resources"]
    assert pod["restartPolicy"] == "Never"
    codes = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
        if rule["onExitCodes"]["containerName"] == hook["name"]
    }
    assert codes == {75: "Ignore", 1: "FailJob", 2: "FailJob"}
    assert job["podReplacementPolicy"] == "Failed", "the only one that Kubernetes takes with podFailurePolicy"
    assert job["activeDeadlineSeconds"] > 0, "what is ignored is not counted, so something else has to end it"


def pod_ends(rules: list[dict[str, Any]], container: str, code: int) -> str:
    """
    What a pod's end comes to, by the first rule that matches: Ignore, FailJob, or Count (towards backoffLimit).

    Source: Kubernetes, "Pod failure policy".
    """
    for rule in rules:
        codes = rule.get("onExitCodes", {})
        if codes.get("operator") == "In" and codes["containerName"] == container and code in codes["values"]:
            return str(rule["action"])
    return "Count"


def job_ends(policy: dict[str, Any], reason: str, restarts: int) -> str:
    """What a failed Job comes to in its JobSet: without a rule a restart that counts. Source: JobSet v1alpha2."""
    for rule in policy.get("rules", ()):
        if reason in rule.get("onJobFailureReasons", (reason,)):
            if rule["action"] == "FailJobSet":
                return "fails"
            if rule["action"] == "RestartJobSetAndIgnoreMaxRestarts":
                return "restarts"
    return "restarts" if restarts < policy["maxRestarts"] else "fails"


@pytest.mark.parametrize(
    ("container", "code", "jobset", "pods_made"),
    [
        ("gate", 75, "runs", "another pod"),  # not admitted: nothing fails, as often as it takes
        ("gate", 1, "fails", "none"),
        ("gate", 2, "fails", "none"),
        ("train", 1, "restarts", "none"),  # the training's own codes are no answers of the gate
        ("train", 75, "restarts", "none"),
        ("train", 137, "restarts", "none"),
    ],
)
def test_every_end_of_a_pod_of_a_jobset_comes_to_what_it_should(
    container: str, code: int, jobset: str, pods_made: str
) -> None:
    spec = next(item for item in examples() if item["kind"] == "JobSet")["spec"]
    policy, job = spec["failurePolicy"], spec["replicatedJobs"][0]["template"]["spec"]
    end = pod_ends(job["podFailurePolicy"]["rules"], container, code)
    if pods_made == "another pod":
        assert end == "Ignore"
        return
    assert job["backoffLimit"] == 0, "the first failure that counts fails the Job"
    reason = "PodFailurePolicy" if end == "FailJob" else "BackoffLimitExceeded"
    assert job_ends(policy, reason, restarts=0) == jobset
    assert job_ends(policy, reason, restarts=policy["maxRestarts"]) == "fails", "for ever"
