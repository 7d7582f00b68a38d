"""
The documented ways that can be walked on one machine, as the lines of the pages themselves.

What a person puts in the place of an example, such as a path of their own, is named in `own`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
AIM_SECONDS = 300.0
PREFLIGHT = (
    "healthd preflight --nnodes 2 --node-rank {rank} --main 127.0.0.1 --job small --run-dir {{folder}}/r{rank} "
    "--wait 4m -- true"
)


# What a site has before it reads the page: a Slurm of one node, without what needs services of the machine.
SLURM_CONF = """ClusterName=t
SlurmctldHost=$HOSTNAME
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation=/var/spool/slurm
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmctldPort=16817
NodeName=$HOSTNAME Port=16818 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Way:
    """
    `sections` are headings of the page whose console lines are typed, in order; `first` is typed before, `more` after.

    `needs` are programs without which the way is left out. `as_root`: it writes into /etc, /opt, /run and /var, as the
    page does; these are layers of its own, which nobody else sees and which end with it.
    """

    name: str
    page: str
    sections: tuple[str, ...]
    own: dict[str, str]
    first: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    as_root: bool = False

    def lines(self, values: dict[str, str]) -> Iterator[str]:
        """What is typed; `{NAME}` in what is a person's own is one of the values."""
        text = (ROOT / self.page).read_text(encoding="utf-8")
        for line in self.first:
            yield line.format(**values)
        for section in self.sections:
            found = re.search(rf"(?ms)^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text)
            if found is None:
                raise LookupError(f"{self.page} has no section {section!r}")
            for block in re.findall(r"(?ms)^```console\n(.*?)^```$", found[1]):
                for line in re.findall(r"(?m)^[$#] (.*)$", block.replace("\\\n", " ")):
                    for example, mine in self.own.items():
                        line = line.replace(example, mine.format(**values))
                    yield line
        for line in self.more:
            yield line.format(**values)


WAYS = (
    Way(
        name="check",
        page="README.md",
        sections=("Install",),
        own={"~/healthd": "{folder}/healthd", "/opt/venv/bin/python": "{probe}"},
        more=("healthd check --tier passive || [ $? -eq 1 ]", "healthd check matmul all_reduce"),
    ),
    Way(
        name="aggregator",
        page="docs/aggregator.md",
        sections=("1. Install it", "2. A certificate and tokens", "3. Start it", "4. Nodes", "5. Look, and ask"),
        own={"/opt/healthd": "{folder}/opt", "/etc/healthd": "{folder}/etc"},
    ),
    Way(
        name="preflight",
        page="README.md",
        sections=(),
        own={},
        more=(
            "python3 -m venv {folder}/healthd && . {folder}/healthd/bin/activate && pip install .",
            PREFLIGHT.format(rank=1) + " &",
            PREFLIGHT.format(rank=0),
        ),
    ),
    Way(
        name="demo",
        page="README.md",
        sections=(),
        own={},
        more=("python3 -m venv {folder}/healthd && . {folder}/healthd/bin/activate && pip install .", "healthd demo"),
    ),
    Way(
        name="slurm",
        page="docs/slurm.md",
        sections=("2. The hooks",),
        own={"systemctl restart slurmctld && systemctl restart slurmd": "slurmctld -c -D & slurmd -D & sleep 2"},
        first=(
            "python3 -m venv /opt/healthd && /opt/healthd/bin/pip install .",
            "export PATH=/opt/healthd/bin:/usr/sbin:$PATH HEALTHD_AGGREGATOR=http://127.0.0.1:8090",
            'mkdir -p /etc/slurm /var/spool/slurm && printf %s "' + SLURM_CONF + '" > /etc/slurm/slurm.conf',
            "healthd aggregator &",
            "healthd node --aggregator $HEALTHD_AGGREGATOR &",
        ),
        more=(
            "healthd slurm doctor",
            "healthd slurm doctor --node $HOSTNAME",
            "sed -i '/^mode=/d; /^gate_wait=/d' /etc/slurm/healthd/hooks.conf",
            "sbatch --wait -o /dev/null --wrap true",
            "healthd fleet explain slurm-1 | grep ADMIT",
        ),
        needs=("slurmctld", "slurmd", "sbatch", "curl"),
        as_root=True,
    ),
)
