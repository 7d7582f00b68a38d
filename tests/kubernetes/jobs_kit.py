"""What the tests of gated Jobs are made with: the chart on every node, and jobs of theirs."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.kubernetes.kit import SYSTEM, Cluster, gated_job, until

JOBS = "tests-jobs"
HOST = f"healthd-aggregator.{SYSTEM}.svc"
AGGREGATOR = "app.kubernetes.io/name=healthd-aggregator"
CHEAP = ("--tier=passive", "--no-collective", "--wait=10m")
BRIEFLY, FOR_EVER = ("sleep", "1"), ("sleep", "infinity")
JOB_SECONDS = 90.0


@dataclass(frozen=True)
class Fleet:
    """The chart on every node, its gates in earnest, and a namespace of jobs."""

    cluster: Cluster
    image: str
    keys: Path

    def start(self, name: str, pods: int, *gate: str, **more: Any) -> None:
        command = more.pop("command", BRIEFLY)
        changes, cpu, memory = more.pop("spec", {}), more.pop("cpu", None), more.pop("memory", None)
        job = gated_job(JOBS, name, pods, self.image, *CHEAP, *gate, command=command, **more)
        job["spec"].update(changes)
        (train,) = job["spec"]["template"]["spec"]["containers"]
        if cpu is not None:
            train["resources"] = {"requests": {"cpu": cpu}}
        if memory is not None:
            train["resources"] = {"limits": {"memory": memory}}
        self.cluster.apply(job)

    def patch(self, name: str, **spec: object) -> None:
        self.cluster.kubectl("patch", "job", name, "-n", JOBS, "-p", json.dumps({"spec": spec}))

    def pods(self, name: str, *, gone: bool = False) -> list[dict[str, Any]]:
        """The pods of a job, without those on their way out."""
        items = self.cluster.items("pods", "-n", JOBS, "-l", f"job-name={name}")
        return [item for item in items if gone or "deletionTimestamp" not in item["metadata"]]

    def ended(self, name: str) -> tuple[str, str] | None:
        """How a job has ended, as condition and reason; None while it has not."""
        for one in self.cluster.get("job", name, "-n", JOBS)["status"].get("conditions", ()):
            if one["type"] in ("Complete", "Failed") and one["status"] == "True":
                return one["type"], one.get("reason", "")
        return None

    def completes(self, name: str) -> None:
        ended = until(f"{name} ends", lambda: self.ended(name), JOB_SECONDS, told=self.told)
        assert ended[0] == "Complete", self.told()

    def waits(self, name: str, pods: int) -> dict[str, Any]:
        """The gate of a job once it holds with as many members heard."""

        def held() -> dict[str, Any] | None:
            for gate in self.gates(job=f"{JOBS}/{name}"):
                members = self.ask(f"/v1/gates/{gate['id']}/evidence")["gate"]["group"]["members"]
                if gate["decision"] == "hold" and len(members) == pods:
                    return gate
            return None

        return until(f"{pods} hooks of {name} wait", held, JOB_SECONDS, told=self.told)

    def delete(self, name: str) -> None:
        """The job is gone, and nothing holds a node any more."""
        self.cluster.kubectl("delete", "job", name, "-n", JOBS, "--ignore-not-found", "--wait=true", "--timeout=120s")
        self.free()

    def free(self) -> None:
        until("every node is free", lambda: not self.leases(), 20.0, told=self.told)

    def leases(self) -> dict[str, str]:
        """The workload of the lease of each node that has one."""
        rows = self.ask("/v1/nodes")["nodes"]
        return {row["node"]: lease["workload"] for row in rows for lease in row["leases"]}

    def gates(self, **query: str | int) -> list[dict[str, Any]]:
        """Newest first."""
        found: list[dict[str, Any]] = self.ask("/v1/gates", **query)["gates"]
        return found

    def ask(self, path: str, **query: str | int) -> Any:
        """An aggregator at the address of its pod, the first that is reached: a port-forward would end with it."""
        token = (self.keys / "admin.token").read_text(encoding="utf-8").strip()
        context = ssl.create_default_context(cafile=str(self.keys / "ca.pem"))
        lost: httpx.TransportError | None = None
        for address in self.addresses():
            with httpx.Client(verify=context, trust_env=False, timeout=httpx.Timeout(30, connect=5)) as client:
                request = client.build_request(
                    "GET",
                    f"https://{address}:8090{path}",
                    params=query,
                    headers={"Authorization": f"Bearer {token}", "Host": HOST},
                    extensions={"sni_hostname": HOST},
                )
                try:
                    answer = client.send(request)
                except httpx.TransportError as error:
                    lost = error
                    continue
            assert answer.status_code == 200, answer.text
            return answer.json()
        assert lost is not None
        raise lost

    def addresses(self) -> list[str]:
        """Of the aggregators' pods."""
        pods = until("there is an aggregator", lambda: self.cluster.items("pods", "-n", SYSTEM, "-l", AGGREGATOR))
        return [str(pod["status"]["podIP"]) for pod in pods if "podIP" in pod["status"]]

    def address(self) -> str:
        """Of the aggregator's pod, where there is one."""
        (address,) = self.addresses()
        return address

    def told(self) -> str:
        """What to read when something did not come about."""
        words = self.cluster.kubectl("get", "pods,jobs", "-A", "-o", "wide")
        for item in self.cluster.items("pods", "-n", JOBS):
            name = item["metadata"]["name"]
            if item["status"].get("initContainerStatuses", [{}])[0].get("containerID"):
                words += f"--- {name}\n{self.cluster.kubectl('logs', name, '-n', JOBS, '-c', 'gate', '--tail=8')}\n"
        return words


def node_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"].get("nodeName", ""))
