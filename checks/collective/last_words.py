"""
What the last words of a rank say of why it failed: pure.

A rank whose peer fails complains in words of its own communicator or device, and mostly before the peer says anything.
So an error is a failure of our own tool only where that is certain, and a rank died by itself only where its words do
not tell of its peers.
"""

from __future__ import annotations

import re

from checks.contract import Missing

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


def ended_by_itself(one: Missing) -> bool:
    """Whether a rank died or failed on its own account; a rank that says that its peer is gone did not."""
    if one.reason == "CheckError" or (one.reason == "Crashed" and one.message.startswith((_ABORTED, _EXITED))):
        said = one.message.lower()
        return not any(words in said for words in _PEER_GONE)
    return one.reason in ("Crashed", "DeviceLost", "InjectedFault", "Garbage", "NoData", "InternalError")


def died(one: Missing) -> bool:
    """Whether the process of a rank was killed: not by who told it to end, nor by a library that gave up for a peer."""
    if one.reason != "Crashed" or one.message.startswith(_EXITED) or was_told_to_end(one):
        return False
    return not (aborted(one) and tells_of_peers(one.message))


def aborted(one: Missing) -> bool:
    """Whether the process of a rank ended itself, as a library does that gives up."""
    return one.reason == "Crashed" and one.message.startswith(_ABORTED)


def was_told_to_end(one: Missing) -> bool:
    """Whether the process of a rank ended by a signal that asks a process to end: no fault of hardware sends one."""
    return one.reason == "Crashed" and _TOLD_TO_END.match(one.message) is not None


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


def tells_of_peers(words: str) -> bool:
    """Whether they are those of a communicator, which fails by the fault of any of its ranks."""
    return _COMMUNICATOR.search(words) is not None


def tells_of_hardware(words: str) -> bool:
    """Whether they are those of a communicator or of a device, so that our own tool is hardly to blame."""
    return tells_of_peers(words) or _DEVICE.search(words) is not None
