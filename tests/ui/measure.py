"""
`python -m tests.ui.measure [NODES]`: the page of a large fleet in a real browser, first paint and an update.

The aggregator, its HTTP and the browser are real; the nodes are states that a script syncs. Figures, not assertions.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from checks.contract import Status
from tests.ui.stage import chromium, stage


def main(nodes: int) -> None:
    """Print what was measured."""
    with tempfile.TemporaryDirectory(prefix="healthd-measure-") as folder, stage(Path(folder)) as found:
        for i in range(nodes):
            status = Status.FAIL if i % 97 == 13 else Status.PASS
            found.say(f"node-{i:05d}", status=status, labels={"pool": "a", "rack": f"r{i // 64}"})
        with found.http() as client:
            for path in ("/", "/?part=top", "/nodes/node-00013"):
                taken, used = [], []  # the client's share of the processor is in it: it is the same process
                for _ in range(5):
                    began, before = time.perf_counter(), time.process_time()
                    size = len(client.get(path).content)
                    used.append(1000 * (time.process_time() - before))
                    taken.append(1000 * (time.perf_counter() - began))
                print(
                    f"GET {path}: {size / 1000:.0f} kB, {min(taken):.0f} ms at best, {max(taken):.0f} at worst of 5; "
                    f"of the processor {min(used):.0f} ms at best, {used[0]:.0f} at first"
                )
        with chromium() as browser:
            page = browser.new_page(viewport={"width": 1360, "height": 900})
            for _ in range(3):
                page.goto(found.url)
                page.wait_for_timeout(700)  # the browser notes its paints a little later
                paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                print(f"first contentful paint of {nodes} nodes: {paint:.0f} ms")
            page.wait_for_selector("#live.live:not(.off)")
            for i in (1, 2, 3):
                began = time.perf_counter()
                found.say(f"node-{i:05d}", status=Status.FAIL)
                page.wait_for_selector(f"#c-node-{i:05d}.unhealthy")
                print(f"from a node's sync to its cell: {1000 * (time.perf_counter() - began):.0f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
