"""docs/kubernetes.md, typed line by line as it stands, on a node that calls itself a Trainium one."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT
from tests.docs_commands_kit import lines
from tests.kubernetes.kit import CALL_SECONDS, IMAGE, SYSTEM, Cluster, traces
from tests.patience import PATIENCE

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

PAGE = ROOT / "docs/kubernetes.md"
NODE, TYPE = "node-1", "node.kubernetes.io/instance-type=trn1.32xlarge"
JOBS = "tests-guide-jobs"
BUILD = "podman build"  # tests/deploy/test_images.py builds and starts every recipe
ON_EKS = ("aws eks", "kubectl patch storageclass gp3")  # what the clusters of the tests do not have
HELM = "helm install"  # the other way to install


def typed() -> list[str]:
    """The lines of the page's blocks, in order; those of kind need docker."""
    before, _, kind = PAGE.read_text(encoding="utf-8").partition("## Ten minutes on kind\n")
    page = before + kind[kind.index("\n## ") :]
    blocks = "".join(re.findall(r"(?ms)^```console\n.*?^```$\n", page))
    return [" ".join(line.split(" # ")[0].split()) for line in lines(blocks)]


def script(wanted: list[str], port: int, address: str) -> str:
    """What a shell is given: the page's examples become what is here; a line that fails ends it with its words."""
    made = ["set -eE", "trap 'echo \"FAILED: $BASH_COMMAND\" >&2' ERR", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT"]
    for line in wanted:
        for example, here in (("REGISTRY", "localhost"), ("JOBS", JOBS), ("NODE:8080", f"{address}:8080")):
            line = line.replace(example, here)
        line = line.replace("localhost:8090", f"localhost:{port}").replace(" 8090 &", f" {port}:8090 &")
        made.append(line)
        if line.endswith("&"):
            made.append(f"until curl --silent --insecure https://localhost:{port}/livez; do sleep 0.2; done")
    return "\n".join(made) + "\n"


def test_every_line_of_the_guide_works_as_it_stands(nodes_of_ours: Cluster, image: str, tmp_path: Path) -> None:
    cluster = nodes_of_ours
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "deploy", tree / "deploy")
    named = tree / "deploy/kubernetes/components/image/kustomization.yaml"  # "put your registry there"
    named.write_text(named.read_text().replace("registry.example.com", IMAGE.partition("/")[0]))

    every = [line for line in typed() if not line.startswith((BUILD, *ON_EKS))]
    helm = [line for line in every if line.startswith(HELM)]
    kustomize = [line for line in every if line not in helm]
    # The page says early how to uninstall.
    removal = [i for i, line in enumerate(kustomize) if "delete -k" in line]
    begin, end = removal[0], removal[-1] + 1
    kustomize = [*kustomize[:begin], *kustomize[end:], *kustomize[begin:end]]
    assert len(helm) == 2
    assert len(kustomize) >= 18

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster.kubectl("label", "node", NODE, TYPE)
    try:
        with cluster.namespace(JOBS):
            type_in(cluster, tree, script(kustomize, port, cluster.address(NODE)))
            assert traces(cluster) == []
            cluster.kubectl("delete", "pvc", "healthd-aggregator", "-n", SYSTEM)  # the chart has its own
            type_in(cluster, tree, script(helm, port, cluster.address(NODE)))
            rollout = ("rollout", "status", "deployment/healthd-aggregator", "-n", SYSTEM, "--timeout=300s")
            cluster.kubectl(*rollout)
            cluster.helm("uninstall", "train", "-n", JOBS)
            cluster.helm("uninstall", "healthd", "-n", SYSTEM)
    finally:
        cluster.kubectl("label", "node", NODE, TYPE.partition("=")[0] + "-")
        cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=120s")
        cluster.free_volumes()
        cluster.empty_nodes()


def type_in(cluster: Cluster, folder: Path, text: str) -> None:
    (folder / "typed").write_text(text)
    done = subprocess.run(
        ["bash", "typed"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env=cluster.environ,
        timeout=5 * CALL_SECONDS * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
