"""
The program of the child process: one order, given as JSON, and a report as JSON lines.

It may hang in the kernel for as long as a store does; whoever started it kills it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from checks.host.guard import STORE_NAME
from checks.json_text import parse_json
from checks.stores.operations import Store, StoreFault, explain, is_url, open_store
from checks.stores.report import Report

_PR_SET_NAME = 15


def main(argument: str) -> None:
    """Do what the order says: `kind`, `root`, and the members that its kind needs."""
    order = parse_json(argument)
    # So that nobody waits for this process, should the kernel not let go of it: see `checks.host.guard`.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, STORE_NAME.encode(), 0, 0, 0)
    report = Report()
    try:
        from checks.stores.operations import require_mount

        work = _work(order["kind"])  # imported before the user changes, who may not read healthd's own files
        if order.get("user"):
            become(order["user"])
        root = order["root"]
        if not is_url(root):
            report.step("look at the mount")
            require_mount(root, order.get("file_systems", ()))
        elif order["kind"] == "look":
            text = "store_access needs a directory; give a URL to checkpoint_store or data_store"
            raise StoreFault("CheckError", text)
        report.step("open the store")
        work(open_store(root), order, report)
    except Exception as error:  # noqa: BLE001  whatever a store or its library raises is a fault of the store
        report.fault(*explain(error, report.current, order["root"]))
    report.done()
    sys.stdout.flush()
    os._exit(0)  # threads of a library must not hold what is done


def _work(kind: str) -> Callable[[Store, Mapping[str, Any], Report], None]:
    if kind == "write":
        import checks.stores.probes
        from checks.stores.probes import probe

        return probe
    if kind == "checkpoint":
        import checks.stores.checkpoint  # noqa: F401
        from checks.stores.checkpoint import inspect

        return inspect
    if kind == "read":
        from checks.stores.probes import measure

        return measure
    if kind == "look":
        from checks.stores.probes import look

        return look
    raise ValueError(f"no such work: {kind}")


def become(user: str) -> None:
    """Act as another user, with its groups: what root may do says nothing of what the job may."""
    import pwd

    try:
        found = pwd.getpwnam(user) if not user.isdecimal() else pwd.getpwuid(int(user))
    except KeyError:
        raise StoreFault("CheckError", f"no such user: {user}; correct the parameter user") from None
    if found.pw_uid == os.geteuid():
        return
    try:
        os.initgroups(found.pw_name, found.pw_gid)
        os.setgid(found.pw_gid)
        os.setuid(found.pw_uid)
    except PermissionError:
        text = f"cannot act as {user}: run the daemon as root; with systemd, install store-user.conf beside its unit"
        raise StoreFault("CheckError", text) from None
