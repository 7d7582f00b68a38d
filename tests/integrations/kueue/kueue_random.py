"""
Minutes of random jobs, faults and kills with the real Kueue, and three invariants:

- no node has pods of two gated jobs;
- no job is admitted onto a node that has been bad for 15 s;
- when the faults end, all jobs end within 90 s.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.integrations.kueue import player
from tests.integrations.kueue.site_kit import KueueSite, kueue_job, moment
from tests.kubernetes.jobs_kit import JOBS, node_of
from tests.kubernetes.kit import SYSTEM
from tests.patience import PATIENCE

BAD_SECONDS = 15.0
END_SECONDS = 90.0
MOST_JOBS = 6
WORKLOADS = "workloads.kueue.x-k8s.io"
KILLED = {"healthd-kueue": SYSTEM, "healthd-aggregator": SYSTEM, "kueue": "kueue-system"}


@dataclass
class Minutes:
    """See the module. `wrong` are violations, `done` counts what was done and seen."""

    site: KueueSite
    rng: random.Random
    local_queue: str
    """One for the whole run: both have quota for the same nodes."""
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    bad_since: dict[str, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    """From its creation to its admission, of each admission."""
    _jobs: int = 0
    _admitted: set[tuple[str, float]] = field(default_factory=set)

    def run(self, seconds: float) -> None:
        """Random actions for so long, looking all the time; then quiet, until all jobs have ended."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self.act()
                pause = time.monotonic() + self.rng.uniform(0.5, 4.0)
                while time.monotonic() < pause:
                    self.look()
        finally:
            for node in self.site.cluster.nodes():
                self.site.fault(node, clear=True)
        self.bad_since.clear()
        self.end_all()

    def end_all(self) -> None:
        """No job runs for longer than half a minute: all end by themselves."""
        began = time.monotonic()
        while left := self.unfinished():
            self.look()
            if time.monotonic() - began > END_SECONDS * PATIENCE:
                self.wrong.append(f"{', '.join(left)} have not ended {END_SECONDS:.0f} s after the last fault")
                return
        self.done["seconds until all had ended"] = int(time.monotonic() - began)

    def unfinished(self) -> list[str]:
        items = self.site.cluster.items("jobs", "-n", JOBS)
        over = ("Complete", "Failed")
        return [
            one["metadata"]["name"]
            for one in items
            if not any(c["type"] in over and c["status"] == "True" for c in one["status"].get("conditions", ()))
        ]

    # --- what is done -------------------------------------------------------------------------------------------------

    def act(self) -> None:
        what = self.rng.choices(("submit", "delete", "fault", "clear", "kill"), (10, 2, 3, 4, 1))[0]
        if getattr(self, what)():
            self.done[what] += 1

    def submit(self) -> bool:
        if len(self.unfinished()) >= MOST_JOBS:
            return False
        name = f"job-{self._jobs + 1}"
        seconds = self.rng.choice((1, 3, 8))
        command: tuple[str, ...] = ("sleep", str(seconds))
        if self.rng.random() < 0.3:  # it takes its time to end when it is preempted or evicted
            command = ("sh", "-c", f"trap 'sleep 6; exit 143' TERM; sleep {seconds + 10} & wait")
        job = kueue_job(
            name,
            self.rng.choice((1, 2, 3)),
            self.site.image,
            command=command,
            local_queue=self.local_queue,
            urgent=self.rng.random() < 0.3,
            grace_seconds=20,
        )
        told = self.site.cluster.kubectl("create", "-f", "-", text=json.dumps(job), wrong=None)
        if "failed calling webhook" in told:  # Kueue was killed a moment ago, and takes no Jobs
            self.done["submissions while Kueue was away"] += 1
            return False
        assert "created" in told, told
        self._jobs += 1
        return True

    def delete(self) -> bool:
        if not (names := self.unfinished()):
            return False
        self.site.cluster.kubectl("delete", "job", self.rng.choice(names), "-n", JOBS, "--wait=false", wrong=None)
        return True

    def fault(self) -> bool:
        good = [node for node in self.site.cluster.nodes() if node not in self.bad_since]
        if len(good) < 2:
            return False
        node = self.rng.choice(good)
        self.bad_since[node] = self.site.fault(node)
        return True

    def clear(self) -> bool:
        if not self.bad_since:
            return False
        node = self.rng.choice(sorted(self.bad_since))
        del self.bad_since[node]
        self.site.fault(node, clear=True)
        return True

    def kill(self) -> bool:
        name = self.rng.choice(sorted(KILLED))
        words = ("-l", f"app.kubernetes.io/name={name}", "--grace-period=0", "--force")
        self.site.cluster.kubectl("delete", "pod", "-n", KILLED[name], *words, wrong=None)
        self.done[f"kill {name}"] += 1
        return True

    # --- what must hold -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Pods and Workloads as they are in one answer of the server."""
        found = self.site.cluster.get(f"pods,{WORKLOADS}", "-n", JOBS)["items"]
        pods = [one for one in found if one["kind"] == "Pod"]
        self._apart(pods)
        for workload in (one for one in found if one["kind"] == "Workload"):
            if player.holds(workload, "Admitted"):
                self._admission(workload, pods)
        self.done["looks"] += 1

    def _apart(self, pods: list[dict[str, Any]]) -> None:
        on: dict[str, set[str]] = {}
        for pod in pods:
            if pod["status"]["phase"] in ("Pending", "Running") and (node := node_of(pod)):
                on.setdefault(node, set()).add(pod["metadata"]["labels"]["job-name"])
        for node, jobs in on.items():
            text = f"{node} has pods of {', '.join(sorted(jobs))}"
            if len(jobs) > 1 and text not in self.wrong:
                self.wrong.append(text)

    def _admission(self, workload: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        name, at = workload["metadata"]["name"], moment(workload, "Admitted")
        if (name, at) not in self._admitted:
            self._admitted.add((name, at))
            self.done["admissions"] += 1
            self.waits.append(at - player.seconds(workload["metadata"]["creationTimestamp"]))
        updates = player.check_of(workload).get("podSetUpdates", [{}])
        gate = updates[0].get("labels", {}).get("healthd.internal/gate")
        for pod in pods:
            since = self.bad_since.get(node_of(pod))
            ours = pod["metadata"]["labels"].get("healthd.internal/gate") == gate
            if gate and ours and since is not None and at - since > BAD_SECONDS:
                text = f"{name} was admitted onto {node_of(pod)}, which had been bad for {at - since:.0f} s"
                if text not in self.wrong:
                    self.wrong.append(text)

    def summary(self) -> str:
        waits = sorted(self.waits) or [0.0]
        middle, worst = waits[len(waits) // 2], waits[-1]
        counts = ", ".join(f"{key}: {number}" for key, number in sorted(self.done.items()))
        return (
            f"{counts}; admission after {middle:.0f} s (p50), {worst:.0f} s (worst); wrong: {self.wrong or 'nothing'}"
        )


def random_minutes(site: KueueSite, seed: int, seconds: float, local_queue: str) -> Minutes:
    """So many seconds with this seed, in one of the queues."""
    minutes = Minutes(site, random.Random(seed), local_queue)
    minutes.run(seconds)
    print(f"seed {seed}, queue {local_queue}: {minutes.summary()}")
    return minutes
