"""
Other operators in the tests' cluster, with the chart beside them: Jobs, faults, and what became of them.

TESTS_OPERATORS names the folder of the operators: `operators.py install FOLDER NAME...` there puts them into a cluster,
and `operators.py unpacked` prints the folder with NAME/manifests.yaml.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kubernetes.jobs_kit import Fleet, node_of
from tests.kubernetes.kit import SYSTEM, Cluster, until

VARIABLE = "TESTS_OPERATORS"
INSTALL_SECONDS = 300.0
FAULT = "memory_free=fail"
STORY_SECONDS = 90.0


def operators() -> Path:
    """The program that installs operators."""
    folder = os.environ.get(VARIABLE)
    if not folder or not (Path(folder) / "operators.py").exists():
        pytest.skip(f"{VARIABLE} names no folder with operators.py")
    return Path(folder) / "operators.py"


@contextmanager
def installed(cluster: Cluster, *names: str) -> Iterator[None]:
    """Operators are in the cluster; at the end their programs, webhooks and kinds are gone again."""
    program = operators()
    if cluster.folder is None:
        pytest.skip("operators are installed into the tests' own cluster: KUBEBUILDER_ASSETS instead of KUBECONFIG")
    line = [sys.executable, str(program), "install", str(cluster.folder), *names]
    done = subprocess.run(line, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    unpacked = [sys.executable, str(program), "unpacked"]
    folder = Path(subprocess.run(unpacked, capture_output=True, text=True, check=True).stdout.strip())
    try:
        yield
    finally:
        for name in reversed(names):
            cluster.kubectl("delete", "-f", folder / name / "manifests.yaml", "--ignore-not-found", "--timeout=120s")


@dataclass(frozen=True)
class Site(Fleet):
    """The chart beside operators."""

    def runs(self, name: str, pods: int, seconds: float = STORY_SECONDS) -> dict[str, str]:
        """The node of each pod of a Job once they all run."""

        def running() -> dict[str, str]:
            found = {one["metadata"]["name"]: one for one in self.pods(name)}
            ready = len(found) == pods and all(one["status"]["phase"] == "Running" for one in found.values())
            return {key: node_of(one) for key, one in found.items()} if ready else {}

        return until(f"{pods} pods of {name} run", running, seconds, told=self.told)

    def daemon(self, node: str) -> str:
        """The pod of the node daemon there."""
        found = self.cluster.items(
            "pods",
            "-n",
            SYSTEM,
            "-l",
            "app.kubernetes.io/name=healthd-node",
            "--field-selector",
            f"spec.nodeName={node}",
        )
        return str(found[0]["metadata"]["name"])

    def fault(self, node: str, *, clear: bool = False) -> float:
        """Set a fault that a passive check finds at once, or clear it; when that was done."""
        words = ("clear",) if clear else ("set", FAULT)
        self.cluster.kubectl("exec", "-n", SYSTEM, self.daemon(node), "--", "healthd", "fault", *words)
        return time.time()

    def healthy(self) -> None:
        """No node has a fault, a quarantine or a mark."""
        for node in self.cluster.nodes():
            self.fault(node, clear=True)
        until("every node is healthy", lambda: not self.bad_nodes(), STORY_SECONDS, told=self.told)

    def bad_nodes(self) -> list[str]:
        rows = self.ask("/v1/nodes")["nodes"]
        return [
            row["node"]
            for row in rows
            if row["health"] not in ("healthy", "degraded") or row["quarantine"] or row["removed"]
        ]
