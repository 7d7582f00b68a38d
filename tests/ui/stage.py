"""
What the tests of the page share: an aggregator in a thread of its own with nodes that speak sync, and a real browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from healthd.aggregator.identity.tokens import Scope, new_token
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from tests.aggregator.api_kit import Daemon

CHROMIUM = "/usr/bin/chromium"
POLICY = Policy(
    collective=False, tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, silent_seconds=3600.0, wait_seconds=60.0
)

T = TypeVar("T")


class Stage:
    """A running aggregator. `say` makes a node report; what it said before stays unless it is changed."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
        self.url = f"http://{address}"
        self._loop, self._client = loop, client
        self.nodes: dict[str, Daemon] = {}

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the aggregator's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def say(self, *names: str, **changes: Any) -> None:
        """These nodes report, twice where they are new, so that they are confirmed."""
        self.do(self._say(names, changes))

    async def _say(self, names: tuple[str, ...], changes: dict[str, Any]) -> None:
        for name in names:
            daemon = self.nodes.get(name)
            if daemon is None:
                daemon = self.nodes[name] = Daemon(self._client, name, **changes)
                await daemon.sync()
            daemon.changes.update(changes)
            await daemon.sync()

    def http(self, **more: Any) -> httpx.Client:
        """A client that follows nothing by itself."""
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=20, **more)


@contextlib.contextmanager
def stage(folder: Path, *, policy: Policy = POLICY, sync_token: str = "", **settings: Any) -> Iterator[Stage]:
    """An aggregator from entry to exit."""
    ready, found = threading.Event(), list[Any]()
    chosen = AggregatorSettings(**({"listen": "127.0.0.1:0", "state_dir": folder / "state"} | settings))

    async def serve() -> None:
        stop = asyncio.Event()
        headers = {"authorization": f"Bearer {sync_token}"} if sync_token else {}
        async with (
            aggregator(chosen, policy) as (address, _),
            httpx.AsyncClient(
                base_url=f"http://{address}", timeout=20, trust_env=False, verify=False, headers=headers
            ) as client,
        ):
            loop = asyncio.get_running_loop()
            found.extend((Stage(address, loop, client), lambda: loop.call_soon_threadsafe(stop.set)))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="aggregator")
    thread.start()
    try:
        assert ready.wait(20), "the aggregator did not start"
        yield found[0]
    finally:
        if ready.is_set():
            found[1]()
        thread.join(20)
        assert not thread.is_alive(), "the aggregator did not stop"


def tokens(folder: Path, **scopes: Scope) -> tuple[Path, dict[str, str]]:
    """A token file, and the tokens by name."""
    file, made, lines = folder / "tokens.toml", {}, []
    for name, scope in scopes.items():
        made[name], line = new_token(name, [scope])
        lines.append(line)
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    return file, made


class Watch:
    """What a page complained about; a page of ours never does."""

    def __init__(self, page: Any, ignore: tuple[str, ...] = ()) -> None:
        self.said: list[str] = []
        self.ignore = ignore
        page.on("console", lambda message: self.note(f"{message.type}: {message.text}", message.type == "error"))
        page.on("pageerror", lambda error: self.note(f"uncaught: {error}", True))

    def note(self, text: str, bad: bool) -> None:
        if bad and not any(word in text for word in self.ignore):
            self.said.append(text)

    def clean(self) -> None:
        assert not self.said, self.said


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Debian's Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
