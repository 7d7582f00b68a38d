"""
What the lanes of one run share: how a worker is started, which ones there are, and which could not be killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checks
from checks.contract import Missing
from checks.worker.protocol import from_limits
from healthd.runner.settings import OnProgress, RunnerSettings, RunProgress
from healthd.runner.workers.child import Child

WORKER = str(Path(next(iter(checks.__path__))).resolve() / "worker" / "worker.py")

# What a job or a launcher sets for its own processes and would change ours: another rank, another library in our way.
_DROPPED = frozenset(
    {"LD_PRELOAD", "LD_AUDIT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_DROPPED_PREFIXES = ("PYTHON", "TORCHELASTIC_", "GLOO_")


class Corpses:
    """Killed workers that the kernel does not let go, by device target or `node/CHECK`. Lives as long as the runner."""

    def __init__(self) -> None:
        self._by_key: dict[str, Child] = {}

    def add(self, key: str, child: Child) -> None:
        """Remember one."""
        self._by_key[key] = child

    def of(self, key: str) -> Child | None:
        """The one that is still there."""
        child = self._by_key.get(key)
        if child is not None and child.is_gone():
            del self._by_key[key]
            return None
        return child

    def __contains__(self, child: object) -> bool:
        return any(child is other for other in self._by_key.values())

    def keys(self) -> tuple[str, ...]:
        """Where there still is one."""
        return tuple(key for key in list(self._by_key) if self.of(key) is not None)


class Workers:
    """The children of one run."""

    def __init__(
        self,
        settings: RunnerSettings,
        corpses: Corpses,
        versions: dict[str, str],
        on_progress: OnProgress | None,
        *,
        popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self.settings = settings
        self.inventory: dict[str, Any] = {}
        self.identity: dict[str, Any] | None = None  # hardware and versions, as of the survey: see checks.learned
        self.boot_id: str | None = None  # as of the survey
        self.compile: dict[str, Any] | None = None  # what new workers are told of compilation (see healthd.runner.warm)
        self.group: dict[str, Any] | None = None  # the group that new workers become ranks of, where they must know
        self.device_seconds = 0.0
        self.python = str(settings.probe_python or sys.executable)
        self._corpses = corpses
        self._versions = versions
        self._on_progress = on_progress
        self._popen = popen
        self._children: list[tuple[str, Child]] = []
        self._ahead: Child | None = None
        self._node_corpses = 0
        self._env = environment(self.python, settings.env, os.environ)
        self._extra_files = check_files(settings.directories)

    def spawn_ahead(self) -> Child:
        """Start the node's child and let it import its checks, for a later run to `take_over`. Raises OSError."""
        child = self.spawn(None)
        child.send(b'{"kind":"load","id":0}\n')
        return child

    def take_over(self, child: Child) -> None:
        """The first child of the node that is wanted is this one, which was started ahead."""
        self._ahead = child
        self._children.append(("node", child))

    def spawn(self, target: str | None) -> Child:
        """Start a worker. Raises OSError."""
        if target is None and self._ahead is not None:
            child, self._ahead = self._ahead, None
            return child
        # Without site-packages the interpreter starts a third faster; only checks from outside may need them.
        alone = target is None and not (self.settings.third_party or self.settings.directories)
        child = Child([self.python, "-I", *(["-S"] if alone else []), WORKER], self._env, popen=self._popen)
        self._children = [(name, other) for name, other in self._children if not other.reaped.is_set()]
        self._children.append((target or "node", child))
        return child

    def setup(self, target: str | None) -> dict[str, Any]:
        """What a worker has to know first."""
        settings = self.settings
        options = {**settings.options, "ignore_pids": [os.getpid(), *settings.options.get("ignore_pids", ())]}
        if settings.run_dir is not None:
            options["run_dir"] = str(settings.run_dir)
        if self.group is not None:
            options["group"] = self.group
        return {
            "host_root": str(settings.host_root) if settings.host_root else None,
            "target": target,
            "accelerator": self.inventory.get("accelerator") or settings.accelerator,
            "inventory": self.inventory,
            "compile": self.compile if target is not None else None,
            "options": options,
            "limits": from_limits(settings.limits),
            "learned": self._learned(),
            "identity": self.identity if target is not None else None,
            "extra_files": self._extra_files,
            "third_party": list(settings.third_party),
            "programs": [
                {
                    "name": program.name,
                    "argv": list(program.argv),
                    "protocol": program.protocol,
                    "tier": program.tier.value,
                    "interval_seconds": program.interval_seconds,
                    "timeout_seconds": program.timeout_seconds,
                }
                for program in settings.programs
            ],
        }

    def _learned(self) -> list[dict[str, Any]]:
        if not self.settings.learned:
            return []
        from healthd.baselines.judging import unsilenced

        return [
            {
                "hardware": one.hardware,
                "accelerator": one.accelerator,
                "versions": dict(one.versions),
                "limits": {
                    name: {"lower": bounds.lower, "upper": bounds.upper}
                    for name, bounds in unsilenced(one, self.settings.limits).items()
                },
            }
            for one in self.settings.learned
        ]

    def learn_versions(self, versions: object) -> None:
        """What a worker says of its libraries."""
        if isinstance(versions, dict):
            self._versions.update({str(k)[:64]: str(v)[:64] for k, v in list(versions.items())[:32]})

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the libraries, as far as workers have said them."""
        return self._versions

    def progress(self, event: RunProgress) -> None:
        """Tell who watches."""
        if self._on_progress is not None:
            self._on_progress(event)

    async def back_off(self, attempt: int) -> None:
        """Before another attempt at what may be transient."""
        await asyncio.sleep(min(10.0, self.settings.retry_backoff_seconds * 2 ** (attempt - 1)))

    def stuck(self, target: str) -> Missing | None:
        """Why no worker may be started for a target: one that could not be killed is still there."""
        # A worker of several devices (`xla:0,xla:1`) holds each of them.
        child = next((found for one in target.split(",") if (found := self._corpses.of(one)) is not None), None)
        if child is None and not (target == "node" and self._node_corpses > 1):
            return None
        who = f"pid {child.worker_pid}" if child is not None else "more than one"
        text = f"a killed probe ({who}) does not end: the kernel or the device's driver holds it; reboot the node"
        return Missing(target=target, reason="Stuck", message=text)

    def keep_corpse(self, key: str, child: Child) -> None:
        """A worker that was killed and is not gone."""
        child.abandon()
        self._node_corpses += key.startswith("node/")
        for one in key.split(","):
            self._corpses.add(one, child)

    def kill_all(self) -> None:
        """At once, without waiting."""
        for _, child in self._children:
            child.kill()

    async def bury_all(self, within_seconds: float) -> None:
        """Wait until all that were killed are gone; those that are not when the time is up are remembered."""
        left = [(name, child) for name, child in self._children if child not in self._corpses]
        deadline = time.monotonic() + within_seconds
        for name, child in left:
            if not await child.gone(max(0.0, deadline - time.monotonic())) and name != "node":
                self.keep_corpse(name, child)


def worker_targets(inventory: Mapping[str, Any]) -> list[str]:
    """
    What gets a worker each, and becomes a rank: what the inventory names, else its devices.

    Empty where there are devices of which it is not known how to give them to workers.
    """
    named = inventory.get("workers")
    found = [device["target"] for device in inventory.get("devices") or ()] if named is None else named
    return [str(target) for target in found]


def environment(python: str, extra: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers: ours without what a job put there for its own, the interpreter's tools first."""
    env = {
        name: value for name, value in own.items() if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    # Not resolved: in a virtual environment the interpreter is a link, and its tools are beside the link.
    folder = os.path.dirname(python)
    path = env.get("PATH") or os.defpath
    env["PATH"] = f"{folder}{os.pathsep}{path}" if folder else path
    env.update(extra)
    return env


def check_files(directories: tuple[Path, ...]) -> list[str]:
    """The check files of an operator, sorted; a directory that cannot be read is left to the loading to complain of."""
    found: list[str] = []
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            found.append(str(directory.absolute()))
            continue
        found.extend(
            str(directory.absolute() / name) for name in names if name.endswith(".py") and not name.startswith("_")
        )
    return found
