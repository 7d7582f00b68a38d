"""
Judging a number: text, number and status from one call, so that they cannot disagree.

Not finite or absent is never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from checks.contract import NO_LIMIT, Action, Blame, Finding, Limit, Measurement, Status

_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = (
    ("_flops_per_second", "FLOP/s"),
    ("_bytes_per_second", "B/s"),
    ("_bytes", "B"),
    ("_seconds", "s"),
    ("_ratio", ""),
    ("_count", ""),
)


def unit(name: str) -> str:
    """The unit that a measurement's name ends in, as people write it; empty for counts and ratios."""
    return next((text for suffix, text in _UNITS if name.endswith(suffix)), "")


def quantity(name: str, value: float | None) -> str:
    """A value for people, in decimal prefixes: `12.3 GB/s`, `1.5 ms`, `87 %`, `none`."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return str(value)
    if name.endswith("_ratio"):
        return f"{100 * value:.4g} %"
    text = unit(name)
    if text == "s":
        for scale, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "u")):
            if abs(value) >= scale or scale == 1e-6 or value == 0:
                return f"{value / scale:.4g} {prefix}s"
    if text:
        for scale, prefix in _DECIMAL:
            if abs(value) >= scale:
                return f"{value / scale:.3g} {prefix}{text}"
    return f"{value:.6g} {text}".rstrip()


def within(
    value: float | None,
    *,
    name: str,
    target: str,
    limit: Limit = NO_LIMIT,
    reason: str,
    subject: str,
    outside: Status = Status.FAIL,
    labels: Mapping[str, str] | None = None,
    blame: Blame | None = None,
    action: Action | None = None,
) -> Finding:
    """
    Judge one number against its limit.

    `subject` begins the message ("free memory"); `reason` and `outside` are used when the value is out of its limit.
    A value that is not finite fails with `reason`; None, or a limit that is no number, is unknown (`NoData`). Without a
    limit the number is shown unjudged and passes: it was measured, and its correctness is judged elsewhere.
    """
    measured = Measurement(
        name=name, value=value, lower=limit.lower, upper=limit.upper, origin=limit.origin, labels=dict(labels or {})
    )
    status, why, text = Status.PASS, None, f"{subject} {quantity(name, value)}"
    if value is None:
        status, why, text = Status.UNKNOWN, "NoData", f"{subject}: no reading"
    elif not math.isfinite(value):
        status, why, text = Status.FAIL, reason, f"{subject} is {value}, not a number to trust"
    elif any(bound is not None and math.isnan(bound) for bound in (limit.lower, limit.upper)):
        status, why = Status.UNKNOWN, "NoData"
        text += f": its limit from {limit.origin} is no number; correct it"
    elif limit.lower is not None and value < limit.lower:
        status, why = outside, reason
        text += f" is below {quantity(name, limit.lower)} (limit from {limit.origin})"
    elif limit.upper is not None and value > limit.upper:
        status, why = outside, reason
        text += f" is above {quantity(name, limit.upper)} (limit from {limit.origin})"
    # A value that is not finite has no place in JSON; the message keeps it.
    if value is not None and not math.isfinite(value):
        measured = Measurement(
            name=name, value=None, lower=limit.lower, upper=limit.upper, origin=limit.origin, labels=dict(labels or {})
        )
    return Finding(
        status=status,
        reason=why,
        message=text,
        target=target,
        measurements=(measured,),
        blame=blame if why else None,
        action=action if why else None,
    )
