"""
What one node wrote, every other sees whole: each node leaves one small marker, and reads those of its peers.

A marker says when its node wrote it, by that node's clock. So what this can tell is: at some moment since the peer's
marker was written, and at the latest now, it has become visible here. That a peer's marker is not here, or is old, may
also mean that the peer has not run the check; so nodes are missed only where `peers` names them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from checks.json_text import parse_json
from checks.printable import some
from checks.stores.errors import StoreFault
from checks.stores.operations import FileStore, Store
from checks.stores.report import Report

FOLDER = ".healthd-markers"
PAYLOAD_BYTES = 64 << 10  # more than a page, so that a part can be missing
_POLL_SECONDS = 0.2
_MOST_MARKERS = 1024


def exchange(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    Replace this node's marker, then read those of its peers until all are there or the time is up.

    `order`: node, peers, marker_seconds (older ones are not looked at), wait_seconds.
    """
    node = order["node"]
    report.step("write a marker for other nodes")
    _write(store, node)
    report.step("read the markers of other nodes")
    deadline = time.monotonic() + float(order["wait_seconds"])
    wanted = set(order["peers"]) - {node}
    while True:
        whole, torn = _read(store, node, wanted, float(order["marker_seconds"]))
        missing = wanted - whole
        if (not missing and not torn) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for name in sorted(torn):
        report.fault("StoreNotShared", f"the marker of {name} is not whole here: {torn[name]}")
    missing -= torn.keys()
    if missing:
        seconds = float(order["marker_seconds"])
        report.fault(
            "StoreNotShared", f"no marker younger than {seconds:g} s is to be seen here of {some(sorted(missing), 8)}"
        )
    report.reading("checkpoint_peers_count", float(len(whole)))


def _write(store: Store, node: str) -> None:
    payload = os.urandom(PAYLOAD_BYTES)
    digest = hashlib.blake2b(payload, digest_size=16).hexdigest()
    head = json.dumps({"node": node, "written_at": time.time(), "bytes": len(payload), "digest": digest}).encode()
    with suppress(FileExistsError):
        store.make_folder(FOLDER)
    if isinstance(store, FileStore) and os.path.islink(os.path.join(store.root, FOLDER)):
        raise StoreFault(
            "StoreNoPermission", f"{FOLDER} is a link to elsewhere, and nothing is written there; remove it"
        )
    part = f"{FOLDER}/{node}.{os.urandom(4).hex()}.part"
    try:
        store.write(part, iter((head + b"\n", payload)))
        store.rename(part, f"{FOLDER}/{node}")
    except BaseException:
        with suppress(Exception):
            store.remove(part)
        raise


def _read(store: Store, node: str, wanted: Collection[str], seconds: float) -> tuple[set[str], dict[str, str]]:
    """
    The nodes with a marker that is young and whole, and those whose marker is not whole, with what is wrong.

    Markers that are wanted are all read, of others as many as the bound leaves.
    """
    whole: set[str] = set()
    torn: dict[str, str] = {}
    # What begins with a dot is the file system's own, such as NFS's name for a marker that was replaced while open.
    there = [name for name in store.sizes(FOLDER) if name != node and not name.startswith(".")]
    there = [name for name in there if name and not name.endswith(".part")]
    most = max(_MOST_MARKERS, len(wanted))
    for name in sorted(there, key=lambda name: (name not in wanted, name))[:most]:
        try:
            content = b"".join(store.read(f"{FOLDER}/{name}", 0, PAYLOAD_BYTES + 4096))
        except OSError as error:
            torn[name] = str(error)
            continue
        found = _judge(content)
        if isinstance(found, str):
            torn[name] = found
        elif time.time() - found < seconds:
            whole.add(name)
    return whole, torn


def _judge(content: bytes) -> float | str:
    """When a marker was written, or what is wrong with it."""
    head, _, payload = content.partition(b"\n")
    try:
        said = parse_json(head)
        written_at, size, digest = float(said["written_at"]), int(said["bytes"]), str(said["digest"])
    except (ValueError, KeyError, TypeError):
        return f"its {len(content)} bytes begin with nothing that a node writes"
    if len(payload) != size:
        return f"{len(payload)} of {size} bytes"
    if hashlib.blake2b(payload, digest_size=16).hexdigest() != digest:
        return "its bytes are not those that were written"
    return written_at
