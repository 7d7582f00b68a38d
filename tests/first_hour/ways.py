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


@dataclass(frozen=True, kw_only=True)
class Way:
    """`sections` are headings of the page whose console lines are typed, in order; `more` is typed after them."""

    name: str
    page: str
    sections: tuple[str, ...]
    own: dict[str, str]
    more: tuple[str, ...] = ()

    def lines(self, values: dict[str, str]) -> Iterator[str]:
        """What is typed; `{NAME}` in what is a person's own is one of the values."""
        text = (ROOT / self.page).read_text(encoding="utf-8")
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
        more=("healthd check --tier passive || [ $? -lt 3 ]", "healthd check matmul all_reduce || [ $? -lt 2 ]"),
    ),
    Way(
        name="aggregator",
        page="docs/aggregator.md",
        sections=("1. Install it", "2. A certificate and tokens", "3. Start it", "4. Nodes", "5. Look, and ask"),
        own={"/opt/healthd": "{folder}/opt", "cd /etc/healthd": "mkdir {folder}/etc && cd {folder}/etc"},
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
)
