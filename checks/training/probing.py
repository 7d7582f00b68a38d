"""What is asked of a training step: is it the same each time, is it right, and is it fast?"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Device, Finding, Limit, Profile, Status
from checks.device.probes import labelled_limit, per_second
from checks.limits import within
from checks.peers import median
from checks.profiling.operations import with_profile
from checks.training.digests import Digester, first_difference
from checks.training.model import describe
from checks.training.step import Step, Strikes
from checks.training.work import Work

MOST_TABLES = 16
"""Different tables of digests of one step that are kept."""


@dataclass
class Repeats:
    """The most frequent digests of repeats, how many repeats differ from them, and the number and digests of one."""

    common: Mapping[str, str]
    count: int
    different: int
    example: tuple[int, Mapping[str, str]] | None
    """The first of those that differ."""

    def findings(self, device: Device, work: Work) -> Iterator[Finding]:
        """One finding where repeats differ."""
        if self.example is None:
            return
        number, digests = self.example
        place, _ = first_difference(self.common, digests)
        text = (
            f"{work.name} repeated {self.count} times from the same state: {place} differs in repeat {number + 1} "
            f"({self.different} of {self.count} differ)"
        )
        yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=device.target)


def repeat(
    device: Device, work: Work, count: int, left_out: Collection[str], seconds: float = 0.0, *, seed: int = 0
) -> tuple[Repeats, Step]:
    """
    Do the same step `count` times, or until `seconds` are over where that is longer.

    Its digests, and the first repeat with its tensors. `seed` is that of injected faults that strike by chance.
    """
    digester = Digester(device)
    strikes = Strikes(device, seed)
    counts: Counter[tuple[tuple[str, str], ...]] = Counter()  # of whole tables, so that a long run takes no memory
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    first: Step | None = None
    end = time.monotonic() + seconds
    for number in itertools.count():
        if number >= max(2, count) and time.monotonic() >= end:
            break
        done = work.run(look=None if first is None else digester.look, change=strikes.change(number))
        device.synchronize()
        if first is None:
            first = done
            check_places((*left_out, *strikes.places), done.places)
            kept = {name: digester.look(value) for name, value in done.places.items() if name not in left_out}
        else:
            kept = {name: value for name, value in done.places.items() if name not in left_out}
        table = tuple(digester.finish(kept).items())
        counts[table] += 1
        numbers.setdefault(table, number)
        if len(counts) >= MOST_TABLES:
            break  # it is never the same, and more of them tell nothing more
    assert first is not None
    (common, same), total = counts.most_common(1)[0], counts.total()
    odd = min((number, table) for table, number in numbers.items() if table != common) if len(counts) > 1 else None
    example = (odd[0], dict(odd[1])) if odd is not None else None
    return Repeats(dict(common), total, total - same, example), first


def check_places(names: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError for a place that a step does not have, naming the nearest."""
    for name in names:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
            raise ValueError(f"the step has no place {name!r}; did you mean {near!r}?")


def right(device: Device, work: Work, first: Step) -> Iterator[Finding]:
    """The first repeat against float64, place by place; nothing where there is no reference."""
    errors = work.errors(first)
    if not errors:
        return
    worst = max(errors, key=lambda error: error.share)
    finding = within(
        worst.share,
        name="train_step_error_ratio",
        target=device.target,
        limit=Limit(lower=None, upper=1.0, origin="derived"),
        reason="WrongResult",
        subject=f"{work.name} correct in {len(errors)} places; largest error, relative to what rounding explains",
        labels={"model": work.label},
    )
    if finding.status is not Status.PASS:
        wrong = next(error for error in errors if error.share > 1.0)
        text = (
            f"{work.name} is wrong from {describe(wrong.place)} on: off by {wrong.error:.3g} of its largest element; "
            f"rounding explains {wrong.bound:.3g}; {sum(e.share > 1.0 for e in errors)} of {len(errors)} places are "
            "wrong"
        )
        finding = dataclasses.replace(finding, message=text)
    yield finding


def speed(ctx: Context[Any], device: Device, work: Work, timed: int) -> Iterator[Finding | Profile]:
    """Steps and tokens per second, and how long the median and the longest step took."""
    kept: list[
        Step
    ] = []  # what a step gave has to be wanted until it is done, as in the repeats: else it is other work

    def operation() -> None:
        kept[:] = [work.run()]

    seconds = sorted(device.measure(operation, repeats=max(1, timed), warmup=1))
    middle = median(seconds)

    def judge(name: str, value: float, subject: str, label: str, labels: Mapping[str, str]) -> Finding:
        limit = labelled_limit(ctx, name, label, device.target)
        return within(
            value, name=name, target=device.target, limit=limit, reason="SlowDevice", subject=subject, labels=labels
        )

    labels, rate = {"model": work.label}, per_second(1, middle)
    judged = [judge("train_step_steps_per_second", rate, f"{work.name}s per second", work.label, labels)]
    if work.tokens is not None:
        said = f"{work.name}, tokens per second"
        judged.append(judge("train_step_tokens_per_second", work.tokens * rate, said, work.label, labels))
    for quantile, value in (("0.5", middle), ("1", seconds[-1])):
        said = f"{work.name}, quantile {quantile} of {len(seconds)},"
        judged.append(judge("train_step_seconds", value, said, work.label, {**labels, "quantile": quantile}))
    if work.flops is not None:  # alone is it long enough to say something of the device: limits are learned of this one
        dtype = work.label.partition("-")[0]
        name, value = "train_step_flops_per_second", work.flops * rate
        judged.append(judge(name, value, f"{work.name}, achieved", dtype, {"dtype": dtype}))
    # One line while all is well; each number that is not has one of its own.
    slow = [one for one in judged if one.status is not Status.PASS]
    everything = tuple(measured for one in judged for measured in one.measurements)
    shown = slow or [dataclasses.replace(judged[0], measurements=everything)]
    yield from with_profile(ctx, device, f"train_step {work.label}", operation, middle, shown)
