"""Compares the digests of training steps over devices of one key. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from checks.contract import Evidence, Finding, Measurement, Missing, Status
from checks.training.places import describe

AFTER = "after"
"""`after/200` is the digest of all parameters after 200 steps; the other digests are of places of the first step."""


RARE = 10_000
"""A pass says how probably it would have missed a fault that strikes one step in so many."""


def missed_ratio(repeats: int, one_in: int) -> float:
    """The probability that none of so many repeats was hit by a fault that strikes one step in `one_in`."""
    return (1.0 - 1.0 / one_in) ** repeats


def judge_steps(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    """
    Say which devices differ, where first, and pass those that agree with the others of their kind.

    Each item is the step of one dtype on one device. A device whose own repeats differ has failed already and has no
    vote. For a device that gave no evidence the runner speaks; here it is a peer less, which a pass says.
    """
    groups: dict[str, list[Evidence]] = defaultdict(list)
    unstable = {item.target for item in evidence if not item.data["stable"]}
    for item in sorted(evidence, key=lambda item: item.target):
        if item.data["stable"]:
            groups[item.key].append(item)
    absent = ", ".join(sorted(gone.target for gone in missing))
    said = f" (nothing from {absent})" if absent else ""
    wrong: set[str] = set()
    for key in sorted(groups):
        for finding in _judge_group(groups[key], said):
            wrong.add(finding.target)
            yield finding
    for target in sorted({item.target for item in evidence} - unstable - wrong):
        own = [item for group in groups.values() for item in group if item.target == target]
        yield _pass(own, min(len(groups[item.key]) - 1 for item in own), said)


def _judge_group(devices: Sequence[Evidence], absent: str) -> Iterator[Finding]:
    """Findings on devices of one key, by majority; without a strict majority nobody can tell who is right."""
    votes = Counter(_table(device) for device in devices)
    if len(votes) == 1:
        return
    right, count = votes.most_common(1)[0]
    decided = 2 * count > len(devices)
    names = ", ".join(device.target for device in devices)
    for device in devices:
        dtype = device.data["dtype"]
        if decided and _table(device) != right:
            place, step = first_difference(dict(right), device.data["digests"])
            text = f"{dtype} {step}: {place} has other bits than on the {count} others of its kind{absent}"
            yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=device.target)
        elif not decided:
            other = next(one for one in devices if _table(one) != _table(device))
            place, step = first_difference(other.data["digests"], device.data["digests"])
            text = (
                f"{dtype} {step}: {place} differs between devices and no majority can say which is wrong: "
                f"one of {names}{absent}"
            )
            yield Finding(status=Status.FAIL, reason="DigestMismatch", message=text, target=device.target)


def first_difference(right: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str]:
    """The first place, in words, at which digests differ, and the step; `other` is in the order of computation."""
    for name, value in other.items():
        if right.get(name) != value:
            after, _, step = name.partition("/")
            return ("a parameter", f"after step {step}") if after == AFTER else (describe(name), "step 1")
    return ("a value that the other does not have", "step 1")


def _pass(own: Sequence[Evidence], peers: int, absent: str) -> Finding:
    repeats = min(int(item.data["repeats"]) for item in own)
    left_out = sorted({name for item in own for name in item.data["left_out"]})
    count = len(own[0].data["digests"])
    compared = f"as on {peers} other{'s' if peers > 1 else ''} of its kind" if peers else "no other to compare with"
    dtypes = ", ".join(str(item.data["dtype"]) for item in own)
    text = f"all {count} digests of a step are the same in {repeats} repeats ({dtypes}), {compared}{absent}"
    missed = missed_ratio(repeats, RARE)
    text += f"; a fault of one step in {RARE:,} would have been missed with {_percent(missed)}"
    if left_out:
        text += f"; left out, because the device does not repeat them: {', '.join(left_out)}"
    return Finding(
        status=Status.PASS,
        reason=None,
        message=text,
        target=own[0].target,
        measurements=(
            _number("train_step_repeats_count", repeats),
            _number("train_step_peers_count", peers),
            _number("train_step_missed_ratio", missed, one_in=str(RARE)),
        ),
    )


def _percent(ratio: float) -> str:
    """With as many digits as tell it from certainty: 99.97 %, 5 %, 0.005 %."""
    return f"{100 * ratio:.2f} %" if ratio > 0.99 else f"{100 * ratio:.2g} %"


def _number(name: str, value: float, **labels: str) -> Measurement:
    return Measurement(name=name, value=float(value), lower=None, upper=None, origin="none", labels=labels)


def _table(device: Evidence) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(device.data["digests"].items()))
