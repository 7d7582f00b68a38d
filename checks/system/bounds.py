"""Where the bounds of a passive check come from, and how strict a check is on this kind of machine."""

from __future__ import annotations

from typing import Any

from checks.contract import NO_LIMIT, Context, Limit


def bound(
    ctx: Context[Any], name: str, target: str = "node", *, lower: str | None = None, upper: str | None = None
) -> Limit:
    """
    The limit of a measurement: what stands in `ctx.limits`, else the parameters that are named here.

    A parameter's origin is `config` where somebody changed it, else `default`; None as its value sets no limit.
    """
    given = ctx.limit(name, target)
    if given is not NO_LIMIT:
        return given
    params = ctx.params
    values = [None if field is None else getattr(params, field) for field in (lower, upper)]
    if values == [None, None]:
        return NO_LIMIT
    changed = any(field and getattr(params, field) != getattr(type(params), field) for field in (lower, upper))
    low, high = (None if value is None else float(value) for value in values)
    return Limit(lower=low, upper=high, origin="config" if changed else "default")


def is_required(ctx: Context[Any], required: bool | None) -> bool:
    """
    Whether a source of facts must be there: as the parameter says, else everywhere but on plain CPU nodes.

    Machines with accelerators are run by somebody who gives the daemon its rights; a laptop or a container without
    accelerators is not, and must still be able to show what it can.
    """
    return ctx.inventory.get("accelerator") != "cpu" if required is None else required


def in_use(ctx: Context[Any]) -> bool:
    """Whether a job has the devices, or may have them: holders that cannot be seen count."""
    return ctx.inventory.get("holders") != []
