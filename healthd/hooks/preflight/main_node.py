"""The aggregator of one preflight: a child of the main node's keeper, in memory, gone with the gate."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import get_args

from healthd.core.errors import HealthdError
from healthd.core.model import GateTerm
from healthd.core.tasks import Tasks
from healthd.hooks.preflight import Plain, Task

# Nodes of a preflight ask this often and count as silent after this long: a node that died must not be waited for.
ASK_SECONDS = 5.0
SILENT_SECONDS = 20.0
STOP_SECONDS = 6.0
_PR_SET_PDEATHSIG = 1


class MainNode:
    """A running aggregator."""

    def __init__(self, process: asyncio.subprocess.Process, tasks: Tasks) -> None:
        self._process = process
        self._last: deque[str] = deque(maxlen=5)
        self._ended = tasks.start("last words of the aggregator of this gate", self._watch())

    async def until_ended(self) -> None:
        """Wait until it is gone; raises a HealthdError with its last words."""
        await asyncio.shield(self._ended)

    async def _watch(self) -> None:
        """Drain what it says, so that it never waits for us, and raise its last words when it ends."""
        stream = self._process.stderr
        while stream is not None and (chunk := await stream.read(65536)):
            self._last.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())
        code = await self._process.wait()
        words = self._last[-1].removeprefix("healthd: ") if self._last else f"exit code {code}"
        raise HealthdError(f"the aggregator of this gate has ended: {words}")

    async def stop(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait({self._ended})
        with contextlib.suppress(HealthdError, asyncio.CancelledError):
            self._ended.result()


@contextlib.asynccontextmanager
async def main_node(task: Task, folder: Path, tasks: Tasks) -> AsyncIterator[MainNode | None]:
    """The aggregator, from entry to exit, where this process leads; None elsewhere."""
    if not task.leads:
        yield None
        return
    settings = folder / "aggregator.toml"
    _write_private(settings, settings_of(task, folder))
    # It reads this file and nothing else: variables and files of this host are about other aggregators.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHD_")}
    command = [sys.executable, "-P", "-m", "healthd", "aggregator", "--config", str(settings)]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=_die_with_parent,
    )
    running = MainNode(process, tasks)
    try:
        yield running
    finally:
        await running.stop()


def settings_of(task: Task, folder: Path) -> str:
    """TOML: in memory, with no fleet to recover, waiting for nodes as long as the gate does."""
    aggregator: dict[str, Plain] = {
        "listen": f"{_any_address(task.main)}:{task.port}",
        "database": "sqlite://",
        "state_dir": str(folder),
        "preflight": True,
        "insecure": True,
        "max_nodes": task.size,
        "handshake": f"{task.acknowledge_seconds}s",
    }
    if task.token is not None:
        tokens = folder / "tokens.toml"
        digest = hashlib.sha256(task.token.encode()).hexdigest()
        _write_private(tokens, f'[[token]]\nname = "preflight"\nscopes = ["sync", "gate"]\nsha256 = "{digest}"\n')
        aggregator["token_file"] = str(tokens)
    # What lives for one job's start has nothing to remember, and nobody could release what it latched.
    policy: dict[str, Plain] = {
        **task.policy,
        "rules": False,
        "recovery": "0s",
        "node_grace": f"{task.wait_seconds}s",
        "silent": f"{SILENT_SECONDS}s",
    }
    # Whoever starts a preflight chooses its terms; the token only keeps others out.
    gate: dict[str, Plain] = {"callers_may": list(get_args(GateTerm))}
    tables: dict[str, Mapping[str, Plain]] = {"aggregator": aggregator, "policy": policy, "gate": gate}
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def _toml(value: Plain) -> str:
    """A JSON string, number, truth or list is one of TOML too; a table is not."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _any_address(main: str) -> str:
    """Where the aggregator listens: loopback for a job on one machine, else every address of the main's family."""
    if main in ("localhost", "127.0.0.1", "::1"):
        return "[::1]" if main == "::1" else "127.0.0.1"
    return "[::]" if ":" in main else "0.0.0.0"  # noqa: S104 - the peers come from other machines


def _die_with_parent() -> None:
    """In the child: a keeper that is killed must not leave an aggregator behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
