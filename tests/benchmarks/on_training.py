"""
Training steps of the `train_step` check in a process of its own, by any interpreter: one JSON object on stdout.

    python on_training.py ACCELERATOR faults|clean|digest|rare COUNT

`faults`: COUNT of the (place, magnitude, dtype) with one wrong value each, spread over all of them; 0: all. `clean`:
COUNT healthy steps. `digest`: COUNT large steps with digests and without, in turns.
`rare`: a soak of COUNT of the smallest steps with a fault that strikes one step in 10,000, by chance.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checks.accelerators import find_accelerator
from checks.device.probes import new_seed
from checks.host.machine import Host
from checks.training.digests import RARE, Digester, missed_ratio
from checks.training.model import FORMATS, Format, Size, all_places, make_batch, make_parameters
from checks.training.own import own_step
from checks.training.probing import repeat
from checks.training.step import State, Strikes, first_state, run_step, spoil
from checks.training.work import LARGE, SMALL, on_device
from checks.worker.fault_injection import faulty
from checks.worker.faults import parse_fault

MAGNITUDES = {"last bit": 0.0, "1e-3": 1e-3, "1": 1.0, "exponent": None}
DTYPES = ("fp32", "bf16")
TINY = f"{Path(__file__).with_name('tiny_step.py')}:make"
RARE_FAULT = "train_step.own.weight_grad=corrupt:0.001"


class Steps:
    """Steps of one dtype and size on a device, each from the same state."""

    def __init__(self, device: Any, form: Format, size: Size) -> None:
        torch = device.torch
        self.device, self.form, self.size = device, form, size
        self.digester = Digester(device)
        self.state: State = first_state(torch, make_parameters(torch, size), form.wide, device.torch_device)
        self.batch = on_device(device, make_batch(torch, size, 0))
        self.places = list(all_places())

    def digests(self, change: Any = None) -> dict[str, str]:
        """Of one step."""
        look = self.digester.look
        done = run_step(self.device.torch, self.size, self.form, self.state, self.batch, look=look, change=change)
        self.device.synchronize()
        return self.digester.finish(done.places)

    def bare(self) -> None:
        """One step that nobody digests."""
        run_step(self.device.torch, self.size, self.form, self.state, self.batch, look=lambda _: None)
        self.device.synchronize()


def corrupted(steps: Steps) -> Callable[[str | None, float | None], dict[str, str]]:
    """
    Digests of a step with one wrong value: `(place, magnitude)`.

    The factors of all places are data, so that a device that compiles, compiles one step for all of them; a factor of 1
    changes nothing.
    """
    torch, device = steps.device.torch, steps.device
    index = {place: number for number, place in enumerate(steps.places)}

    def run(place: str | None, magnitude: float | None) -> dict[str, str]:
        factors = torch.ones(len(index), dtype=torch.float32)
        if place is not None:
            wrong = 2.0**64 if magnitude is None else 1.0 + max(magnitude, _eps(torch, steps, place))
            factors[index[place]] = wrong
        data = factors.to(device.torch_device)

        def change(name: str, tensor: Any) -> Any:
            return spoil(torch, tensor, data[index[name]].to(tensor.dtype))

        return steps.digests(change)

    return run


def _eps(torch: Any, steps: Steps, place: str) -> float:
    """Of the dtype that the tensor of a place has."""
    wide = place.endswith("_update") or "_weight_grad" in place or place.startswith(("embed.token", "head.loss"))
    return float(torch.finfo(getattr(torch, steps.form.wide if wide else steps.form.low)).eps)


def faults(device: Any, count: int) -> dict[str, Any]:
    """Inject, and look which place is the first that differs."""
    cases = [(dtype, place, name) for dtype in DTYPES for place in all_places() for name in MAGNITUDES]
    # An odd step: the magnitudes are four, and a sample has to have all of them.
    chosen = set(cases if not count else cases[:: max(1, len(cases) // count) | 1])
    found, missed = dict.fromkeys(MAGNITUDES, 0), []
    for dtype in DTYPES:
        run = corrupted(Steps(device, FORMATS[dtype], SMALL))
        clean = run(None, None)
        for case in cases:
            if case[0] != dtype or case not in chosen:
                continue
            _, place, name = case
            digests = run(place, MAGNITUDES[name])
            first = next((other for other, value in digests.items() if value != clean[other]), None)
            if first == place:
                found[name] += 1
            else:
                missed.append([*case, first])
    return {"injected": len(chosen), "found": found, "missed": missed}


def clean(device: Any, count: int) -> dict[str, Any]:
    """Healthy steps, half of them of each dtype; how many differ from the first."""
    differ, began = 0, time.perf_counter()
    for dtype in DTYPES:
        steps = Steps(device, FORMATS[dtype], SMALL)
        first = steps.digests()
        differ += sum(steps.digests() != first for _ in range(count // len(DTYPES)))
    return {"steps": count // len(DTYPES) * len(DTYPES), "differ": differ, "seconds": time.perf_counter() - began}


def digest(device: Any, count: int) -> dict[str, Any]:
    """Processor time of large steps with digests over that of steps without, in turns; by dtype."""
    ratios: dict[str, Any] = {}
    for dtype in DTYPES:
        steps = Steps(device, FORMATS[dtype], LARGE)
        steps.digests()
        steps.bare()
        with_, without = zip(*_turns(steps, count), strict=True)
        ratios[dtype] = {
            "ratio": statistics.median(a / b for a, b in zip(with_, without, strict=True)) - 1,
            "with": statistics.median(with_),
            "without": statistics.median(without),
        }
    return ratios


def rare(device: Any, count: int) -> dict[str, Any]:
    """A soak as the check does it, of the smallest step, with the fault as an operator injects it."""
    fault = parse_fault(f"{RARE_FAULT}/{RARE}")
    hit = faulty(device, [fault])
    seed = new_seed(None)
    began = time.perf_counter()
    work = own_step(hit, TINY)
    repeats, _ = repeat(hit, work, count, (), seed=seed)
    seconds = time.perf_counter() - began
    strikes = Strikes(hit, seed)
    struck = sum(strikes.change(number) is not None for number in range(repeats.count))
    found = [finding.message for finding in repeats.findings(hit, work)]
    return {
        "steps": repeats.count,
        "struck": struck,
        "differ": repeats.different,
        "found": found,
        "missed_ratio": missed_ratio(repeats.count, RARE),
        "seconds": seconds,
    }


def _turns(steps: Steps, count: int) -> Iterator[tuple[float, float]]:
    for _ in range(count):
        times = []
        for run in (steps.digests, steps.bare):
            began = time.process_time()
            run()
            times.append(time.process_time() - began)
        yield times[0], times[1]


def main(arguments: list[str]) -> None:
    name, what, count = arguments
    accelerator, host = find_accelerator(name, Host(None)), Host(None)
    inventory = accelerator.find(host, {})
    device = accelerator.bind(inventory["devices"][0]["target"], inventory, {})
    found = {"faults": faults, "clean": clean, "digest": digest, "rare": rare}[what](device, int(count))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
