"""
The node's unit lets the checks see what they need: they run under the system calls and capabilities that it leaves.

systemd-analyze says what the unit's words mean, libseccomp (of systemd's own dependencies) puts it in force.
"""

from __future__ import annotations

import ctypes.util
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.systemd_kit import UNITS, Unit
from tests.patience import PATIENCE

pytestmark = pytest.mark.system("systemd-analyze")

ROOT = Path(__file__).parents[2]
# What checks/host/machine.py asks of the kernel: its log and its clock. glibc makes the one of the other.
CALLS = {"openat", "read", "close", "adjtimex", "clock_adjtime"}
# <linux/capability.h>: those that the unit keeps.
CAPABILITIES = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_IPC_LOCK": 14,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_NICE": 23,
    "CAP_SYSLOG": 34,
}
# Becomes its last arguments, with no more than what stands in the first.
SANDBOX = """
import ctypes, errno, json, os, sys
allowed, dropped = json.loads(sys.argv[1])
kernel, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL(sys.argv[2])
for number in dropped:
    kernel.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP: refused to who is not root and has none
seccomp.seccomp_init.restype = ctypes.c_void_p
state = ctypes.c_void_p(seccomp.seccomp_init(0x00050000 | errno.EPERM))
for name in allowed:
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:  # others are of other machines
        assert seccomp.seccomp_rule_add(state, 0x7FFF0000, number, 0) == 0, name
assert seccomp.seccomp_load(state) == 0
os.execv(sys.argv[3], sys.argv[3:])
"""


@functools.cache
def sets() -> dict[str, list[str]]:
    """systemd's sets of system calls, `@set` -> its members, which may be sets."""
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter"], capture_output=True, text=True, timeout=30 * PATIENCE, check=True
    )
    found: dict[str, list[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        word = line.strip()
        if line.startswith("@"):
            name = word
            found[name] = []
        elif line.startswith(" ") and not word.startswith("#"):
            found[name].append(word)
        elif not word:
            name = ""
    return found


def expanded(words: set[str]) -> set[str]:
    """The system calls behind words of SystemCallFilter=."""
    calls: set[str] = set()
    for word in words:
        assert not word.startswith("~"), "this test knows lists of what is allowed"
        calls |= expanded(set(sets()[word])) if word.startswith("@") else {word}
    return calls


def allowed() -> set[str]:
    return expanded(Unit(UNITS[0]).words("SystemCallFilter", "Service"))


def test_unit_allows_what_the_checks_ask_of_the_kernel() -> None:
    assert allowed() >= CALLS
    assert not {"settimeofday", "clock_settime", "mount", "reboot", "init_module", "ptrace"} & allowed()


def sandbox(*drop_ins: str) -> list[str]:
    """The beginning of a command line: what follows runs with what the unit leaves, and its drop-ins add."""
    words = [Unit(name).words("CapabilityBoundingSet", "Service") for name in (UNITS[0], *drop_ins)]
    kept = {CAPABILITIES[name] for name in set().union(*words)}
    told = json.dumps([sorted(allowed()), [number for number in range(64) if number not in kept]])
    return [sys.executable, "-c", SANDBOX, told, ctypes.util.find_library("seccomp") or "libseccomp.so.2"]


def checked(folder: Path, *, sandboxed: bool) -> set[tuple[str, str, str]]:
    """Check, reason and message of what the passive checks were not allowed to see."""
    own = {"HEALTHD_NODE_RUN_DIR": str(folder / "run"), "HEALTHD_NODE_STATE_DIR": str(folder / "state")}
    line = [sys.executable, "-m", "healthd", "check", "--tier", "passive", "--json"]
    if sandboxed:
        line = [*sandbox(), *line]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHD_")}
    done = subprocess.run(
        line, env={**environment, **own}, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    assert done.stdout, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    assert {"clock", "kernel_log", "processes", "device_holders", "mounts"} <= {one["check"] for one in results}
    return {
        (one["check"], str(finding["reason"]), finding["message"])
        for one in results
        for finding in one["findings"]
        if finding["reason"] in ("NoPermission", "CheckError", "Crashed", "StartFailed", "Timeout")
    }


def test_passive_checks_see_as_much_in_the_unit_as_outside(tmp_path: Path) -> None:
    """A refused call is NoPermission and the node unknown, however healthy: no gate would ever admit it."""
    outside = {(check, reason) for check, reason, _ in checked(tmp_path, sandboxed=False)}
    refused = [one for one in checked(tmp_path, sandboxed=True) if one[:2] not in outside]
    assert refused == []


@pytest.mark.system("systemd-analyze", root=True)
@pytest.mark.parametrize(("drop_ins", "fault"), [((), "install store-user.conf"), (("store-user.conf",), None)])
def test_store_is_looked_at_as_the_user_of_the_jobs_with_the_drop_in_for_it(
    drop_ins: tuple[str, ...], fault: str | None, tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest-" in str(folder):
            folder.chmod(0o755)
    order = {"kind": "look", "user": "nobody", "root": str(tmp_path), "writable": False}
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from checks.stores.program import main; main(sys.argv[1])"
    line = [*sandbox(*drop_ins), sys.executable, "-I", "-c", code, json.dumps(order)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    said = [json.loads(text) for text in done.stdout.splitlines()]
    faults = [one["message"] for one in said if "fault" in one]
    assert len(faults) == (fault is not None), done.stderr
    assert fault is None or fault in faults[0]
    assert any(one.get("reading") == "store_answer_seconds" for one in said) is (fault is None)
