"""
What the charts of deploy/helm render: the same objects as kustomize builds, valid, with what a type of instance has.

Helm itself is installed with the other Python packages (helm-binary). On a cluster: tests/kubernetes.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from checks.catalog import TYPES
from deploy.helm import generate
from healthd.cli.settings.tree import Settings
from healthd.core.config import load
from tests.deploy.manifests import KUBERNETES, ROOT, kustomize, pods, strictly, the
from tests.every import every
from tests.profile import some

HELM = Path(sys.executable).parent / "helm"
CHART = ROOT / "deploy/helm/healthd"
JOB = ROOT / "deploy/helm/healthd-job"
PLATFORMS = [(platform, profile) for platform in ("eks-neuron", "eks-gpu", "cpu") for profile in ("observe", "active")]
TRAIN = (
    "image=registry.example.com/train:1",
    "resources.cpu=96",
    "resources.memory=400Gi",
    "command={python,train.py}",
)

if not HELM.exists():
    pytest.skip(f"{HELM} is not installed: pip install -r requirements.txt", allow_module_level=True)


def helm(*words: str, wrong: bool = False) -> str:
    done = subprocess.run([str(HELM), *words], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0) is wrong, done.stderr
    return done.stderr if wrong else done.stdout


def sets(values: Iterable[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@functools.cache
def rendered(*values: str, chart: Path = CHART, release: str = "healthd") -> tuple[dict[str, Any], ...]:
    """Without what runs at the uninstallation alone."""
    text = helm("template", release, str(chart), "--namespace", "healthd-system", "--no-hooks", *sets(values))
    return tuple(item for item in yaml.safe_load_all(text) if item)


def whole(*words: str, chart: Path = CHART) -> tuple[dict[str, Any], ...]:
    """With the hooks, in order."""
    text = helm("template", "healthd", str(chart), "--namespace", "healthd-system", *words)
    return tuple(item for item in yaml.safe_load_all(text) if item)


def plain(items: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind and name, without what each of the two tools adds of its own."""
    found = {}
    for item in yaml.safe_load_all(re.sub(r"(healthd-(node|aggregator)(-inf)?)-[a-z0-9]{10}\b", r"\1", dump(items))):
        for holder in (item, item["spec"]["template"] if "template" in item.get("spec", {}) else item):
            metadata = holder.get("metadata", {})
            for key in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
                metadata.get("labels", {}).pop(key, None)
            for key in ("checksum/settings", "helm.sh/resource-policy"):
                metadata.get("annotations", {}).pop(key, None)
            for key in ("labels", "annotations"):
                if not metadata.get(key):
                    metadata.pop(key, None)
        if not item["kind"].startswith("ClusterRole"):
            item["metadata"].setdefault("namespace", "healthd-system")
        for spec in pods([item]):  # lists whose order means nothing, by name
            for container in spec["containers"]:
                for listed in (container.get("env", []), container.get("volumeMounts", []), spec.get("volumes", [])):
                    listed.sort(key=operator.itemgetter("name"))
        found[f"{item['kind']} {item['metadata']['name']}"] = item
    return found


