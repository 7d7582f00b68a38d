"""
`make screenshots`: the pictures of README and docs, taken of a real fleet by a real browser. Nothing in them is acted.

An aggregator and six node daemons start on this machine; devices are CPUs, and the tensor operations and collectives on
them are real. Faults are injected, as in a fire drill, and marked so on the pictures as everywhere. Two minutes.
"""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.aggregator.cluster import AGGREGATOR, HEALTHD, Cluster, ask, release
from tests.aggregator.service import ROOT, until
from tests.ui.stage import CHROMIUM, chromium

PICTURES = ROOT / "docs" / "pictures"
NODES = {"n1": "r1", "n2": "r1", "n3": "r1", "n4": "r2", "n5": "r2", "n6": "r2"}
CHECKS = (
    *("device_count", "memory_free", "disk_space", "clock", "shared_memory"),
    *("matmul", "memory", "digest", "all_reduce", "all_gather"),
)
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# Twelve ranks on a few cores start one after another; a fleet has cores enough.
PATIENT = (
    AGGREGATOR.replace('silent = "6s"', 'silent = "60s"')
    + """
collective_start = "120s"
collective_join = "90s"
collective_timeout = "90s"
tuning.collective_contact = "60s"
"""
)
# What a job's command says that has lost its peer, and what one says of a broken device.
DYING = {
    "n1": "[pair.cc:553] Connection closed by peer [127.0.0.1]:46264",
    "n2": "CUDA error: device-side assert triggered",
}
TERMINAL = (
    "margin: 0; padding: 12px; width: 132ch; font: 14px/1.35 'DejaVu Sans Mono', monospace; white-space: pre-wrap;"
    " overflow-wrap: anywhere; color: #ddd; background: #16181d"
)
# Six nodes start Python and torch a dozen times, maybe on two cores.
START_SECONDS = 180.0


def main() -> int:
    """Make all pictures; 1 with a line where something is missing."""
    if not Path(CHROMIUM).exists():
        print(f"{CHROMIUM} is not installed; apt-get install chromium", file=sys.stderr)
        return 1
    PICTURES.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="healthd-pictures-") as folder, Cluster(Path(folder)) as cluster:
        url = start(cluster)
        print(f"{len(NODES)} nodes are healthy after {time.monotonic() - began:.0f} s", flush=True)
        gates, terminal = play(cluster, url)
        with chromium() as browser:
            shoot(browser, url, gates)
            terminal_picture(browser, terminal, "postmortem-terminal")
    print(f"{len(list(PICTURES.glob('*.png')))} pictures in {PICTURES} after {time.monotonic() - began:.0f} s")
    return 0


def start(cluster: Cluster) -> str:
    """The fleet; the URL of its aggregator."""
    from checks.discover import builtin_checks

    cluster.checks = tuple(name for name in CHECKS if name in builtin_checks())
    aggregator = cluster.aggregator(config=PATIENT).start()
    for name, rack in NODES.items():
        node = cluster.node(name, "--label", f"rack={rack}", aggregator=aggregator.url)
        file = cluster.folder / f"{name}.toml"
        file.write_text(file.read_text().replace("cpu_devices = 1", "cpu_devices = 2"))
        node.start(ready=False)
    cluster.healthy(*NODES, seconds=START_SECONDS)
    return aggregator.url


def play(cluster: Cluster, url: str) -> tuple[dict[str, str], str]:
    """What has happened on the fleet when the pictures are taken: gates by name, and a terminal."""
    gates = {}
    for job in ("llama-70b-a", "llama-70b-b"):
        admitted = ask(url, job, ["n1", "n2", "n3"], wait=25.0, wait_seconds=120.0)
        decided(url, admitted["id"])
        release(url, admitted["id"])
    until(lambda: not any_leases(cluster), 20.0)
    with drilled(cluster, "n5", "all_reduce@rank:8=corrupt"):
        gates["fault"] = ask(url, "pretrain-7", list(NODES), wait_seconds=180.0)["id"]
        decided(url, gates["fault"])
    gates["died"], terminal = died(cluster, url)
    until(lambda: health_of(cluster, "n2") == "unhealthy", 60.0)
    gates["running"] = ask(url, "finetune-3", ["n3", "n4"], wait=25.0, wait_seconds=120.0)["id"]
    decided(url, gates["running"])
    ask(url, "watched-1", ["n1", "n2"], wait=25.0, mode="observe", collective=False)
    gates["waits"] = ask(url, "pretrain-8", ["n1", "n3", "n6"], wait=0.0, wait_seconds=600.0)["id"]
    return gates, terminal


