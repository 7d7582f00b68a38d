"""Baselines as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checks.limits import quantity
from healthd.baselines.model import Baseline, Kind, Series, State


def lines_of(series: Sequence[Series], answer: Mapping[str, Any]) -> list[str]:
    """By kind of machine; `answer` is what the aggregator adds: what is still learning, drifts."""
    lines: list[str] = []
    last: Kind | None = None
    for one in sorted(series, key=lambda each: (str(each.kind), each.name)):
        if one.in_force is None and one.candidate is None:
            continue
        if one.kind != last:
            lines += [*([""] if lines else []), str(one.kind)]
            last = one.kind
        for baseline in (one.in_force, one.candidate):
            if baseline is not None:
                lines.append(f"  {one.id}  {_line(one.name, baseline)}")
    learning = answer.get("learning") or ()
    if learning:
        least = answer.get("least") or {}
        lines += [*([""] if lines else []), _needed(least)]
        for item in learning[:50]:
            lines.append(
                f"  {item['id']}  {item['name']} on {item['kind']}: {item['samples']} samples of "
                f"{item['sources']} devices"
            )
    for drift in answer.get("drifts") or ():
        lines.append(f"! BaselineDrift: {drift['message']}")
    return lines or ["nothing is learned yet; samples come with the quick runs of healthy idle nodes, one a day"]


def differences(old: Sequence[Series], new: Sequence[Series]) -> list[str]:
    """What is approved in one and not, or otherwise, in the other: one line each."""
    before = {one.id: one for one in old if _judges(one)}
    after = {one.id: one for one in new if _judges(one)}
    lines = []
    for key in sorted(before.keys() | after.keys(), key=lambda k: _place(before.get(k) or after[k])):
        was, now = before.get(key), after.get(key)
        if was is None and now is not None and now.in_force is not None:
            lines.append(f"+ {_place(now)}: {_limit(now.name, now.in_force)}")
        elif now is None and was is not None and was.in_force is not None:
            lines.append(f"- {_place(was)}: {_limit(was.name, was.in_force)}")
        elif was is not None and now is not None and was.in_force is not None and now.in_force is not None:
            one, other = was.in_force.learned, now.in_force.learned
            if (one.median, one.lower, one.upper) != (other.median, other.lower, other.upper):
                moved = 100 * (other.median / one.median - 1)
                lines.append(
                    f"~ {_place(now)}: {_limit(was.name, was.in_force)} -> {_limit(now.name, now.in_force)} "
                    f"(median {moved:+.2f} %)"
                )
    return lines


def _judges(series: Series) -> bool:
    return series.in_force is not None and series.in_force.state in (State.APPROVED, State.FROZEN)


def _place(series: Series) -> str:
    return f"{series.name} on {series.kind}"


def _line(name: str, baseline: Baseline) -> str:
    learned = baseline.learned
    plain = name.partition("/")[0]
    noise = 100 * learned.mad / learned.median
    text = (
        f"{baseline.state.value:<9} v{baseline.version}  {name}: {_limit(name, baseline)}; median "
        f"{quantity(plain, learned.median)}, MAD {noise:.1f} %, {learned.samples} samples of {learned.sources} devices"
    )
    if learned.outside:
        text += f"; {learned.outside} of them would have failed"
    return text + (f"; by {baseline.by}" if baseline.by else "")


def _limit(name: str, baseline: Baseline) -> str:
    plain = name.partition("/")[0]
    learned = baseline.learned
    if learned.lower is not None:
        return f">= {quantity(plain, learned.lower)}"
    if learned.upper is not None:
        return f"<= {quantity(plain, learned.upper)}"
    return "no limit, its samples differ by too much"


def _needed(least: Mapping[str, Any]) -> str:
    return f"learning ({least.get('samples', '?')} samples of {least.get('sources', '?')} devices are needed):"
