"""
Compares data-parallel ranks: which rank computed or holds different values, and how long its own work took. Pure.

Only the first step with a fault is reported, since later faults are its consequences. Within a step, faults that a rank
found in itself come first, then the reduced gradients, then the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from checks.collective.judge import judge_missing, present_and_gone
from checks.collective.ranks import bus_factor, judge_bandwidth, limit_of
from checks.collective.training.shard import first_difference
from checks.contract import Evidence, Finding, Missing, Status
from checks.limits import quantity, within
from checks.peers import vote
from checks.training.model import OPTIMIZER, REDUCTION, describe

_FACTOR = 6.0  # as in checks/training/reference.py: rounding explains more once in 3e7
_U_FP32 = 2.0**-24

Means = Mapping[str, tuple[float, float]]
"""Of each layer, over all ranks: the mean of their sums, and that of their sums of absolute values."""


def judge_data_parallel(name: str, evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    """Findings of the steps: whose fault missing ranks are, who is wrong, and the times when all are here."""
    ranks, gone = present_and_gone(evidence, missing)
    text = f"no data about the steps of {name}"
    gone += [
        Missing(target=item.target, reason="Garbage", message=text) for item in ranks if "training" not in item.data
    ]
    ranks = [item for item in ranks if "training" in item.data]
    if gone:
        yield from judge_missing(name, ranks, gone)
    wrong = list(_judge_steps(name, ranks, whole=not gone))
    yield from wrong
    if ranks and not gone:
        yield from _judge_speed(name, ranks, exact=not wrong)


def _judge_steps(name: str, ranks: Sequence[Evidence], *, whole: bool) -> Iterator[Finding]:
    count = min((int(item.data["training"]["steps"]) for item in ranks), default=0)
    for step in range(count):
        findings = list(_own_faults(name, ranks, step))
        no_numbers = _without_numbers(ranks, step)
        findings += _no_numbers(name, no_numbers, step, {one.target for one in findings})
        if whole and not no_numbers:  # else all that is reduced is their consequence
            findings += _reduced(name, ranks, step, {one.target for one in findings})
            findings += _updated(name, ranks, step, {one.target for one in findings})
        if findings:
            yield from findings
            return


def _own_faults(name: str, ranks: Iterable[Evidence], step: int) -> Iterator[Finding]:
    for item in ranks:
        for fault in item.data["training"]["faults"]:
            if fault["step"] == step:
                text = f"{_of_step(name, step)}: {_named(item)} is at fault: {fault['message']}"
                yield Finding(status=Status.FAIL, reason=fault["reason"], message=text, target=item.target)


def _without_numbers(ranks: Iterable[Evidence], step: int) -> list[tuple[Evidence, str]]:
    """The ranks that contributed gradients which are no numbers, each with the first such layer."""
    found = []
    for item in ranks:
        sums = item.data["training"]["sums"]
        if step and any(steps[step - 1][2] is None for steps in sums.values()):
            continue  # it got them from the reduction before
        layer = next((layer for layer, steps in sums.items() if None in steps[step][:2]), None)
        if layer is not None:
            found.append((item, str(layer)))
    return found


def _no_numbers(name: str, ranks: Iterable[tuple[Evidence, str]], step: int, known: set[str]) -> Iterator[Finding]:
    for item, layer in ranks:
        if item.target not in known:
            text = f"{_of_step(name, step)}: {_named(item)} computed gradients of layer {layer} that are not numbers"
            yield Finding(status=Status.FAIL, reason="WrongResult", message=text, target=item.target)


def _reduced(name: str, ranks: Sequence[Evidence], step: int, known: set[str]) -> list[Finding]:
    """Reduced gradients are equal on all ranks, and the mean of what all contributed."""
    means, bound = _means(ranks, step), _FACTOR * math.sqrt(len(ranks)) * _U_FP32
    same = len({_table(item, step, REDUCTION) for item in ranks}) < 2
    if same and (not ranks or _off_mean(ranks[0], means, step, bound) is None):
        return []
    off = {item.target: layer for item in ranks if (layer := _off_mean(item, means, step, bound)) is not None}
    sound = [item for item in ranks if item.target not in known]
    findings = list(_compared(name, sound, step, REDUCTION, off))
    if not findings and sound and len(off) == len(ranks):
        who, layer = ", ".join(map(_named, ranks)), off[ranks[0].target]
        text = (
            f"{_of_step(name, step)}: all ranks hold the same reduced gradients, but those of layer {layer} are not "
            f"the mean of what the ranks contributed: one of {who} is at fault"
        )
        findings.append(Finding(status=Status.FAIL, reason="CollectiveMismatch", message=text, target="node"))
    return findings


def _updated(name: str, ranks: Sequence[Evidence], step: int, known: set[str]) -> list[Finding]:
    """Parameters are equal on all ranks of one key; whose gradients were others already is not looked at."""
    groups: dict[str, list[Evidence]] = defaultdict(list)
    if "node" not in known:
        for item in ranks:
            if item.target not in known:
                groups[item.key].append(item)
    return [finding for group in groups.values() for finding in _compared(name, group, step, OPTIMIZER, {})]


def _compared(name: str, ranks: Sequence[Evidence], step: int, phase: str, off: Mapping[str, str]) -> Iterator[Finding]:
    """
    By majority. Without one, those whose sums are `off` are wrong, if the sums of others are not; else nobody is named.
    """
    tables = {item.target: _table(item, step, phase) for item in ranks}
    if len(set(tables.values())) < 2:
        return
    majority = vote(Counter(tables.values()))
    right, most = majority.right, majority.count
    what = _of_step(name, step)
    if right is None and 0 < len(off) < len(ranks):
        sound = vote(Counter(table for target, table in tables.items() if target not in off))
        right, most = sound.right if sound.is_unanimous else None, sound.count
    if right is None:
        one, other = sorted(tables.values())[:: len(tables) - 1]
        who = ", ".join(map(_named, ranks))
        where = _first(one, other, phase)
        text = f"{what}: {where} differs between ranks and no majority shows which is wrong: one of {who} is at fault"
        yield Finding(status=Status.FAIL, reason="DigestMismatch", message=text, target="node")
        return
    for item in ranks:
        if tables[item.target] == right:
            continue
        others = f"{most} other ranks" if most > 1 else "the other rank"
        text = f"{what}: {_named(item)} differs from {others}: {_first(right, tables[item.target], phase)}"
        if item.target in off:
            text += ", which is not the mean of what the ranks contributed"
        yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=item.target)


def _means(ranks: Sequence[Evidence], step: int) -> Means:
    """Without the layers in which a rank contributed what is no number."""
    found: dict[str, tuple[float, float]] = {}
    for layer in ranks[0].data["training"]["sums"] if ranks else ():
        parts = [one.data["training"]["sums"][layer][step] for one in ranks]
        if not any(part[0] is None or part[1] is None for part in parts):
            found[layer] = (sum(part[0] for part in parts) / len(parts), sum(part[1] for part in parts) / len(parts))
    return found


def _off_mean(item: Evidence, means: Means, step: int, bound: float) -> str | None:
    """
    The first layer whose reduced gradients are not the mean of what all ranks contributed; None: all are.

    Sums of n terms err by up to sqrt(n) roundings, and the division by one: `bound`, times the size.
    """
    sums = item.data["training"]["sums"]
    for layer, (mean, size) in means.items():
        reduced = sums[layer][step][2]
        if reduced is None or abs(reduced - mean) > bound * size:
            return layer
    return None


def _table(item: Evidence, step: int, phase: str) -> tuple[str, str]:
    """The names of its places, and the digests of them."""
    told = item.data["training"]
    return str(told["places"]), str(told["digests"][phase][step])


def _first(one: tuple[str, str], other: tuple[str, str], phase: str) -> str:
    """The first place at which two tables differ, in words."""
    if one[0] != other[0]:
        return "the list of parameters"
    place = first_difference(one[1], other[1], one[0], phase)
    return describe(place) if place is not None else f"a place of the {phase}"


def _named(item: Evidence) -> str:
    return f"{item.target} ({item.data['device']})"


def _of_step(name: str, step: int) -> str:
    return f"{name}, step {step + 1}"


def _judge_speed(name: str, ranks: Sequence[Evidence], *, exact: bool) -> Iterator[Finding]:
    """
    One finding of the reduction, and one of each rank whose own work takes longer than its limit.

    The reduction takes as long as in the rank that came to it last: the others waited for that one in it.
    """
    measured = {item.target: item.data["sizes"][0] for item in ranks}
    size, count = next(iter(measured.values())), len(ranks)
    seconds = min(float(one["seconds"]) for one in measured.values())
    own = [float(one["own_seconds"]) for one in measured.values()]
    found = judge_bandwidth(
        name,
        f"{name}: reduction of {size['size_bytes']} bytes over {count} ranks",
        int(size["bytes"]),
        seconds,
        factor=bus_factor("all_reduce", count),
        limit=functools.partial(limit_of, size),
        labels={"size_bytes": str(size["size_bytes"])},
    )
    span = " to ".join(quantity("own_seconds", value) for value in (min(own), max(own)))
    text = f"{found.message}; own work of the ranks took {span}"
    if exact:
        steps = int(ranks[0].data["training"]["steps"])
        text += f"; gradients and parameters match on all ranks in {steps} steps"
    yield dataclasses.replace(found, message=text)
    for item in ranks:
        one = measured[item.target]
        finding = within(
            float(one["own_seconds"]),
            name=f"{name}_own_seconds",
            target=item.target,
            limit=limit_of(one, "own_seconds"),
            reason="SlowDevice",
            subject=f"{name}: own work of {_named(item)}",
            labels={},
        )
        if finding.status is not Status.PASS:
            yield finding
