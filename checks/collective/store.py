"""Where the ranks of several nodes find each other: a key-value store of torch on the main node, over TCP."""

from __future__ import annotations

import datetime
import time
from typing import Any
from urllib.parse import urlsplit

from checks.contract import Group

_IN_USE = ("eaddrinuse", "address already in use", "errno: 98")
_KNOWN_SECONDS = 0.5  # rank 0 says which group it is as soon as it listens


def open_store(distributed: Any, group: Group) -> Any:
    """
    The store of a rendezvous `tcp://HOST:PORT?group=ID` (an IPv6 address in brackets); rank 0 serves it.

    It returns as soon as this rank has reached the main node, and waits for no other rank. A store of another group
    that has the port, such as the one before, is left alone. Raises RuntimeError in one line.
    """
    url = urlsplit(group.rendezvous)
    if url.hostname is None or url.port is None:
        raise RuntimeError(f"{group.rendezvous}: no rendezvous; it is written tcp://ADDRESS:PORT?group=ID")
    key = f"healthd/{url.query}"
    deadline = time.monotonic() + group.timeout_seconds
    while True:
        store = _store(distributed, group, url.hostname, url.port, deadline)
        if group.rank == 0:
            store.set(key, "here")
            return store
        try:
            store.wait([key], datetime.timedelta(seconds=_KNOWN_SECONDS))
        except RuntimeError:  # torch has errors of its own for the network and its stores; all are RuntimeError
            if time.monotonic() > deadline:
                text = f"{url.hostname} port {url.port} belongs to another group; peers timed out"
                raise RuntimeError(text) from None
        else:
            return store


def _store(distributed: Any, group: Group, host: str, port: int, deadline: float) -> Any:
    seconds = max(0.1, deadline - time.monotonic())
    try:
        return distributed.TCPStore(
            host,
            port,
            group.size,
            group.rank == 0,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if any(words in str(error).lower() for words in _IN_USE):
            raise RuntimeError(f"port {port} is in use on this node; the group needs another") from None
        raise
