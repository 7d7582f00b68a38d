"""Sends requests to one aggregator with the node's credentials, and reads its answers within bounds."""

from __future__ import annotations

import asyncio
import ssl

import httpx

from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError, HealthdError, UnreachableError, connection_words
from healthd.core.file_trust import check_file
from healthd.core.http import tls
from healthd.core.http.aggregator_client import problem_in
from healthd.core.model import SyncAnswer, SyncRequest
from healthd.node.settings import SyncSettings

MAX_ANSWER_BYTES = 2 << 20
# The title of the problem by which an aggregator says that no open gate has this executor.
NOT_EXECUTOR = "NotExecutor"
CONNECT_SECONDS = 5.0
# Beyond the wait that was asked for: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0


class NotWantedError(UnreachableError):
    """No open gate has this executor: that is normal before a gate and after its answer."""


class AggregatorConnection:
    """The HTTP connections to one aggregator; close it with `close`."""

    def __init__(self, url: str, node: str, key: str, settings: SyncSettings, context: ssl.SSLContext | None) -> None:
        """`key` is the node's own key."""
        self.url = url
        self._address = f"{url.rstrip('/')}/v1/nodes/{node}/sync"
        self._key = key
        self._token_file = settings.token_file
        self._executor = {"executor": settings.executor} if settings.executor is not None else {}
        self._http = httpx.AsyncClient(
            verify=context if context is not None else False,  # never used without TLS
            trust_env=False,
            timeout=httpx.Timeout(CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=4, keepalive_expiry=60.0),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def post(self, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        """The answer, which the aggregator may hold back for `wait_seconds`. Raises UnreachableError."""
        timeout = httpx.Timeout(CONNECT_SECONDS, read=wait_seconds + SLACK_SECONDS)
        headers = self._headers()
        try:
            # One bound for all of it: the time-outs of httpx count anew from each byte.
            async with (
                asyncio.timeout(wait_seconds + 2 * SLACK_SECONDS),
                self._http.stream(
                    "POST",
                    self._address,
                    params={"wait": f"{wait_seconds:g}", **self._executor},
                    content=wire.encode(request),
                    headers=headers,
                    timeout=timeout,
                ) as response,
            ):
                body = await _read_bounded(response)
        except TimeoutError:
            raise UnreachableError(f"aggregator {self.url}: its answer has no end") from None
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: the client was closed meanwhile.
            raise UnreachableError(f"aggregator {self.url} cannot be reached: {connection_words(error)}") from None
        except HealthdError as error:
            raise UnreachableError(f"aggregator {self.url}: {error}") from None
        if response.status_code != 200:
            title, detail = problem_in(body)
            kind = NotWantedError if response.status_code == 409 and title == NOT_EXECUTOR else UnreachableError
            said = f": {detail}" if detail else ""
            raise kind(f"aggregator {self.url} refuses: HTTP {response.status_code}{said}")
        try:
            return wire.decode(body, SyncAnswer, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}: {error}") from None

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Healthd-Node-Key": self._key}
        file = self._token_file
        if file is not None:
            try:
                headers["Authorization"] = f"Bearer {file.read_text(encoding='ascii').split()[0]}"
            except (OSError, UnicodeDecodeError, IndexError) as error:
                raise UnreachableError(f"{file}: holds no token that can be read: {error}") from None
        return headers


def check_sync_settings(settings: SyncSettings) -> ssl.SSLContext | None:
    """The TLS context for the aggregators; None without one. Raises ConfigError for what cannot be used."""
    context = tls.trusting(settings.ca_file) if any(url.startswith("https") for url in settings.aggregators) else None
    if settings.token_file is not None and settings.aggregators:
        check_file(settings.token_file, "token file")
    for url in settings.aggregators:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"node.sync.aggregators: {url!r} is not a URL; write http://host:8090 or https://...")
    return context


async def _read_bounded(response: httpx.Response) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise BadInputError(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
