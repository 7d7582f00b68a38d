"""
Hooks that execute, in network namespaces: `healthd gate --join --execute` is all that runs on each host, and an
aggregator on one of its own. What Kubernetes and AWS Batch have where the container of the job owns the devices.

`close` ends all processes and removes all namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.aggregator.cluster import HEALTHD, PROOF, TUNED
from tests.aggregator.service import ROOT, Service, until
from tests.netns.fleet import NODE, POLICY
from tests.netns.hosts import CENTRE, Host, Net, marks
from tests.patience import PATIENCE

__all__ = ["Ended", "Hook", "Hooks", "marks"]

MARK = "HOOKS_OF_A_TEST"
# Bytes/s that no machine is too slow for: wrong values and lost ranks are what is looked for here, not slowness.
LEAST_BUSBW = 1e3
SIZE_BYTES = 1 << 20


@dataclass(frozen=True)
class Ended:
    """What a hook came to: `hosts` what it wrote as its host file, `seconds` from its start."""

    code: int
    out: str
    err: str
    hosts: Sequence[str]
    seconds: float


class Hook:
    """One hook under way, in the namespace of its host."""

    def __init__(self, process: subprocess.Popen[str], hostfile: Path) -> None:
        self.process, self.hostfile, self.began = process, hostfile, time.monotonic()

    def ended(self, seconds: float = 90.0) -> Ended:
        out, err = self.process.communicate(timeout=seconds * PATIENCE)
        hosts = self.hostfile.read_text().split() if self.hostfile.exists() else []
        return Ended(self.process.returncode, out, err, hosts, time.monotonic() - self.began)

    def kill(self) -> None:
        """kill -9, as the kernel does when a container ends."""
        self.process.kill()
        self.process.communicate()


class Hooks:
    """`count` hosts n0, n1, ... with one device each and no daemon, and an aggregator."""

    def __init__(self, folder: Path, count: int, **policy: Any) -> None:
        self.folder = folder
        self.net = Net()
        self.mark = secrets.token_hex(8)
        self.hosts: dict[str, Host] = {}
        self.hooks: list[Hook] = []
        self.starts = 0
        try:
            self.centre = self.net.host("agg", CENTRE)
            for number in range(count):
                self.hosts[f"n{number}"] = self.net.host(f"n{number}", number + 1)
            self._start({**POLICY, "tuning.member": "8s", "join": "40s", **policy})
        except BaseException:
            self.close()
            raise

    def _start(self, policy: Mapping[str, Any]) -> None:
        checks = self.folder / "checks"
        checks.mkdir()
        (checks / "proof.py").write_text(PROOF)
        (checks / "number").write_text("1")
        file = self.folder / "aggregator.toml"
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in policy.items())
        file.write_text(f'[policy]\n{lines}[aggregator]\nhandshake = "5s"\n')
        listen = f"{self.centre.address}:8090"
        state = ("--state-dir", str(self.folder / "aggregator"))
        command = [*TUNED, "aggregator", "--config", str(file), *state, "--listen", listen, "--insecure"]
        self.aggregator = Service(
            "aggregator",
            self.centre.inside(*command),
            folder=self.folder,
            env=self.env,
            pattern=r"aggregator listens on (\S+)",
        )
        self.aggregator.start()

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "HEALTHD_CPU_DEVICES": "1"}

    def start(self, rank: int, *more: str, group: str, size: int, fault: str = "") -> Hook:
        """Start the hook of a rank on its host, with directories of its own as containers have."""
        name, host = f"n{rank}", self.hosts[f"n{rank}"]
        self.starts += 1
        place = self.folder / f"{name}-{self.starts}"
        place.mkdir()
        config = place / "healthd.toml"
        text = NODE.format(checks=self.folder / "checks", size_bytes=SIZE_BYTES, least_busbw=LEAST_BUSBW)
        faults = f"[node]\nfaults = {json.dumps([fault] if fault else [])}\n"
        config.write_text(text.replace("[node]\n", faults))
        who = ("--join", group, "--size", str(size), "--rank", str(rank), "--node", name, "--execute")
        where = ("--run-dir", str(place / "run"), "--state-dir", str(place / "state"), "--config", str(config))
        command = [*HEALTHD, "gate", "--aggregator", self.aggregator.url, *who, *where, "--wait", "240s"]
        process = subprocess.Popen(
            host.inside(*command, "--hostfile-out", str(place / "hosts"), *more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self.env,
        )
        host.daemon = lambda: process.pid
        hook = Hook(process, place / "hosts")
        self.hooks.append(hook)
        return hook

    def start_all(self, group: str, *more: str, faults: Mapping[int, str] | None = None) -> list[Hook]:
        """A hook on every host."""
        known = faults or {}
        size = len(self.hosts)
        return [self.start(rank, *more, group=group, size=size, fault=known.get(rank, "")) for rank in range(size)]

    # --- what is seen of it -------------------------------------------------------------------------------------------

    def gate(self, group: str) -> dict[str, Any]:
        """The newest gate of a group; empty before there is one."""
        gates = self.aggregator.get("/v1/gates", params={"job": group}).json()["gates"]
        found: dict[str, Any] = self.aggregator.get(f"/v1/gates/{gates[0]['id']}").json() if gates else {}
        return found

    def waiting(self, group: str) -> str:
        """What a group's newest gate waits for, or why it is decided."""
        return "; ".join(reason["message"] for reason in self.gate(group).get("reasons", ()))

    def validations(self, group: str) -> list[dict[str, Any]]:
        """All that a group's newest gate ran, oldest first."""
        found: list[dict[str, Any]] = self.aggregator.get(f"/v1/validations/{self.gate(group)['id']}").json()[
            "validations"
        ]
        return found

    def explain(self, group: str) -> str:
        """Every group of a gate with its outcome, for a test that failed."""
        lines = [self.waiting(group)]
        for validation in self.validations(group):
            lines.append(f"validation of {validation['members']}: {validation.get('verdict')} {validation.get('why')}")
            for one in validation["history"]:
                words = [reason["message"] for reason in one["reasons"]]
                lines.append(f"  round {one['round']} {one['members']} {one['outcome']} {one['seconds']:.1f} s {words}")
        return "\n".join(lines)

    def nothing_left(self, seconds: float = 5.0) -> None:
        """No process of a hook, its workers and ranks included, is on any host."""
        left: dict[str, list[int]] = {}

        def free() -> bool:
            left.update({name: host.pids() for name, host in self.hosts.items()})
            return not any(left.values())

        until(free, seconds, lambda: f"left on the hosts: {left}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """All processes and namespaces are gone afterwards."""
        for hook in self.hooks:
            hook.process.kill()
            hook.process.communicate()
        with contextlib.suppress(AttributeError):
            self.aggregator.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.aggregator.ended(8)
        self.net.remove()
