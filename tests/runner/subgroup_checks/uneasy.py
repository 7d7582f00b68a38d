"""A collective that fails when certain devices take part together, and a probe that fails on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checks.contract import Context, Evidence, Finding, Missing, Progress, Status, check


@dataclass(frozen=True)
class Where:
    """`ends`: it fails in groups that hold all of them. `how` is fail, slow or hang. `pair_seconds`: small groups
    take so long."""

    ends: tuple[str, ...] = ()
    how: str = "fail"
    pair_seconds: float = 0.0


def judge_uneasy(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    if missing:
        yield Finding(status=Status.UNKNOWN, reason="Timeout", message="it did not end", target="node")
        return
    data = evidence[0].data
    if data["how"]:
        reason = "SlowLink" if data["how"] == "slow" else "CollectiveMismatch"
        text = f"uneasy over {len(evidence)} ranks: {data['how']}"
        yield Finding(status=Status.FAIL, reason=reason, message=text, target="node")
        return
    yield Finding(status=Status.PASS, reason=None, message="fine", target="node")


@check(tier="quick", interval_seconds=60, timeout_seconds=60, scope="group", judge=judge_uneasy)
def uneasy(ctx: Context[Where]) -> Iterator[Finding | Evidence | Progress]:
    assert ctx.group is not None
    assert ctx.device is not None
    together = set(ctx.params.ends) <= set(ctx.group.targets)
    yield Progress(step="uneasy", event="entered", monotonic_seconds=time.monotonic())
    if ctx.params.pair_seconds and ctx.group.size < 4:
        time.sleep(ctx.params.pair_seconds)
    if together and ctx.params.how == "hang":
        time.sleep(600)
    data = {"how": ctx.params.how if together else ""}
    yield Evidence(target=f"rank:{ctx.group.rank}", key=ctx.device.key, data=data)


@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="device")
def sick(ctx: Context[Where]) -> Iterator[Finding]:
    assert ctx.device is not None
    target = ctx.device.target
    if target in ctx.params.ends:
        yield Finding(status=Status.FAIL, reason="WrongResult", message="2 and 2 are 5", target=target)
    else:
        yield Finding(status=Status.PASS, reason=None, message="2 and 2 are 4", target=target)
