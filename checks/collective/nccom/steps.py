"""What the three nccom checks share: whether they concern the node, the steps, and the time for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from checks.catalog import find_type
from checks.collective.nccom.judge import judge_step
from checks.collective.nccom.plan import core_ids_of, lnc_of, plan_steps, rank_counts
from checks.collective.nccom.run import find_tool, learn_abilities, run_step
from checks.contract import Context, Finding, Progress, Status, Tier
from checks.host.machine import HostError

_LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class Params:
    step_seconds: float = 120.0
    """How long one process of nccom-test may take, loading of its programs included; beyond it the collective hangs."""
    total_seconds: float = 590.0
    """How long all of them may take: less than the time-out of the check, so that a step is named."""


def run_nccom(ctx: Context[Params], check: str) -> Iterator[Finding | Progress]:
    """Run and judge all steps of one check, until one finds the cores taken or hangs."""
    began = time.monotonic()
    refused = _refused(ctx)
    if refused is not None:
        yield refused
        return
    ranks = _rank_count(ctx)
    if ranks is None:
        text = "how many NeuronCores there are is not known, so nothing was measured; see device_count"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    if ranks < 2:
        text = "a collective needs two NeuronCores, and here is one"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    try:
        program = find_tool(ctx.host)
        abilities = learn_abilities(ctx.host, program)
    except HostError as error:
        yield Finding(status=Status.UNKNOWN, reason=error.reason, message=str(error), target="node")
        return
    kind, cores = _device(ctx)
    deep = ctx.tier.rank >= Tier.DEEP.rank
    for step in plan_steps(check, ctx.tier, ranks=ranks, counts=rank_counts(kind, ranks, cores)):
        name = f"{step.op} of {step.ranks} ranks in {step.dtype}"
        left = ctx.params.total_seconds - (time.monotonic() - began)
        if left < _LEAST_SECONDS:
            text = f"{name} was not run: the steps before it took all of {ctx.params.total_seconds:g} s"
            yield Finding(status=Status.UNKNOWN, reason="Timeout", message=text, target="node")
            return
        yield Progress(step=name, event="entered", monotonic_seconds=ctx.host.monotonic_seconds())
        seconds = min(left, ctx.params.step_seconds)
        try:
            ran = run_step(
                ctx.host,
                program,
                step,
                abilities,
                core_ids=core_ids_of(ctx.inventory),
                lnc=lnc_of(ctx.inventory),
                timeout_seconds=seconds,
            )
        except HostError as error:
            yield Finding(status=Status.UNKNOWN, reason=error.reason, message=f"{name}: {error}", target="node")
            return
        yield Progress(step=name, event="left", monotonic_seconds=ctx.host.monotonic_seconds())
        yield from judge_step(
            check,
            ran,
            ctx.limits,
            checked=bool(abilities.check),
            cut_short=seconds < ctx.params.step_seconds,
            deep=deep,
        )
        if ran.returncode is None:
            return  # what hangs once hangs again, and each costs its whole time


def _refused(ctx: Context[Params]) -> Finding | None:
    """Why nothing can be measured here."""
    if ctx.inventory.get("accelerator") != "neuron":
        text = "nccom-test runs on Neuron devices alone"
        return Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
    if not ctx.inventory.get("devices"):
        text = "no Neuron devices were found, so nothing was measured"
        return Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    holders = ctx.inventory.get("holders")
    if holders:
        text = f"the devices are taken: {', '.join(map(str, list(holders)[:4]))}"
        return Finding(status=Status.SKIP, reason="Busy", message=text, target="node")
    return None


def _rank_count(ctx: Context[Params]) -> int | None:
    """All logical cores; None where any device does not say its own and the inventory has no sum."""
    count = ctx.inventory.get("core_count")
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return count
    cores = [device.get("cores") for device in ctx.inventory["devices"]]
    whole = [one for one in cores if isinstance(one, int) and not isinstance(one, bool) and one > 0]
    return sum(whole) if len(whole) == len(cores) else None


def _device(ctx: Context[Params]) -> tuple[str | None, int | None]:
    """Kind and logical cores of one device; of the instance type where the devices do not say their kind."""
    first = ctx.inventory["devices"][0]
    known = find_type(ctx.inventory.get("instance_type"))
    kind = first.get("kind") or (known.chip.name if known else None)
    cores = first.get("cores")
    return kind, cores if isinstance(cores, int) and not isinstance(cores, bool) else None
