"""A starting configuration out of what a good node measured."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence

from checks.limits import quantity
from healthd.baselines.learning import higher_is_better
from healthd.baselines.sampling import samples_of, why_not
from healthd.core.errors import ConflictError
from healthd.core.model import NodeState


def configuration(states: Sequence[NodeState], *, margin: float, tier: str) -> str:
    """
    TOML with `[limits]`: the worst value of all devices and runs, less the margin. Durations are only proposed.

    ConflictError when the node was not healthy, or not free, in one of the runs: limits of a bad node let bad ones
    pass for ever.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for state in states:
        why = why_not(state)
        if why is not None:
            raise ConflictError(f"{state.node}: no limits are written from this node: {why}")
        for name, _, sample in samples_of(dataclasses.replace(state, quarantine=None), now=state.observed_at):
            values[name].append(sample.value)
    last = states[-1]
    if not values:
        raise ConflictError(f"{last.node}: nothing was measured that has a limit; name a heavier --tier")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(last.versions.items()))
    lines = [
        f"# Limits from {last.node} ({last.instance_type or 'no instance type'}), {len(states)} runs of tier {tier}.",
        f"# Software: {versions}.",
        f"# Each is the worst of what all devices measured, less {100 * margin:g} %. Read them before you use them:",
        "# they hold for machines of this kind with this software, and for what was at work on it beside.",
        "",
    ]
    for name in sorted(values):
        found, plain = values[name], name.partition("/")[0]
        low, high = quantity(plain, min(found)), quantity(plain, max(found))
        lines.append(f"# {name}: {low} to {high} in {len(found)} measurements")
        if higher_is_better(name):
            lines += [f"[limits.{json.dumps(name)}]", f"lower = {_rounded(min(found) * (1 - margin))}", ""]
        else:
            upper = _rounded(max(found) * (1 + 3 * margin))
            lines += [
                "# Durations of small messages vary much more than bandwidths; take away the # to judge them as well.",
                f"# [limits.{json.dumps(name)}]",
                f"# upper = {upper}",
                "",
            ]
    return "\n".join(lines)


def _rounded(value: float) -> str:
    """Three digits: more would say that it is known so well."""
    return repr(float(f"{value:.3g}"))