def dump(items: Iterable[dict[str, Any]]) -> str:
    class Whole(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(items, Dumper=Whole, width=100_000)


def of_kustomize(*folders: str) -> dict[str, dict[str, Any]]:
    """Without the Namespace, which `helm install --create-namespace` makes."""
    items = [item for folder in folders for item in kustomize(KUBERNETES / folder)]
    return plain(item for item in items if item["kind"] != "Namespace")


# --- chart healthd --------------------------------------------------------------------------------------------------


@every(("platform", "profile"), some(PLATFORMS, 3))
def test_chart_has_no_fault_and_is_valid_in_every_version(platform: str, profile: str) -> None:
    values = (f"platform={platform}", f"profile={profile}")
    helm("lint", "--strict", str(CHART), *sets(values))
    for item in rendered(
        *values, "monitoring.enabled=true", "actuator.enabled=true", "actuator.deviceTaints=NoSchedule"
    ):
        strictly(item)


@pytest.mark.system("kubectl")
@pytest.mark.parametrize(("platform", "profile"), PLATFORMS)
def test_chart_renders_what_the_overlay_builds(platform: str, profile: str) -> None:
    assert plain(rendered(f"platform={platform}", f"profile={profile}")) == of_kustomize(
        f"overlays/{platform}/{profile}", f"overlays/{platform}/lasting"
    )


@pytest.mark.system("kubectl")
def test_what_runs_at_the_uninstallation_is_the_same() -> None:
    hooks = [
        item for item in whole("--set", "platform=cpu") if "helm.sh/hook" in item["metadata"].get("annotations", {})
    ]
    made = plain(hooks)
    for item in made.values():
        for key in ("helm.sh/hook", "helm.sh/hook-weight", "helm.sh/hook-delete-policy"):
            item["metadata"]["annotations"].pop(key)
        item["metadata"].pop("annotations")
    expected = of_kustomize("uninstall")
    for items in (made, expected):  # the chart knows its pool
        (job,) = (item for item in items.values() if item["kind"] == "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container["args"] = [word.removesuffix(",healthd.internal/pool=cpu") for word in container["args"]]
    assert made == expected


def test_uninstallation_removes_what_the_release_may_have_written() -> None:
    """A second pool has no actuator, the aggregator alone no condition; names of other settings are followed."""

    def words(*values: str) -> list[str]:
        job = next(item for item in whole("--set", "platform=cpu", *sets(values)) if item["kind"] == "Job")
        return list(job["spec"]["template"]["spec"]["containers"][0]["args"])

    pool = words("aggregator.enabled=false", "pool=inf", "nameSuffix=-inf")
    assert "--condition=healthd.internal/Fit" in pool
    assert not [word for word in pool if "owner" in word or "aggregator" in word]
    assert not [word for word in words("node.enabled=false") if "condition" in word or "healthd-node" in word]
    other = words(
        "node.acceleratedHardwareReady=true",
        "node.settings.HEALTHD_NODE_KUBERNETES_CONDITION=example.com/Fit",
        "aggregator.settings.HEALTHD_ACTUATOR_OWNER=ours",
        "aggregator.settings.HEALTHD_ACTUATOR_KUBERNETES_TAINT_KEY=example.com/out",
    )
    assert {
        "--condition=example.com/Fit",
        "--condition=AcceleratedHardwareReady",
        "--owner=ours",
        "--taint-key=example.com/out",
    } <= set(other)
    for nothing in (
        "cleanup.enabled=false",
        "node.enabled=false,aggregator.enabled=false",
        "aggregator.enabled=false,node.settings.HEALTHD_NODE_KUBERNETES_CONDITION=",
    ):
        assert not [item for item in whole("--set", f"platform=cpu,{nothing}") if item["kind"] == "Job"], nothing


VALUES = sorted(path for chart in (CHART, JOB) for path in (chart / "ci").glob("*-values.yaml"))


@every("values", some(VALUES, 3))
def test_values_of_chart_testing_pass_and_render_valid_objects(values: Path) -> None:
    chart = values.parent.parent
    helm("lint", "--strict", str(chart), "--values", str(values))
    for item in whole("--values", str(values), chart=chart):
        strictly(item)


# They exclude `storage`; ci/rds-values.yaml and ci/cloudnativepg-values.yaml have them.
SEVERAL = {"replicas", "database"}


def test_every_value_that_adds_something_arrives() -> None:
    """`ci/all-values.yaml` sets all of them; what is rendered has each word of it."""
    file = CHART / "ci/all-values.yaml"
    text = helm("template", "x", str(CHART), "--values", str(file))
    default = set(re.findall(r"\S+", helm("template", "x", str(CHART), "--set", "platform=cpu")))
    for word in re.findall(r"[\w./:-]+", file.read_text(encoding="utf-8").partition("\n")[2]):
        if word not in default and not word.endswith(":") and not re.fullmatch(r"true|false|cpu", word):
            assert word in text, f"{word} of {file.name} is nowhere"
    items = whole("--values", str(file))
    known = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in ("node", "aggregator"):
        missed = set(known[part]) - set(given[part]) - {"enabled", "aggregator", "resources", "settings", *SEVERAL}
        assert not missed, f"{file.name} leaves out {missed} of {part}"
    (daemon,) = (item for item in items if item["kind"] == "DaemonSet")
    assert "tolerations" not in daemon["spec"]["template"]["spec"]
    assert daemon["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "healthd"
    kinds = {item["kind"] for item in items}
    assert kinds >= {"PodDisruptionBudget", "Certificate", "Ingress", "PodMonitor", "PrometheusRule", "NetworkPolicy"}
    names = {item["metadata"]["name"] for item in items if item["kind"] != "PrometheusRule"}
    assert all(name.startswith(("fleet", "healthd-dashboard")) for name in names), names


@pytest.mark.system("kubectl")
def test_parts_that_are_off_by_default_are_those_of_the_components(tmp_path: Path) -> None:
    own = (tmp_path / "own").resolve()
    own.mkdir()
    reach = os.path.relpath(KUBERNETES, own)
    components = (
        *("monitoring", "actuator", "device-taints", "accelerated-hardware-ready"),
        *("ungated-jobs-deny", "gate-injection", "kueue"),
    )
    (own / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": "healthd-system",
                "resources": [f"{reach}/overlays/eks-neuron/{name}" for name in ("active", "lasting")],
                "components": [f"{reach}/components/{name}" for name in components],
            }
        )
    )
    expected = plain(item for item in kustomize(own) if item["kind"] != "Namespace")
    actuator = ("actuator.enabled=true", "actuator.deviceTaints=None")
    admission = ("admission.ungatedJobs=Deny", "admission.injectGate=true")
    others = ("monitoring.enabled=true", "kueue.enabled=true", "node.acceleratedHardwareReady=true")
    values = (*others, *actuator, *admission)
    assert plain(rendered("platform=eks-neuron", "profile=active", *values)) == joined(expected)


def joined(items: dict[str, Any]) -> dict[str, Any]:
    """The chart has the rights of the actuator in one ClusterRole, the components in two."""
    role = items.pop("ClusterRole healthd-device-taints")
    items.pop("ClusterRoleBinding healthd-device-taints")
    items["ClusterRole healthd-actuator"]["rules"] += role["rules"]
    return items


SEVERAL_VALUES = ("aggregator.replicas=2", "aggregator.database.urlSecret.name=healthd-database")


@pytest.mark.system("kubectl")
def test_several_aggregators_are_those_of_the_component(tmp_path: Path) -> None:
    own = (tmp_path / "own").resolve()
    own.mkdir()
    reach = os.path.relpath(KUBERNETES, own)
    (own / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": "healthd-system",
                "resources": [f"{reach}/overlays/cpu/observe"],
                "components": [f"{reach}/components/postgresql"],
            }
        )
    )
    for item in kustomize(own):
        strictly(item)
    assert plain(rendered("platform=cpu", *SEVERAL_VALUES)) == plain(kustomize(own))


