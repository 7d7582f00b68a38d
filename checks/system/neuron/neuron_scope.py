"""What the checks of Neuron devices share: whom they concern, and what the machine should be."""

from __future__ import annotations

from typing import Any

from checks.catalog import InstanceType, find_type
from checks.contract import Context, Finding, Status
from checks.host.identity import read_identity


def not_concerned(ctx: Context[Any]) -> Finding | None:
    """Why a check of Neuron devices has nothing to say here; None where it has."""
    used = ctx.inventory.get("accelerator")
    if used == "neuron":
        return None
    if used is None:
        return unknown("NoData", "this run could not determine the devices; see the survey's error")
    text = f"the accelerator in use is {used}, not neuron"
    return Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")


def known_type(ctx: Context[Any], configured: str | None = None) -> InstanceType | None:
    """The catalogue's record of this machine; None where its type is unknown or has no Neuron devices."""
    identity = read_identity(ctx.host, configured=configured, inventory=ctx.inventory, imds=False)
    known = find_type(identity["instance_type"])
    return known if known is not None and known.chip.accelerator == "neuron" else None


def unknown(reason: str, text: str, target: str = "node") -> Finding:
    """What cannot be told."""
    return Finding(status=Status.UNKNOWN, reason=reason, message=text, target=target)


def tool_error(ctx: Context[Any]) -> tuple[str, str] | None:
    """Why neuron-ls said nothing, as a reason and a text; None where it did."""
    error = ctx.inventory.get("tool_error")
    if error is None:
        return None
    reason, text = error
    return str(reason), str(text)


def numbers(values: list[int]) -> str:
    """Numbers for people, ranges drawn together: `0-3, 7`."""
    parts: list[str] = []
    start = previous = None
    for value in [*sorted(set(values)), None]:
        if start is not None and value != (previous or 0) + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = value
        elif start is None:
            start = value
        previous = value
    return ", ".join(parts)
