"""What the tests of cli gate, and those beside them, are made with."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from healthd.core import wire
from healthd.core.model import NodeState, OrderReport, SyncAnswer, SyncRequest
from tests import prepared
from tests.aggregator.service import free_port
from tests.cli.cli_kit import Said, environment, healthd
from tests.patience import PATIENCE

GOOD = ("n1", "n2", "n3")


class SpeakingNode:
    """A node that has its evidence, takes every lease, and cannot check again."""

    def __init__(self, url: str, made: NodeState, token: str | None) -> None:
        self._url = f"{url}/v1/nodes/{made.node}/sync"
        self._state = made
        self._headers = {"X-Healthd-Node-Key": f"key-of-{made.node}-0123456789", "Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._reports: dict[str, OrderReport] = {}
        self._answer: SyncAnswer | None = None
        self._seq = 0
        self._stopped = threading.Event()
        self.heard = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        with httpx.Client(trust_env=False, verify=False, timeout=60.0) as http:
            while not self._stopped.is_set():
                try:
                    self._sync(http)
                except httpx.HTTPError:
                    self._stopped.wait(0.1)

    def _sync(self, http: httpx.Client) -> None:
        self._seq += 1
        leases = tuple(order for order in self._orders() if order.lease and not order.withdrawn)
        said = dataclasses.replace(self._state, leases=tuple(order.lease for order in leases))
        request = SyncRequest(
            protocol=1,
            incarnation="i1",
            seq=self._seq,
            last_answer=self._answer.answer if self._answer else None,
            since_answer_seconds=0.1 if self._answer else None,
            state=said,
            digest=f"d{self._seq}",
            ages={},
            orders={order.id: OrderReport(status="accepted") for order in leases},
            issuer=self._answer.issuer if self._answer else None,
        )
        wait = "1" if self._seq > 2 else "0"
        got = http.post(self._url, params={"wait": wait}, content=wire.encode(request), headers=self._headers)
        if got.status_code != 200:
            self._stopped.wait(0.2)
            return
        self._answer = wire.decode(got.content, SyncAnswer, what="answer")
        if self._seq > 2:
            self.heard.set()

    def _orders(self) -> tuple:
        return self._answer.orders or () if self._answer else ()


@dataclasses.dataclass
class World:
    """One aggregator as a process, and its nodes."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    token: Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str, **more: object) -> Said:
        return healthd(self.folder, *arguments, "--aggregator", self.url, **more)

    def gate(self, job: str, *arguments: str, wait: str = "15s") -> Said:
        return self.run("gate", "--job", job, "--wait", wait, *arguments)


@contextlib.contextmanager
def aggregator(folder: Path, *options: str, port: int | None = None, **variables: str) -> Iterator[World]:
    port = port or free_port()
    line = ["aggregator", "--listen", f"127.0.0.1:{port}", "--state-dir", str(folder / "aggregator"), *options]
    policy = {"RECOVERY": "0s", "TUNING_SETTLE": "0s", "NODE_GRACE": "0s", "COLLECTIVE": "off"}
    env = environment(folder, **{f"HEALTHD_POLICY_{name}": value for name, value in policy.items()}, **variables)
    env.pop("HEALTHD_NODE_STATE_DIR")
    with (folder / "aggregator.log").open("ab") as log:
        process = prepared.Popen([sys.executable, "-P", prepared.TUNED, *line], env=env, stderr=log)
    try:
        world = World(folder=folder, port=port, process=process)
        with httpx.Client(trust_env=False, verify=False) as http:
            for _ in range(1200):
                assert process.poll() is None, (folder / "aggregator.log").read_text()
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(f"{world.url}/livez").status_code == 200:
                        break
                time.sleep(0.05)
        yield world
    finally:
        process.terminate()
        process.wait(timeout=10 * PATIENCE)


def nodes(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--node", name))