def test_each_of_several_aggregators_has_an_address_that_the_certificate_has(tmp_path: Path) -> None:
    """By which the others and the nodes find the one that leads; and no volume, which only one could have."""
    issuer = ("aggregator.certificate.enabled=true", "aggregator.certificate.issuerRef.name=ca")
    items = rendered("platform=cpu", *SEVERAL_VALUES, *issuer)
    assert not [item for item in items if item["kind"] in ("Deployment", "PersistentVolumeClaim")]
    several = the(items, "StatefulSet", "healthd-aggregator")["spec"]
    (container,) = several["template"]["spec"]["containers"]
    names = [one["name"] for one in container["env"]]
    assert names.index("POD_NAME") < names.index("HEALTHD_AGGREGATOR_ADVERTISE_URL"), "else it is not filled in"
    (url,) = (one["value"] for one in container["env"] if one["name"] == "HEALTHD_AGGREGATOR_ADVERTISE_URL")
    headless = the(items, "Service", several["serviceName"])
    assert headless["spec"]["clusterIP"] == "None"
    for service in (headless, the(items, "Service", "healthd-aggregator")):
        assert service["spec"]["selector"].items() <= several["template"]["metadata"]["labels"].items()
    certified = the(items, "Certificate", "healthd-aggregator")["spec"]["dnsNames"]
    for number in range(3):
        own = url.replace("$(POD_NAME)", f"healthd-aggregator-{number}")
        assert own == f"https://healthd-aggregator-{number}.{headless['metadata']['name']}.healthd-system.svc:8090"
        assert urlsplit(own).hostname in certified
    data = the(items, "ConfigMap", "healthd-aggregator")["data"]
    environ = {
        **data,
        "HEALTHD_AGGREGATOR_ADVERTISE_URL": own,
        "HEALTHD_AGGREGATOR_DATABASE": "postgresql+psycopg://x/y",
    }
    defaults = {"node.name": "x", "node.state_dir": tmp_path, "node.run_dir": tmp_path}
    loaded = load(Settings, file=None, environ=environ, arguments={}, sections=("aggregator",), defaults=defaults)
    assert loaded.aggregator.own_url("0.0.0.0:8090") == own
    assert str(loaded.aggregator.ca_file) == "/etc/healthd/tls/ca.crt"
    assert the(items, "PodDisruptionBudget", "healthd-aggregator")["spec"]["maxUnavailable"] == 1


