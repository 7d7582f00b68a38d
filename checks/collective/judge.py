"""
Which rank is at fault in a collective, from the evidence of all ranks. Pure, for every collective.

The one rule: ranks that waited for a culprit are not accused. If the culprit cannot be determined, no rank is accused,
and the result is unknown.

Also here:

- what the last words of a rank say of why it failed: pure.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from checks.collective.ranks import bus_factor, judge_bandwidth, limit_of
from checks.contract import Evidence, Finding, Missing, Progress, Status
from checks.limits import quantity
from checks.printable import some

# What torch.distributed and gloo (2.13, over TCP) say in a rank whose peer went away, never came, or cannot be reached:
# such a rank is a victim. "Connection closed by peer", "Read error ...: Connection reset by peer", "Timed out waiting
# 6000ms for recv operation", "wait timeout after 6000ms", "The client socket has timed out", "Connect timeout", "Failed
# to recv, got 0 bytes. Connection was likely closed".
_PEER_GONE = (
    "by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "pair closure",
    "clients joined",
    "peer is gone",
    "connection refused",
    "no route to host",
    "host is unreachable",
    "network is unreachable",
    "connectfullmesh failed",
    "connection was likely closed",
    "peer closed the connection",
    "failed to connect",
    # NCCL (2.2x), after which torch's watchdog ends the process with SIGABRT.
    "remote process exited",
    "ncclremoteerror",
)
# Words of a communicator, and of a device: the rank may be at fault, or a peer.
_COMMUNICATOR = re.compile(r"nccl|Dist(?:Backend|Network|Store)?Error|\bNET/|\bofi\b|gloo|\bnccom\b", re.IGNORECASE)
_DEVICE = re.compile(r"CUDA error|cuda failure|cudaError|\bnrt_|\bNERR", re.IGNORECASE)
# Python's errors for a program that is wrong, or lacks a file, a permission or memory; no communicator raises them.
_OWN = re.compile(
    r"(?:^|in the middle: )(?:\w+\.)*(?:ImportError|ModuleNotFoundError|FileNotFoundError|PermissionError|MemoryError"
    r"|OutOfMemoryError|NameError|UnboundLocalError|AttributeError|KeyError|IndexError|TypeError|SyntaxError)\b"
)
# Reasons that say of themselves that our own tool failed.
_OUR_REASONS = ("Garbage", "NoData", "InternalError", "MissingTool", "NoPermission", "CannotAllocate")
# Of a process that ended itself, as a program does that fails; one that a fault of the machine ends is killed.
_EXITED = "exited with code"
_ABORTED = "killed by SIGABRT"  # by itself, where a library gives up
# Somebody has told the rank, or its guard, to end, as the end of a job may tell all of its processes.
_TOLD_TO_END = re.compile(r"killed by SIG(?:TERM|INT|HUP|QUIT)\b|exited with code 143\b")

# Steps of coming together, see `checks.collective.ranks`: it takes all ranks, to the end.
_MEETING = "rendezvous"
# Reasons that say that the rank was never at work, so that the others waited in vain.
_NOT_STARTED = (
    "MissingDevice",
    "Busy",
    "StartFailed",
    "ColdCache",
    "CompileFailed",
    "MissingTool",
    "NoPermission",
    "CannotAllocate",
)


def judge_ranks(name: str, evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    """Findings of one collective: whose fault missing ranks are, wrong values, and the speed when all are here."""
    ranks, gone = present_and_gone(evidence, missing)
    if gone:
        yield from judge_missing(name, ranks, gone)
    yield from _judge_values(name, ranks)
    if ranks and not gone:
        yield from _judge_speed(name, ranks)


def present_and_gone(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> tuple[list[Evidence], list[Missing]]:
    """The ranks that gave evidence, in their order, and all others of the group."""
    ranks = sorted(evidence, key=lambda item: int(item.data["rank"]))
    expected = max((int(item.data["ranks"]) for item in ranks), default=0)
    heard = {item.target for item in ranks} | {item.target for item in missing}
    silent = [
        Missing(target=target, reason="NoData", message="it ended without evidence")
        for target in (f"rank:{rank}" for rank in range(expected))
        if target not in heard
    ]
    return ranks, [*missing, *silent]


def judge_missing(name: str, present: Sequence[Evidence], gone: Sequence[Missing]) -> Iterator[Finding]:
    """The culprits among the missing, by the strongest sign there is."""
    devices = _devices(present)
    absent = [one for one in gone if one.reason in _NOT_STARTED]
    # Where somebody ended a rank at work, a library of others may have given up for that.
    told = any(was_told_to_end(one) or (one.reason == "CannotAllocate" and one.progress) for one in gone)
    own = [one for one in gone if not (told and aborted(one))]
    # Others may fail for what is missing; nothing kills a rank or breaks a device for that.
    broken = sorted((one for one in own if died(one) or one.reason == "DeviceLost"), key=_order)[:1]
    for one in absent:
        # That a device is not there is the node's fault; of the others we just do not know.
        status = Status.FAIL if one.reason == "MissingDevice" else Status.UNKNOWN
        text = f"{_named(one.target, devices)} could not take part in {name}: {one.message}"
        yield _finding(status, one.reason, text, one.target, gone, [*absent, *broken])
    if absent:
        for one in broken:
            yield _first_to_end(name, one, [other for other in gone if other not in absent], devices)
        return
    ended = sorted((one for one in own if ended_by_itself(one)), key=_order)
    ended = ended or [one for one in own if was_told_to_end(one)]
    if ended:
        yield _first_to_end(name, ended[0], gone, devices)
        return
    unheard = [one for one in gone if not one.progress]
    if unheard and (present or len(unheard) < len(gone)):
        for one in unheard:
            text = f"{_named(one.target, devices)} never joined {name}"
            yield _finding(Status.FAIL, "RankAbsent", text, one.target, gone, unheard)
        return
    yield from _judge_stuck(name, present, gone, devices)


def died(one: Missing) -> bool:
    """Whether the process of a rank was killed: not by who told it to end, nor by a library that gave up for a peer."""
    if one.reason != "Crashed" or one.message.startswith(_EXITED) or was_told_to_end(one):
        return False
    return not (aborted(one) and tells_of_peers(one.message))


def aborted(one: Missing) -> bool:
    """Whether the process of a rank ended itself, as a library does that gives up."""
    return one.reason == "Crashed" and one.message.startswith(_ABORTED)


def is_own_failure(one: Missing) -> bool:
    """Whether it is certain that our own tool failed in the rank, or was ended: that says nothing of any node."""
    if one.reason in _OUR_REASONS or was_told_to_end(one):
        return True
    if one.reason != "CheckError" and not (one.reason == "Crashed" and one.message.startswith(_EXITED)):
        return False
    if not ended_by_itself(one) or tells_of_hardware(one.message):
        return False
    # A rank that had not begun to look for the others cannot have failed because of them.
    return not one.progress or _OWN.search(one.message) is not None


def was_told_to_end(one: Missing) -> bool:
    """Whether the process of a rank ended by a signal that asks a process to end: no fault of hardware sends one."""
    return one.reason == "Crashed" and _TOLD_TO_END.match(one.message) is not None


def tells_of_hardware(words: str) -> bool:
    """Whether they are those of a communicator or of a device, so that our own tool is hardly to blame."""
    return tells_of_peers(words) or _DEVICE.search(words) is not None


def tells_of_peers(words: str) -> bool:
    """Whether they are those of a communicator, which fails by the fault of any of its ranks."""
    return _COMMUNICATOR.search(words) is not None


def gave_out(one: Missing) -> bool:
    """Whether the others waited for a rank because it was not started, or ended by itself."""
    return one.reason in _NOT_STARTED or ended_by_itself(one)


def ended_by_itself(one: Missing) -> bool:
    """Whether a rank died or failed on its own account; a rank that says that its peer is gone did not."""
    if one.reason == "CheckError" or (one.reason == "Crashed" and one.message.startswith((_ABORTED, _EXITED))):
        said = one.message.lower()
        return not any(words in said for words in _PEER_GONE)
    return one.reason in ("Crashed", "DeviceLost", "InjectedFault", "Garbage", "NoData", "InternalError")


def _order(one: Missing) -> tuple[int, bool, int]:
    """
    The first to die first; then a failure of our own tool, for which others may complain; then other errors, which may
    come from a peer. Of each, who was ended by others comes last.
    """
    rank = 0 if died(one) or one.reason == "DeviceLost" else 1 if is_own_failure(one) else 2
    return (rank, one.order is None, one.order or 0)


def _first_to_end(name: str, first: Missing, gone: Sequence[Missing], devices: Mapping[str, str]) -> Finding:
    """The first to die is the culprit, whatever the others died of. An error accuses no node."""
    who, where = _named(first.target, devices), _where(first)
    if died(first):
        text = f"{who} died {where} of {name}: {first.message}"
        return _finding(Status.FAIL, "RankDied", text, first.target, gone, [first])
    text = f"{who} failed {where} of {name}: {first.message}"
    if first.reason in ("DeviceLost", "InjectedFault"):
        return _finding(Status.FAIL, first.reason, text, first.target, gone, [first])
    return _finding(Status.UNKNOWN, first.reason, text, first.target, gone, [first])


def _judge_stuck(
    name: str, present: Sequence[Evidence], gone: Sequence[Missing], devices: Mapping[str, str]
) -> Iterator[Finding]:
    """
    Nobody died and everybody came: who is behind the others?

    Every rank passes the same events. A rank that has left one operation and not entered the next, which others have,
    was kept by nobody: it hangs. A rank inside an operation may wait for another, so it is accused only if it is alone
    behind. Inside the rendezvous not even then: one that is through serves the others still, and when it stops (the
    main rank above all, whose store they read) it is ahead of its victims.
    """
    least = min(len(one.progress) for one in gone)
    behind = [one for one in gone if len(one.progress) == least]
    ahead = max((one.progress for one in gone), key=len)
    last = behind[0].progress[-1] if least else None
    if len(behind) == len(gone) and not present:
        at = f"all are at {_event(last)}" if last else "no rank reported"
        text = f"{name} did not finish, and no rank stands out: {at}"
        yield Finding(status=Status.UNKNOWN, reason="Timeout", message=text, target="node")
        return
    inside = last is not None and last.event != "left"
    meeting = last is not None and inside and last.step.partition("/")[0] == _MEETING
    if meeting or (len(behind) > 1 and (last is None or inside)):
        names = ", ".join(_named(one.target, devices) for one in behind)
        who = f"one of {names}" if len(behind) > 1 else names
        text = f"{name} did not finish: the others went on from {_event(last)}, but {who} did not"
        if meeting:
            text += "; it may be at fault itself, or waiting for a rank that is"
        yield Finding(status=Status.UNKNOWN, reason="Timeout", message=text, target="node")
        return
    for one in behind:
        if last is None:
            what = f"did not join {name}"
        elif last.event != "left":
            what = f"did not leave {last.step}"
        elif len(ahead) > least:
            what = f"did not enter {ahead[least].step}"
        else:
            what = f"did not go on after {last.step}"
        text = f"{_named(one.target, devices)} hangs: unlike the others, it {what}"
        yield _finding(Status.FAIL, "RankHung", text, one.target, gone, behind)


def _finding(
    status: Status, reason: str, text: str, target: str, gone: Sequence[Missing], culprits: Sequence[Missing]
) -> Finding:
    """A finding about a culprit, which mentions its victims."""
    victims = sorted(one.target for one in gone if one not in culprits)
    if victims:
        text += f" (waiting for it: {some(victims)})"
    return Finding(status=status, reason=reason, message=text, target=target)


def _where(one: Missing) -> str:
    if not one.progress:
        return "before it joined the ranks"
    last = one.progress[-1]
    return {"joined": "while joining the ranks", "entered": f"in {last.step}"}.get(last.event, f"after {last.step}")


def _event(progress: Progress | None) -> str:
    return f"{progress.step} ({progress.event})" if progress else "the start"


def _devices(present: Sequence[Evidence]) -> dict[str, str]:
    """Rank target -> device target, as far as a rank that is here told."""
    targets = present[0].data["targets"] if present else ()
    return {f"rank:{rank}": str(target) for rank, target in enumerate(targets)}


def _named(target: str, devices: Mapping[str, str]) -> str:
    return f"{target} ({devices[target]})" if target in devices else target


def _sizes(ranks: Sequence[Evidence]) -> Iterator[tuple[int, dict[int, Mapping[str, Any]]]]:
    """(size_bytes, rank -> what it measured), in the order of the sizes."""
    by_size: dict[int, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for item in ranks:
        for size in item.data["sizes"]:
            by_size[int(size["size_bytes"])][int(item.data["rank"])] = size
    yield from sorted(by_size.items())


def _judge_values(name: str, ranks: Sequence[Evidence]) -> Iterator[Finding]:
    devices = _devices(ranks)
    for size_bytes, measured in _sizes(ranks):
        wrong = {rank: size for rank, size in measured.items() if size["mismatches"]}
        if not wrong:
            continue
        what = f"{name} of {size_bytes} bytes"
        senders = _senders(wrong, len(measured))
        for source, count in sorted(senders.items()):
            target = f"rank:{source}"
            text = f"{what}: {count} of {len(measured)} ranks got wrong values from {_named(target, devices)}"
            yield Finding(status=Status.FAIL, reason="CollectiveMismatch", message=text, target=target)
        holders = {r: s for r, s in wrong.items() if not s["sources"] or set(map(int, s["sources"])) - senders.keys()}
        if len(holders) == len(measured) and not any(size["sources"] for size in holders.values()):
            names = ", ".join(_named(f"rank:{rank}", devices) for rank in sorted(holders))
            text = f"{what}: all ranks hold wrong values contributed by one of {names}: {_first(holders)}"
            yield Finding(status=Status.FAIL, reason="CollectiveMismatch", message=text, target="node")
            continue
        for rank, size in sorted(holders.items()):
            target = f"rank:{rank}"
            share = ", ".join(f"rank:{source}" for source in size["sources"])
            text = f"{what}: {_named(target, devices)} holds {size['mismatches']} wrong values"
            text += f" in the share of {share}" if share else ""
            text += f": {size['first']}"
            yield Finding(status=Status.FAIL, reason="CollectiveMismatch", message=text, target=target)


def _senders(wrong: Mapping[int, Mapping[str, Any]], ranks: int) -> dict[int, int]:
    """Ranks whose share several, and most, ranks got wrong -> how many: it was sent so, the receivers are victims."""
    receivers: dict[int, int] = defaultdict(int)
    for size in wrong.values():
        for source in size["sources"]:
            receivers[int(source)] += 1
    return {source: count for source, count in receivers.items() if count > 1 and 2 * count > ranks}


def _first(holders: Mapping[int, Mapping[str, Any]]) -> str:
    return str(holders[min(holders)]["first"])


def _judge_speed(name: str, ranks: Sequence[Evidence]) -> Iterator[Finding]:
    """One finding a size: the slowest rank's time, and the bandwidths by the definitions of nccl-tests."""
    count = len(ranks)
    for size_bytes, measured in _sizes(ranks):
        times = [float(one["seconds"]) for one in measured.values()]
        seconds = max(times)
        size = next(iter(measured.values()))
        found = judge_bandwidth(
            name,
            f"{name} of {size_bytes} bytes over {count} ranks",
            int(size["bytes"]),
            seconds,
            factor=bus_factor(name, count),
            limit=functools.partial(limit_of, size),
            labels={"size_bytes": str(size_bytes)},
        )
        exact = not any(one["mismatches"] for one in measured.values())
        # No rank is named: the longest time belongs to a rank that waited for another, not to the late one.
        span = " to ".join(quantity("duration_seconds", value) for value in (min(times), seconds))
        text = f"{found.message}; ranks took {span}"
        yield dataclasses.replace(found, message=text + (", every element exact" if exact else ""))
