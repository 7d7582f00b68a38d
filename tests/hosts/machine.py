"""Machines as data: a copy of the healthy one in which a test changes one thing."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks.contract import Check, Context, Evidence, Finding, Limit, Measurement, Previous, Status, Tier, load_params
from checks.host.machine import Host
from tests.hosts.tree import Tree, read_tree, write_tree

HEALTHY = Path(__file__).with_name("healthy")
INVENTORY: Mapping[str, Any] = {
    "accelerator": "cpu",
    "device_count": 2,
    "expected_device_count": 2,
    "devices": [{"target": "cpu:0"}, {"target": "cpu:1"}],
    "holders": [],
}


class Machine:
    """A directory that stands for a machine."""

    def __init__(self, root: Path) -> None:
        write_tree(_healthy(), root)
        self.root = root
        self.host = Host(root)

    def write(self, path: str, text: str | bytes) -> None:
        """Put a file at an absolute path of the machine."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)

    def change(self, path: str, old: str, new: str) -> None:
        """Change text that is in a file."""
        text = (self.root / path.lstrip("/")).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def remove(self, path: str) -> None:
        """Remove a file or a directory."""
        place = self.root / path.lstrip("/")
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()

    def say(self, name: str, **members: Any) -> None:
        """Change members of `host.json`: `say("clock", ...)`, `say("file_systems:/", ...)`."""
        said = json.loads((self.root / "host.json").read_text())
        place = said
        for part in name.split(":"):
            place = place[part]
        place.update(members)
        self.write("/host.json", json.dumps(said))
        self.host = Host(self.root)  # it remembers what was said

    def unsay(self, name: str, member: str | None = None) -> None:
        """Remove a member of `host.json`, or a member of that."""
        said = json.loads((self.root / "host.json").read_text())
        if member is None:
            del said[name]
        else:
            del said[name][member]
        self.write("/host.json", json.dumps(said))
        self.host = Host(self.root)

    def process(self, pid: int, name: str, state: str, *, parent: int = 1, switches: int = 5, wchan: str = "0") -> None:
        """Add a process."""
        self.write(f"/proc/{pid}/comm", f"{name}\n")
        rest = "1 1 0 -1 4194560 100 0 0 0 5 5 0 0 20 0 1 0"
        self.write(f"/proc/{pid}/stat", f"{pid} ({name}) {state} {parent} {rest} {pid * 10} 1000 100\n")
        self.write(f"/proc/{pid}/status", f"voluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t1\n")
        self.write(f"/proc/{pid}/wchan", wchan)

    def run(
        self,
        check: Check,
        *,
        inventory: Mapping[str, Any] | None = None,
        limits: Mapping[str, Limit] | None = None,
        previous: Previous | None = None,
        **params: Any,
    ) -> list[Finding | Evidence]:
        """
        Run a check on this machine; `inventory` changes members of the healthy one.

        Whatever the machine is, what passes has measured something: a tool that is not there is never a pass.
        """
        context = Context(
            host=self.host,
            params=load_params(check.params_type, params),
            tier=Tier.PASSIVE,
            device=None,
            group=None,
            previous=previous,
            inventory={**INVENTORY, **(inventory or {})},
            limits=limits or {},
        )
        items = [item for item in check(context) if isinstance(item, (Finding, Evidence))]
        for item in items:
            empty = isinstance(item, Finding) and item.status is Status.PASS and not item.measurements
            assert not empty, f"{check.name} passes without a measurement: {item}"
        return items

    def findings(self, check: Check, **others: Any) -> list[Finding]:
        """What a check finds."""
        return [item for item in self.run(check, **others) if isinstance(item, Finding)]


@functools.cache
def _healthy() -> Tree:
    return read_tree(HEALTHY)


def worst_of(findings: list[Finding]) -> tuple[Status, str | None]:
    """Status and reason of the most severe finding."""
    order = list(Status)
    finding = max(findings, key=lambda item: order.index(item.status))
    return finding.status, finding.reason


def number(findings: list[Finding], name: str) -> Measurement:
    """The one measurement of a name."""
    (found,) = [item for finding in findings for item in finding.measurements if item.name == name]
    return found
