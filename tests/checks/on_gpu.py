"""
Runs probes, or one rank of collectives, on a real GPU in a process of its own: one JSON object on stdout.

    python on_gpu.py probes TARGET
    python on_gpu.py figures TARGET
    python on_gpu.py rank RANK SIZE RENDEZVOUS CHECK...

Needs torch with CUDA and nothing else that is not in this repository.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checks.accelerators import cuda
from checks.contract import Check, Context, Evidence, Finding, Group, Tier, load_params
from checks.host.machine import Host
from checks.worker.protocol import from_evidence, from_finding

ROWS = 4096
LOOP = 50


def check_of(folder: str, name: str) -> Check:
    found: Check = getattr(importlib.import_module(f"checks.{folder}.{name}"), name)
    return found


def run(check: Check, device: Any, *, group: Group | None = None, tier: Tier = Tier.QUICK, **params: Any) -> list[Any]:
    context: Context[Any] = Context(
        host=Host(None),
        params=load_params(check.params_type, params),
        tier=tier,
        device=device,
        group=group,
        previous=None,
        inventory={},
        limits={},
    )
    return [item for item in check(context) if isinstance(item, (Finding, Evidence))]


def plain(items: list[Any]) -> list[dict[str, Any]]:
    return [from_finding(item) if isinstance(item, Finding) else from_evidence(item) for item in items]


def bind(target: str) -> Any:
    return cuda.bind(target, cuda.find(Host(None), {}), {})


def probes(target: str) -> dict[str, Any]:
    """Every probe of the quick tier, and `matmul` and `train_step` of the deep one."""
    device = bind(target)
    said = {name: plain(run(check_of("device", name), device)) for name in ("matmul", "memory", "digest", "transfer")}
    said["matmul_deep"] = plain(run(check_of("device", "matmul"), device, tier=Tier.DEEP))
    training = check_of("training", "train_step")
    said["train_step"] = plain(run(training, device))
    said["train_step_deep"] = plain(run(training, device, tier=Tier.DEEP))
    return {"key": device.key, "available_bytes": device.available_bytes(), "said": said}


def figures(target: str) -> dict[str, Any]:
    """What probes measure beside plain loops of the same shape: the best of three of each, in turns."""
    device = bind(target)
    found: dict[str, Any] = {}
    for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16")):
        ours, loops = [], []
        for _ in range(3):
            loops.append(matmul_loop(device.torch, getattr(device.torch, name)))
            (finding,) = run(check_of("device", "matmul"), device, dtypes=[dtype], sizes=[ROWS])
            ours.append(finding.measurements[0].value)
        found[f"matmul_{dtype}"] = {"probe": max(ours), "loop": max(loops)}
    ours, loops = [], []
    for _ in range(3):
        loops.append(copy_loop(device.torch))
        (finding,) = run(check_of("device", "memory"), device, max_bytes=2**30, repeats=11)
        ours.append(finding.measurements[0].value)
    found["copy"] = {"probe": max(ours), "loop": max(loops)}
    return found


def matmul_loop(torch: Any, dtype: Any) -> float:
    """FLOP/s of products of one shape, as everybody times them: many in a row between two events."""
    a, b = (torch.rand(ROWS, ROWS, device="cuda").mul_(2).sub_(1).to(dtype) for _ in range(2))
    product = torch.empty(ROWS, ROWS, dtype=dtype, device="cuda")
    return 2 * ROWS**3 / seconds_of(torch, lambda: torch.matmul(a, b, out=product))


def copy_loop(torch: Any) -> float:
    """Bytes/s read and written by copies of 512 MiB from device to device."""
    source, sink = (torch.zeros(2**27, dtype=torch.int32, device="cuda") for _ in range(2))
    return 2 * 2**29 / seconds_of(torch, lambda: sink.copy_(source))


def seconds_of(torch: Any, operation: Any) -> float:
    for _ in range(5):
        operation()
    found = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LOOP):
            operation()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / LOOP)
    return statistics.median(found)


def rank(number: int, size: int, rendezvous: str, names: list[str]) -> dict[str, Any]:
    """Be one rank of each collective, on the GPU of that number."""
    device = bind(f"cuda:{number}")
    group = Group(
        rank=number,
        size=size,
        rendezvous=rendezvous,
        interface=None,
        seed=7,
        timeout_seconds=60.0,
        targets=tuple(f"cuda:{index}" for index in range(size)),
    )
    return {name: plain(run(check_of("collective", name), device, group=group)) for name in names}


def main(arguments: list[str]) -> None:
    command, *rest = arguments
    if command == "rank":
        found = rank(int(rest[0]), int(rest[1]), rest[2], rest[3:])
    else:
        found = {"probes": probes, "figures": figures}[command](rest[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
