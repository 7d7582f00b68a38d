"""Reads all sources of a bundle within a time, and finds in them what names hosts and versions."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from healthd.cli.settings.tree import Settings
from healthd.core.errors import HealthdError

_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s\"'\\]+", re.IGNORECASE)

Source = Callable[[], Any]
"""Gives the content of one file: text, or JSON values."""


def collect(wanted: Mapping[str, Source], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """What could be read in time, and why the rest could not. Tools run one after the other, beside the rest."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    tools = [name for name in wanted if name.startswith("tools/")]
    rows = [[name] for name in wanted if name not in tools] + [tools]

    def read(names: list[str]) -> None:
        for name in names:
            try:
                found[name] = wanted[name]()
            except (OSError, HealthdError, ValueError) as error:
                failed[name] = " ".join(str(error).split()) or type(error).__name__
            except Exception as error:  # noqa: BLE001 - the others are still worth having
                failed[name] = f"internal error: {type(error).__name__}: {error}"

    threads = [threading.Thread(target=read, args=(names,), daemon=True) for names in rows]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = [name for name in wanted if name not in found and name not in failed]
    return dict(found), {**failed, **dict.fromkeys(late, f"was not read within {seconds:g} s")}


def hosts_of(settings: Settings, found: Mapping[str, Any]) -> Iterator[str]:
    """Names of this host and of those it speaks to."""
    from urllib.parse import urlsplit

    from checks.host.machine import Host

    yield socket.gethostname()
    with contextlib.suppress(OSError):
        yield Host(settings.node.host_root).host_name()
    yield settings.node.name
    yield from settings.node.aliases
    # Of the file too, such as the database: not all of it is settings of this command.
    urls = _URL.findall(json.dumps(found.get("settings.json")))
    for url in (*settings.node.sync.aggregators, settings.gate.aggregator, *urls):
        with contextlib.suppress(ValueError):
            yield urlsplit(url).hostname or ""
    state = found.get("state.json")
    if isinstance(state, dict):
        yield str(state.get("node") or "")
        yield from (str(alias) for alias in state.get("aliases") or ())


def versions_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Texts whose dotted numbers are versions."""
    state = found.get("state.json")
    if isinstance(state, dict):
        yield json.dumps(state.get("versions"))
    for name in ("versions.json", "tools/packages-dpkg.txt", "tools/packages-rpm.txt"):
        yield re.sub(r"[-+~_\s]", " ", json.dumps(found.get(name)))