def test_several_aggregators_without_a_postgresql_are_refused() -> None:
    told = helm("template", "x", str(CHART), *sets(["platform=cpu", "aggregator.replicas=2"]), wrong=True)
    assert "aggregator.replicas is 2: several aggregators need a PostgreSQL" in told
    assert "aggregator.database.urlSecret.name" in told
    many = sets(["platform=cpu", "aggregator.replicas=4", SEVERAL_VALUES[1]])
    assert "replicas" in helm("template", "x", str(CHART), *many, wrong=True)


@pytest.mark.system("kubectl")
def test_second_pool_is_a_release_of_the_node_daemon_alone() -> None:
    made = plain(
        rendered(
            "platform=eks-neuron",
            "profile=active",
            "pool=inf",
            "nameSuffix=-inf",
            "aggregator.enabled=false",
            "instanceTypes={inf2.48xlarge}",
        )
    )
    expected = of_kustomize("examples/second-pool")
    assert set(made) == set(expected)
    for items in (made, expected):  # a selector of one type, in the two forms that there are
        pod = items["DaemonSet healthd-node-inf"]["spec"]["template"]["spec"]
        assert "inf2.48xlarge" in str(pod.pop("nodeSelector", "") or pod.pop("affinity"))
    assert made == expected


def test_platform_has_no_default_and_an_unknown_value_is_an_error() -> None:
    """A node whose driver is gone must not pass as one without accelerators."""
    assert "platform is not set" in helm("template", "x", str(CHART), wrong=True)
    assert "profil is not allowed" in helm("template", "x", str(CHART), *sets(["platform=cpu", "profil=x"]), wrong=True)
    device = "node.resources.limits.aws\\.amazon\\.com/neuron=1"
    assert "neuron" in helm("template", "x", str(CHART), *sets(["platform=cpu", device]), wrong=True)


def test_settings_of_the_user_win_and_restart_the_pods() -> None:
    first = rendered("platform=cpu")
    second = rendered("platform=cpu", "aggregator.settings.HEALTHD_POLICY_MODE=enforce")
    assert the(second, "ConfigMap", "healthd-aggregator")["data"]["HEALTHD_POLICY_MODE"] == "enforce"
    sums = [
        the(items, "Deployment", "healthd-aggregator")["spec"]["template"]["metadata"]["annotations"]
        for items in (first, second)
    ]
    assert sums[0] != sums[1]
    assert the(first, "PersistentVolumeClaim", "healthd-aggregator")["metadata"]["annotations"] == {
        "helm.sh/resource-policy": "keep"
    }


