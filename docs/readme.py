"""
Write the output of `healthd demo` into the README: `make readme`.

The acts stand between two comments. Gate ids, commands that start processes, quarantines and rounds of the localisation
are left out; nothing else is changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(?s)(<!-- demo: [^\n]*-->\n).*?(<!-- end -->)")
WIDTH = 110
ACTS = ("2. ", "3. ", "4. ")
SHOWN = re.compile(r"^(\$ healthd gate --|  [✓✗] |    [✗] |      [✗] (?!.*Quarantined))")
"""A quarantine repeats the fault above it."""


def excerpt(output: str) -> str:
    """The title of each act, and the gates with their answers."""
    lines: list[str] = []
    inside = False
    for line in output.splitlines():
        if re.match(r"^\d\. ", line):
            inside = line.startswith(ACTS)
            if inside:
                lines.append(line)
        elif line.startswith("$ healthd fleet explain"):
            inside = False
        elif inside and SHOWN.match(line):
            lines.append(shortened(line))
    return "\n".join(lines).strip()


def shortened(line: str) -> str:
    """A line without the aggregator's address and the gate's id, and no longer than the page is wide."""
    line = re.sub(r" --aggregator \S+| gate g-[0-9a-f-]+,", "", line).replace("\t", "  ")
    return line if len(line) <= WIDTH else line[: WIDTH - 4].rstrip() + " ..."


def main() -> int:
    """See the module; 1 where the demonstration fails."""
    done = subprocess.run(["healthd", "demo"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"healthd demo ended with {done.returncode}: {done.stderr.strip() or done.stdout[-500:]}\n")
        return 1
    page = PAGE.read_text(encoding="utf-8")
    text = f"```text\n{excerpt(done.stdout)}\n```\n"
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + text + found[2], page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
