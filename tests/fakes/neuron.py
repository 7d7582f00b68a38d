"""
A Neuron machine as a directory: files of the kernel and the driver, and tools that behave as documented.

By hand: `python -m tests.fakes.neuron DIR trn1.32xlarge [--tools old] [--driver 2.31.7.0] [--lnc 1] [--share 4,5,6,7]
[--rpm] [--fault KIND[@TARGET][=VALUE]]...`, then `healthd check --host-root DIR`. On a directory that is there already,
faults are added. `neuron_faults` says which there are.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from checks.host.machine import Host
from tests.fakes.neuron_faults import FAULTS, make_fault
from tests.fakes.neuron_files import write_machine
from tests.fakes.neuron_state import Record, make_state
from tests.hosts.machine import Machine
from tests.hosts.temporary import memory_folder
from tests.hosts.tree import Tree, read_tree, write_tree

TOOLS = Path(__file__).with_name("bin")
STATE = "standin.json"


class NeuronMachine(Machine):
    """
    A stand-in of any Neuron type of the catalogue. `share` are the devices of a container; None: it has all.

    `whole`: with all files that the driver makes, thousands on large types. Otherwise the first core of the first
    device has all of its files, and every other one those that healthd may read.
    """

    def __init__(
        self,
        root: Path,
        instance_type: str = "trn1.32xlarge",
        *,
        tools: str = "new",
        driver: str = "2.30.2.0",
        lnc: int | None = None,
        share: Sequence[int] | None = None,
        package_manager: Literal["dpkg", "rpm"] = "dpkg",
        whole: bool = False,
    ) -> None:
        shared = None if share is None else tuple(share)
        tree, state = _make(instance_type, tools, driver, lnc, shared, package_manager, whole)
        write_tree(tree, root)
        self.root, self.host = root, Host(root)
        self.state: Record = json.loads(state)

    @classmethod
    def at(cls, root: Path) -> NeuronMachine:
        """The machine that was made there before."""
        machine = cls.__new__(cls)
        machine.root, machine.host = root, Host(root)
        machine.state = json.loads((root / STATE).read_text())
        return machine

    def fault(self, kind: str, target: str | None = None, value: str | None = None) -> None:
        """
        Make a documented fault: files and what the tools say change as they would. Raises ValueError for what is none.

        Targets are `neuron:7`, `neuroncore:14`, `efa:rdmap16s25`, or a tool's name; None takes the first that fits.
        """
        make_fault(self.root, self.state, kind, target, value)
        self.save()

    def save(self) -> None:
        """Write the state for the tools, at once and whole: a tool may be reading it."""
        draft = self.root / f"{STATE}.new"
        draft.write_text(json.dumps(self.state))
        draft.replace(self.root / STATE)


@functools.cache
def _make(
    instance_type: str,
    tools: str,
    driver: str,
    lnc: int | None,
    share: tuple[int, ...] | None,
    package_manager: str,
    whole: bool,
) -> tuple[Tree, str]:
    """The files of a machine, and its state as JSON: made once a process, because many tests have the same machine."""
    state = make_state(instance_type, tools=tools, driver=driver, lnc=lnc, share=share)
    state["package_manager"] = package_manager
    with tempfile.TemporaryDirectory(prefix="standin-", dir=memory_folder()) as folder:
        machine = Machine(Path(folder) / "machine")
        write_machine(machine.root, state, whole=whole)
        if share is not None:  # what tells a container from a machine that has lost device files
            machine.change("/proc/self/mountinfo", " - ext4 /dev/nvme0n1p1 ", " - overlay overlay ")
        copy_tools(machine.root)
        if package_manager != "rpm":
            (machine.root / "bin/rpm").unlink()
        said = json.dumps(state)
        (machine.root / STATE).write_text(said)
        return read_tree(machine.root), said


def copy_tools(root: Path) -> None:
    """The tools into `bin`, started by this interpreter: one found by PATH may be a slow wrapper."""
    folder = root / "bin"
    folder.mkdir(exist_ok=True)
    interpreter = getattr(sys, "_base_executable", "") or sys.executable
    head = f"#!{interpreter} -SE"
    for tool in sorted(TOOLS.iterdir()):
        if not tool.is_file():
            continue
        place = folder / tool.name
        first, _, rest = tool.read_text().partition("\n")
        if len(head) < 120 and " " not in interpreter and "python3" in first:
            first = head
        place.write_text(f"{first}\n{rest}")
        place.chmod(0o755)


def parse_fault(text: str) -> tuple[str, str | None, str | None]:
    """`KIND[@TARGET][=VALUE]`."""
    head, equals, value = text.partition("=")
    kind, at, target = head.partition("@")
    return kind, target if at else None, value if equals else None


def main(argv: Sequence[str] | None = None) -> int:
    """Make a machine, or add faults to one."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fakes.neuron", description="A Neuron machine as a directory."
    )
    parser.add_argument("directory", type=Path, help="a new one, for 'healthd check --host-root'")
    parser.add_argument(
        "instance_type", nargs="?", help="such as trn1.32xlarge; left out, faults are added to a machine"
    )
    parser.add_argument("--tools", choices=("new", "old"), default="new", help="Neuron's tools as of today, or older")
    parser.add_argument("--driver", default="2.30.2.0", help="version of the driver (default: %(default)s)")
    parser.add_argument("--lnc", type=int, help="physical cores of one logical core")
    parser.add_argument("--rpm", action="store_const", const="rpm", default="dpkg", help="packages by rpm, not dpkg")
    parser.add_argument(
        "--share",
        type=lambda text: [int(part) for part in text.split(",")],
        metavar="N,N,...",
        help="only these devices, as in a container",
    )
    parser.add_argument("--fault", action="append", default=[], metavar="KIND[@TARGET][=VALUE]", help=", ".join(FAULTS))
    asked = parser.parse_args(argv)
    was_there = asked.directory.exists()
    try:
        if asked.instance_type is None:
            machine = NeuronMachine.at(asked.directory)
        else:
            machine = NeuronMachine(
                asked.directory,
                asked.instance_type,
                tools=asked.tools,
                driver=asked.driver,
                lnc=asked.lnc,
                share=asked.share,
                package_manager=asked.rpm,
                whole=True,
            )
        for text in asked.fault:
            machine.fault(*parse_fault(text))
    except FileExistsError:
        print(f"{parser.prog}: {asked.directory} is there; name a new one, or no type to add faults", file=sys.stderr)
        return 2
    except FileNotFoundError:
        print(f"{parser.prog}: {asked.directory} is no such machine; name its type to make one", file=sys.stderr)
        return 2
    except ValueError as error:
        if asked.instance_type is not None and not was_there:
            shutil.rmtree(asked.directory, ignore_errors=True)
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{machine.root}: {machine.state['instance_type']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