def test_aggregator_is_allowed_where_pod_security_is_restricted() -> None:
    """Source: Kubernetes, Pod Security Standards, restricted."""
    items = rendered("platform=eks-neuron", "node.enabled=false", "actuator.enabled=true")
    assert not [item for item in items if item["kind"] == "DaemonSet"]
    pod = the(items, "Deployment", "healthd-aggregator")["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    volatile = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert all(set(volume) - {"name"} <= volatile for volume in pod["volumes"])
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security.get("privileged")
        assert all("hostPort" not in port for port in container["ports"])


def test_package_holds_the_rules_and_dashboards_themselves(tmp_path: Path) -> None:
    """In the repository they are links to the only copy."""
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    with tarfile.open(package) as archive:
        rules = archive.extractfile("healthd/files/prometheus-rules.yaml")
        assert rules is not None
        assert rules.read() == (KUBERNETES / "components/monitoring/prometheus-rules.yaml").read_bytes()
    text = helm("template", "x", str(package), *sets(["platform=cpu", "monitoring.enabled=true"]))
    assert text.count("grafana_dashboard") == 3


def test_version_is_that_of_healthd() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "healthd/__init__.py").read_text(encoding="utf-8"))
    assert version is not None
    for chart in (CHART, JOB):
        assert yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"] == version[1]


# --- chart healthd-job ----------------------------------------------------------------------------------------------


def test_what_is_made_of_other_files_is_as_they_are() -> None:
    for name, content in generate.written().items():
        file = generate.FOLDER / name
        assert file.read_text(encoding="utf-8") == content, f"{name}: run python -m deploy.helm.generate"
        assert not file.is_symlink()


def test_charts_reach_nothing_beside_them() -> None:
    assert not [path for chart in (CHART, JOB) for path in chart.rglob("*") if path.is_symlink()]


def test_job_is_the_example_of_the_guide() -> None:
    made = rendered("instanceType=trn1.32xlarge", "nodes=4", *TRAIN, chart=JOB, release="train")
    with (KUBERNETES / "examples/gated-job.yaml").open(encoding="utf-8") as file:
        example = plain(yaml.safe_load_all(file))
    mine = plain(made)
    selector = mine["Job train"]["spec"]["template"]["spec"].pop("nodeSelector")
    assert selector == {"node.kubernetes.io/instance-type": "trn1.32xlarge"}
    assert mine == example


@every(
    "name",
    some([name for name, known in TYPES.items() if known.chip.name.startswith("T") or known.devices == 8], 4),
)
def test_job_of_every_type_asks_for_whole_nodes(name: str) -> None:
    known = TYPES[name]
    unknown = [
        f"{key}=1" for key, count in (("devices", known.devices), ("efa", known.efa_interfaces)) if count is None
    ]
    helm("lint", "--strict", str(JOB), *sets([f"instanceType={name}", *TRAIN, *unknown]))
    items = rendered(f"instanceType={name}", *TRAIN, *unknown, chart=JOB, release="train")
    for item in items:
        strictly(item)
    pod = the(items, "Job", "train")["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        assert limits[generate.RESOURCES[known.chip.accelerator]] == (known.devices or 1)
        efa = 1 if known.efa_interfaces is None else known.efa_interfaces
        assert limits.get("vpc.amazonaws.com/efa", 0) == efa
        assert ("hugepages-2Mi" in limits) is bool(efa)
        assert ("securityContext" in container) is bool(efa)


def test_job_of_a_type_that_nobody_knows_is_an_error_that_says_what_to_set() -> None:
    def error(*values: str) -> str:
        return helm("template", "train", str(JOB), *sets([*values, *TRAIN]), wrong=True)

    assert "it has" in error("instanceType=trn9.48xlarge")
    assert "set devices" in error("instanceType=trn3p.48xlarge")
    assert "set efa" in error("instanceType=trn3p.48xlarge", "devices=16")
