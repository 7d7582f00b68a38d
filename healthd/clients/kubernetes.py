"""
The API server of Kubernetes, as a pod reaches it: a few small calls, each with a fresh token and CA.

What is asked, and what it means, is the caller's business. Tested on a real cluster (tests/kubernetes), and on a server
of our own that can be slow, wrong and away.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import httpx

from healthd.core import wire
from healthd.core.backoff import Backoff
from healthd.core.bounded import read_stream
from healthd.core.errors import BadInputError, ConfigError, HealthdError
from healthd.core.http.client import read_token

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"  # JSON is YAML too

TIMEOUT_SECONDS = 10.0
# A node of 500 pods and 50 images is under 100 KB; a page of such nodes is asked for in small numbers.
ANSWER_BYTES = 16 << 20
MOST_PAGES = 1000
NOTE_CHARACTERS = 512
NODES = "/api/v1/nodes"
# Beyond what a watch was asked for: the server ends it by itself.
WATCH_SLACK_SECONDS = 10.0
# As clients of Kubernetes do it: each watch ends by itself, at another time for each client.
WATCH_SECONDS = (300.0, 600.0)
# A watch that ends sooner is followed by longer pauses.
SHORT_SECONDS = 30.0
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 30.0
# A right that is missing does not come by waiting. But a server that has just started refuses until it has read its
# roles, so a refusal is believed only after so many in a row.
HOPELESS, HOPELESS_SECONDS, REFUSALS_BELIEVED = (401, 403), 300.0, 6


class KubernetesError(HealthdError):
    """
    A call that did not do what it should, in one line.

    `status` is the HTTP status (None: no answer). `retry_after_seconds` is what the server asked for, None where it did
    not.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """Where the API server is and as whom to speak to it: a directory with `token` and `ca.crt`."""

    url: str
    service_account: Path

    async def get(self, path: str, query: Mapping[str, str] | None = None, *, needs: str) -> dict[str, Any]:
        """An object; `needs` says in words which right this takes (`get on nodes`). KubernetesError."""
        return await self._call("GET", path, query or {}, None, None, needs)

    async def patch(
        self, path: str, body: object, *, kind: str, needs: str, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The object after a patch of `kind` (MERGE, STRATEGIC, APPLY). KubernetesError; 409: it changed meanwhile."""
        return await self._call("PATCH", path, query or {}, wire.encode(body), kind, needs)

    async def create(self, path: str, body: object, *, needs: str) -> dict[str, Any]:
        """The object as it was made. KubernetesError."""
        return await self._call("POST", path, {}, wire.encode(body), "application/json", needs)

    async def delete(self, path: str, *, needs: str) -> None:
        """Delete an object. KubernetesError; 404: it is gone already."""
        await self._call("DELETE", path, {}, None, None, needs)

    async def items(
        self, path: str, query: Mapping[str, str], *, page: int, needs: str
    ) -> AsyncIterator[dict[str, object]]:
        """The objects of a list, which is read in pages of so many. KubernetesError."""
        asked = {**query, "limit": str(page)}
        for _ in range(MOST_PAGES):
            found = await self.get(path, asked, needs=needs)
            for item in records(found, "items"):
                yield item
            more = members(found, "metadata", "continue")
            if not isinstance(more, str) or not more:
                return
            asked = {**asked, "continue": more}
        raise KubernetesError(f"API server {self.url}: {path} has more than {MOST_PAGES} pages of {page}")

    async def follow(
        self, path: str, query: Mapping[str, str], *, seconds: float, needs: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """
        A list, and then its changes as they come (objects with `type` and `object`), over one connection.

        A `limit` in the query splits the list into pages; the last one has no `metadata.continue`. Ends after about
        `seconds`, by the server. KubernetesError; 410: it is too old to go on with, follow anew.
        """
        async with self._client() as client:
            found = await self._exchange(client, "GET", path, query, None, None, needs)
            yield found
            for _ in range(MOST_PAGES):
                more = members(found, "metadata", "continue")
                if not isinstance(more, str) or not more:
                    break
                found = await self._exchange(client, "GET", path, {**query, "continue": more}, None, None, needs)
                yield found
            else:
                raise KubernetesError(f"API server {self.url}: {path} has more than {MOST_PAGES} pages")
            query = {key: value for key, value in query.items() if key != "limit"}
            version = members(found, "metadata", "resourceVersion")
            if not isinstance(version, str):
                raise KubernetesError(f"API server {self.url}: {path} has no version to watch from")
            asked = {**query, "watch": "1", "timeoutSeconds": f"{seconds:.0f}", "resourceVersion": version}
            async for line in self._lines(client, path, asked, seconds + WATCH_SLACK_SECONDS, needs):
                try:
                    change = wire.decode(line, dict[str, Any], what="a change")
                except BadInputError as error:
                    raise KubernetesError(f"API server {self.url}: {error}") from None
                if change.get("type") == "ERROR":
                    raise self._error_in_watch(path, change)
                yield change

    async def _lines(
        self, client: httpx.AsyncClient, path: str, query: Mapping[str, str], silent_seconds: float, needs: str
    ) -> AsyncIterator[bytes]:
        """The lines of an answer as they come."""
        rest = b""
        async with self._answer(client, "GET", path, query, None, None, read_seconds=silent_seconds) as answer:
            if answer.status_code != 200:
                text = await read_stream(answer.aiter_bytes(), ANSWER_BYTES, what="its answer")
                raise self._refusal("GET", path, answer, text, needs)
            async for part in answer.aiter_bytes():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > ANSWER_BYTES:
                    raise BadInputError(f"a change of {path} is larger than {ANSWER_BYTES >> 20} MiB")
                for line in filter(None, lines):
                    yield line

    async def _call(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, kind: str | None, needs: str
    ) -> dict[str, Any]:
        """One call by a client of its own: calls are minutes apart, and a CA that was replaced is in force at once."""
        async with self._client() as client:
            return await self._exchange(client, method, path, query, body, kind, needs)

    async def _exchange(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        kind: str | None,
        needs: str,
    ) -> dict[str, Any]:
        """One call. A token that is refused is read once more: it may have been replaced between reading and asking."""
        try:
            return await self._once(client, method, path, query, body, kind, needs)
        except KubernetesError as error:
            if error.status != 401:
                raise
        return await self._once(client, method, path, query, body, kind, needs)

    async def _once(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        kind: str | None,
        needs: str,
    ) -> dict[str, Any]:
        # One bound for all of it: a server that dribbles must not hold us.
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                async with self._answer(client, method, path, query, body, kind) as answer:
                    text = await read_stream(answer.aiter_bytes(), ANSWER_BYTES, what="its answer")
        except TimeoutError:
            raise KubernetesError(f"API server {self.url}: no answer within {TIMEOUT_SECONDS:g} s") from None
        if answer.status_code in (200, 201):
            try:
                return wire.decode(text, dict[str, Any], what="its answer")
            except BadInputError as error:
                raise KubernetesError(f"API server {self.url}: {error}") from None
        raise self._refusal(method, path, answer, text, needs)

    def _client(self) -> httpx.AsyncClient:
        verify = self._tls() if self.url.startswith("https") else False
        return httpx.AsyncClient(verify=verify, trust_env=False)

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        kind: str | None,
        *,
        read_seconds: float = TIMEOUT_SECONDS,
    ) -> AsyncIterator[httpx.Response]:
        """An answer as it comes; `read_seconds` bounds each silence in it. What goes wrong is a KubernetesError."""
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json", "User-Agent": "healthd"}
        if kind is not None:
            headers["Content-Type"] = kind
        url, timeout = self.url.rstrip("/") + path, httpx.Timeout(TIMEOUT_SECONDS, read=read_seconds)
        try:
            async with client.stream(
                method, url, params=dict(query), content=body, headers=headers, timeout=timeout
            ) as answer:
                yield answer
        except BadInputError as error:
            raise KubernetesError(f"API server: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise KubernetesError(f"API server {self.url} cannot be reached: {error or type(error).__name__}") from None

    def _error_in_watch(self, path: str, change: Mapping[str, object]) -> KubernetesError:
        """The error that ends a watch, such as a version that is too old."""
        code = members(change, "object", "code")
        said = members(change, "object", "message")
        told = f": {' '.join(said.split())[:300]}" if isinstance(said, str) else ""
        return KubernetesError(
            f"API server: watch {path}: {code}{told}", status=code if isinstance(code, int) else None
        )

    def _refusal(self, method: str, path: str, answer: httpx.Response, text: bytes, needs: str) -> KubernetesError:
        status, detail = answer.status_code, _message(text)
        told = f"{method} {path}: HTTP {status}{': ' + detail if detail else ''}"
        if status == 401:
            told += f"; it does not accept the token in {self.service_account / 'token'}: does the account still exist?"
        elif status == 403:
            told += f"; give the service account the right to {needs} (a ClusterRole of deploy/kubernetes does)"
        return KubernetesError(
            f"API server: {told}", status=status, retry_after_seconds=_seconds(answer.headers.get("retry-after"))
        )

    def _token(self) -> str:
        """Read anew each time: the kubelet replaces it before it expires."""
        try:
            return read_token(self.service_account / "token", remedy="is the service account mounted?")
        except ConfigError as error:
            raise KubernetesError(str(error)) from None

    def _tls(self) -> ssl.SSLContext:
        file = self.service_account / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(file))
        except (OSError, ssl.SSLError) as error:
            raise KubernetesError(f"{file}: not a CA file: {error}; is the service account mounted?") from None


def watch_seconds() -> float:
    """For how long to ask a watch this time."""
    return random.uniform(*WATCH_SECONDS)  # noqa: S311


async def keep_following(
    once: Callable[[], Awaitable[None]],
    failed: Callable[[KubernetesError], None],
    *,
    first_pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> None:
    """
    Call `once` for ever: it lists, watches from there, and returns when the server ends that.

    `failed` hears its errors but 410, after which what is true now is to be listed. Whatever ends a watch soon, such as
    a proxy that holds no answer open, makes the pauses longer, so that it is no storm of calls.
    """
    backoff, failures, refusals = Backoff(first_pause_seconds, MOST_PAUSE_SECONDS), 0, 0
    loop = asyncio.get_running_loop()
    while True:
        began, least, refused = loop.time(), 0.0, False
        try:
            await once()
        except KubernetesError as error:
            if error.status != 410:
                failed(error)
                refused = error.status in HOPELESS
                least = min(error.retry_after_seconds or 0.0, HOPELESS_SECONDS)
        refusals = refusals + 1 if refused else 0
        if refusals >= REFUSALS_BELIEVED:
            least = HOPELESS_SECONDS
        failures = failures + 1 if loop.time() - began < SHORT_SECONDS else 1
        await asyncio.sleep(max(least, backoff.after(failures) * random.uniform(0.75, 1.25)))  # noqa: S311


def api_server(environ: Mapping[str, str], service_account: Path, url: str | None = None) -> ApiServer:
    """
    The API server that `url` names, else the one that every pod is told of. ConfigError outside of a pod.

    Those variables are there whatever `enableServiceLinks` says.
    """
    if url is None:
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        port = environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or environ.get("KUBERNETES_SERVICE_PORT") or "443"
        if not host or not port.isdigit():
            raise ConfigError("no API server: KUBERNETES_SERVICE_HOST is not set, so this is not a pod; set api_server")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    elif not url.startswith(("https://", "http://127.0.0.1:", "http://[::1]:")):
        # The token of the account would go over the network in clear.
        raise ConfigError(f"api_server: {url!r} must begin with https://")
    return ApiServer(url=url, service_account=service_account)


@runtime_checkable
class MarkedNodes(Protocol):
    """What the actuator of a cluster's nodes shares with one of their devices."""

    server: ApiServer
    key: str
    """Key of its marks: of taints, labels and, with an ending, annotations."""
    owner: str
    """Value of its marks."""
    device_settings: Mapping[str, Any]
    """What is set for devices in its table, by key."""

    async def find(self, node: str, names: Sequence[str]) -> tuple[str, dict[str, object]] | None:
        """The first of these names of a node of the fleet that the cluster knows, with its object."""


@runtime_checkable
class NamesNode(Protocol):
    """A table of settings that says what the node is called in its cluster."""

    @property
    def node(self) -> str | None:
        """None: as in the fleet."""


def name_in_cluster(tables: Iterable[object], name: str) -> str:
    """What a node of the fleet is called in its cluster, by the tables of its settings."""
    named = (table.node for table in tables if isinstance(table, NamesNode))
    return next((one for one in named if one), name)


def note_text(text: str) -> str:
    """A sentence as an annotation has it: one line, cut."""
    return " ".join(text.split())[:NOTE_CHARACTERS]


def node_path(node: str) -> str:
    """The path of a node's object."""
    return f"{NODES}/{urllib.parse.quote(node, safe='')}"


def pods_path(namespace: str) -> str:
    """The path of the pods of a namespace."""
    return f"/api/v1/namespaces/{urllib.parse.quote(namespace, safe='')}/pods"


def members(value: object, *path: str) -> object:
    """What is at `path` of an answer; None where it is not, or where something on the way is no object."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def records(value: object, *path: str) -> tuple[dict[str, object], ...]:
    """The objects of a list in an answer; what is none of them is left out."""
    found = members(value, *path)
    return tuple(item for item in found if isinstance(item, dict)) if isinstance(found, list) else ()


def _message(text: bytes) -> str:
    """The message of a Status object, in one line; empty where there is none."""
    try:
        said = members(wire.decode(text[:65536], dict[str, Any], what="status"), "message")
    except BadInputError:
        return ""
    return " ".join(said.split())[:300] if isinstance(said, str) else ""


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After in seconds; a date is not what API servers send."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else None
