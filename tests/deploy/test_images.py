"""
Every image recipe built and started, as the manifests of deploy/kubernetes start it: their arguments and variables.

buildah builds and runs without an engine, in a chroot. What is started speaks TLS in a network of its own.
Four minutes or more: `make test-images`.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.images import PROGRAMS, PYTHON, Workshop, workshop_with_service
from tests.deploy.manifests import ROOT, built, the
from tests.patience import PATIENCE

pytestmark = [pytest.mark.images, pytest.mark.system(*PROGRAMS, "ip", "kubectl", root=True)]

HOST = "healthd-aggregator.healthd-system.svc"


@dataclass(frozen=True)
class NetworkedWorkshop(Workshop):
    """With a network that what is started has."""

    netns: str


@pytest.fixture(scope="module")
def workshop() -> Iterator[NetworkedWorkshop]:
    netns = f"hdimg{os.getpid()}"
    subprocess.run(["ip", "netns", "add", netns], check=True)
    try:
        subprocess.run(["ip", "-n", netns, "link", "set", "lo", "up"], check=True)
        with workshop_with_service("images") as made:
            yield NetworkedWorkshop(made.folder, netns, kept=made.kept)
    finally:
        subprocess.run(["ip", "netns", "del", netns], check=True)


# --- starting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """What runs, and what it writes."""

    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def started(
    shop: NetworkedWorkshop, image: str, spec: dict[str, Any], data: dict[str, str], mounts: dict[Path, str]
) -> Iterator[Started]:
    """The container of a manifest, by its arguments, variables and user."""
    (container,) = spec["containers"]
    # The cluster's DNS has the name of the Service.
    made = shop.buildah("from", "--pull-never", "--add-host", f"{HOST}:127.0.0.1", image)
    config = json.loads(shop.buildah("inspect", made))["OCIv1"]["config"]
    # The kubelet gives these to every pod; nobody answers there, which the daemon says and goes on.
    variables = {**data, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    fields = {
        "spec.nodeName": "node-1",
        "status.hostIP": "127.0.0.1",
        "metadata.labels['healthd.internal/pool']": "cpu",
    }
    for one in container.get("env", ()):
        value = one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for name, known in variables.items():
            value = value.replace(f"$({name})", known)
        variables[one["name"]] = value
    user, group = (spec["securityContext"][key] for key in ("runAsUser", "runAsGroup"))
    words = ["run", "--isolation", "chroot", "--user", f"{user}:{group}"]
    for name, value in variables.items():
        words += ["--env", f"{name}={value}"]
    for source, target in mounts.items():
        words += ["--volume", f"{source}:{target}"]
    log = shop.folder / f"{made}.log"
    with log.open("wb") as file:
        command = shop.command(*words, made, "--", *config["Entrypoint"], *container["args"])
        line = ["ip", "netns", "exec", shop.netns, *command]
        process = subprocess.Popen(line, stdout=file, stderr=file, env=shop.env)
    try:
        yield Started(process, log)
    finally:
        process.terminate()
        try:
            process.wait(20 * PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shop.buildah("rm", made)


def fetched(shop: NetworkedWorkshop, url: str, *more: str) -> str | None:
    """What answers in that network, None: nobody yet."""
    line = ["ip", "netns", "exec", shop.netns, "curl", "--silent", "--max-time", "5", *more, url]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else None


def answered(shop: NetworkedWorkshop, url: str, words: str, one: Started, *more: str) -> str:
    """Wait until the answer has these words."""
    end = time.monotonic() + 20 * PATIENCE
    said = None
    while time.monotonic() < end:
        assert one.process.poll() is None, one.log.read_text()[-3000:]
        said = fetched(shop, url, *more)
        if said is not None and words in said:
            return said
        time.sleep(0.2)
    pytest.fail(f"{url} never said {words!r}: {said!r}\n{one.log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def secrets(workshop: NetworkedWorkshop) -> Path:
    """What the guide has people make: a certificate, tokens."""
    folder = workshop.folder / "secrets"
    for name in ("tls", "tokens", "token"):
        (folder / name).mkdir(parents=True)
    run = [sys.executable, "-m", "healthd"]
    subprocess.run([*run, "tls", "init", HOST, "--dir", str(folder / "tls")], check=True, capture_output=True, cwd=ROOT)
    for old, new in (("cert.pem", "tls.crt"), ("key.pem", "tls.key"), ("ca.pem", "ca.crt")):
        shutil.copy(folder / "tls" / old, folder / "tls" / new)
    ssl.create_default_context(cafile=str(folder / "tls/ca.crt"))
    lines = ""
    for name, scope in (("nodes", "sync"), ("eyes", "read")):
        made = subprocess.run(
            [*run, "token", name, "--scope", scope], check=True, capture_output=True, text=True, cwd=ROOT
        )
        lines += made.stdout
        (folder / "token" / name).write_text(made.stderr.split()[-1])
    (folder / "tokens/tokens.toml").write_text(lines)
    shutil.copy(folder / "token/nodes", folder / "token/token")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o640)
        os.chown(path, 0, 10001)  # as fsGroup does
    return folder


@pytest.fixture(scope="module")
def aggregator(workshop: NetworkedWorkshop, secrets: Path) -> Iterator[Started]:
    """The aggregator of the overlay for CPUs."""
    items = built("cpu/observe")
    state = workshop.folder / "aggregator"
    state.mkdir()
    os.chown(state, 10001, 10001)
    mounts = {
        state: "/var/lib/healthd",
        secrets / "tls": "/etc/healthd/tls:ro",
        secrets / "tokens": "/etc/healthd/tokens:ro",
    }
    spec = the(items, "Deployment", "healthd-aggregator")["spec"]["template"]["spec"]
    # The overlay has callers with service accounts alone; the nodes here have tokens of a table.
    data = the(items, "ConfigMap", "healthd-aggregator")["data"]
    data |= {"HEALTHD_AGGREGATOR_TOKEN_TABLE": "/etc/healthd/tokens/tokens.toml"}
    with started(workshop, "healthd", spec, data, mounts) as one:
        ask = ("--cacert", str(secrets / "tls/ca.crt"), "--resolve", f"{HOST}:8090:127.0.0.1")
        answered(workshop, f"https://{HOST}:8090/livez", "", one, *ask)
        yield one


RECIPES = {
    "Containerfile": ("observe", "healthd", {}),
    "Containerfile-torch": ("active", "healthd-torch", {"BASE": "localhost/healthd"}),
    "Containerfile-training": (
        "active",
        "healthd-training",
        {"BASE": "localhost/training", "PROBE_PYTHON": "/usr/bin/python3"},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_image_is_built_and_its_node_reports_as_the_manifest_starts_it(
    workshop: NetworkedWorkshop, secrets: Path, aggregator: Started, recipe: str, tmp_path: Path
) -> None:
    profile, tag, arguments = RECIPES[recipe]
    if recipe == "Containerfile-training":
        # As training images do: an entry point of its own, which must not be given the words of the manifest.
        training = workshop.buildah("from", "--pull-never", PYTHON)
        workshop.buildah("config", "--entrypoint", '["/bin/echo", "training"]', "--cmd", "python train.py", training)
        workshop.buildah("commit", "--quiet", training, "localhost/training")
        workshop.buildah("rm", training)
    if recipe != "Containerfile":
        workshop.build(recipe, tag, **arguments)
    items = built(f"cpu/{profile}")
    spec = the(items, "DaemonSet", "healthd-node")["spec"]["template"]["spec"]
    data = the(items, "ConfigMap", "healthd-node")["data"]
    state = workshop.folder / f"state-{tag}"
    state.mkdir()
    mounts = {
        state: "/var/lib/healthd",
        secrets / "token": "/etc/healthd/token:ro",
        secrets / "tls": "/etc/healthd/ca:ro",
    }
    with started(workshop, tag, spec, data, mounts) as one:
        answered(workshop, "http://127.0.0.1:8080/livez", "", one)
        ask = ("--cacert", str(secrets / "tls/ca.crt"), "--resolve", f"{HOST}:8090:127.0.0.1")
        token = ("--header", f"Authorization: Bearer {(secrets / 'token/eyes').read_text()}")
        seen = answered(workshop, f"https://{HOST}:8090/v1/nodes/node-1", '"confirmed":true', one, *ask, *token)
        assert json.loads(seen)["state"]["labels"]["pool"] == "cpu"
        answered(workshop, "http://127.0.0.1:8080/readyz?verbose", "memory_free ok", one)
        assert "grpc" not in one.log.read_text().lower(), "what reads the kubelet is missing"
