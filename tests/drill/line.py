"""
The way of one aggregator to the database, as a process of its own: a thread beside ten thousand simulated nodes would
be what is measured.

    python -m tests.drill.line tcp://127.0.0.1:5432     # prints its port; obeys `cut` and `pass`, a line each
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from tests.aggregator.proxy import Proxy, Rule
from tests.aggregator.service import ROOT


class Line:
    """Listens on `port` of loopback while the block lasts."""

    def __init__(self, target: str) -> None:
        self._command = [sys.executable, "-m", "tests.drill.line", target]

    def __enter__(self) -> Line:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def obey(self, rule: Rule) -> None:
        """What goes for everything that passes from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rule.value}\n")
        self._process.stdin.flush()


def main() -> None:
    """Pass on until standard input ends."""
    with Proxy(sys.argv[1]) as proxy:
        print(proxy.url.rpartition(":")[2], flush=True)
        for said in sys.stdin:
            proxy.rule = Rule(said.strip())


if __name__ == "__main__":
    main()