def died(cluster: Cluster, url: str) -> tuple[str, str]:
    """A job that dies of a device of n2, and what `healthd run` says of it there: its gate, and the terminal."""
    admitted = ask(url, "pretrain-6", list(DYING), wait=25.0, wait_seconds=120.0, collective=False)
    decided(url, admitted["id"])
    fault = cluster.healthd("fault", "set", "matmul@cpu:1=corrupt", "--run-dir", str(cluster.run_dir("n2")))
    assert fault.code == 0, fault.err
    command = ("run", "--job", "pretrain-6", "--exit-style", "verdict", "--", "python3", "train.py")
    ends = []
    for node, words in DYING.items():
        folder = cluster.folder / f"job-{node}"
        folder.mkdir()
        (folder / "train.py").write_text(f"words = {words!r}\nraise RuntimeError(words)\n")
        own = {"NODE_NAME": node, "HEALTHD_AGGREGATOR": url, "HEALTHD_NODE_RUN_DIR": str(cluster.run_dir(node))}
        own |= {"HEALTHD_NODE_CHECKS": "memory_free,matmul,digest", "HEALTHD_CPU_DEVICES": "2"}
        own |= {"HEALTHD_NODE_FAULTS": "matmul@cpu:1=corrupt"} if node == "n2" else {}
        ends.append(
            subprocess.Popen(
                [*HEALTHD, *command], stderr=subprocess.PIPE, text=True, cwd=folder, env={**cluster.env, **own}
            )
        )
    said = [process.communicate(timeout=200)[1] for process in ends]
    shown = shlex.join(("healthd", *command))
    text = said[-1].replace(str(cluster.folder), "")
    return admitted["id"], f"$ {shown}\n{text}$ echo $?\n{ends[-1].returncode}\n"


@contextmanager
def drilled(cluster: Cluster, node: str, fault: str) -> Iterator[None]:
    """A fault for a while."""
    run_dir = ("--run-dir", str(cluster.run_dir(node)))
    said = cluster.healthd("fault", "set", fault, *run_dir)
    assert said.code == 0, said.err
    yield
    assert cluster.healthd("fault", "clear", *run_dir).code == 0
    until(lambda: health_of(cluster, node) == "healthy", 60.0)


def health_of(cluster: Cluster, node: str) -> str:
    return str(cluster.services["aggregator"].get(f"/v1/nodes/{node}").json()["health"])


def any_leases(cluster: Cluster) -> bool:
    return bool(cluster.services["aggregator"].get("/v1/fleet").json()["leased"])


def decided(url: str, gate: str) -> None:
    import httpx

    def told() -> bool:
        answer = httpx.get(
            f"{url}/v1/gates/{gate}", params={"wait": 5}, timeout=20, trust_env=False, verify=False
        ).json()
        return bool(answer["decision"] != "hold")

    until(told, 200.0, lambda: f"gate {gate} is not decided")


def shoot(browser: Any, url: str, gates: dict[str, str]) -> None:
    """Every page that the docs show, in light and dark, and on a phone."""
    pages = {
        "fleet": "/",
        "node": "/nodes/n2",
        "gates": "/gates",
        "heat": "/heat",
        "history": "/history",
        "validation": f"/gates/{gates['fault']}",
        "waiting": f"/gates/{gates['waits']}",
        "postmortem": f"/jobs/{gates['died']}",
    }
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=DESK, color_scheme=scheme, device_scale_factor=1.25)
        shown = pages if scheme == "light" else {"fleet": pages["fleet"], "validation": pages["validation"]}
        for name, path in shown.items():
            picture(context, f"{url}{path}", name if scheme == "light" else f"{name}-dark", whole=name != "node")
        context.close()
    context = browser.new_context(viewport=PHONE, device_scale_factor=2, color_scheme="light")
    for name in ("fleet", "node"):
        picture(context, f"{url}{pages[name]}", f"{name}-phone", whole=False)
    context.close()


def picture(context: Any, url: str, name: str, *, whole: bool = True) -> None:
    page = context.new_page()
    page.goto(url)
    if page.locator("main[data-topic]").count():
        page.wait_for_selector("#live.live:not(.off)")
    page.wait_for_timeout(1500)  # the first refresh, if there is one
    page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=whole)
    page.close()


def terminal_picture(browser: Any, text: str, name: str) -> None:
    """What a terminal of 132 columns shows."""
    context = browser.new_context(viewport={"width": 1140, "height": 100}, device_scale_factor=1.25)
    page = context.new_page()
    page.set_content(f'<body style="margin: 0"><pre style="{TERMINAL}">{html.escape(text)}</pre></body>')
    page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=True)
    context.close()


if __name__ == "__main__":
    sys.exit(main())
