"""
Synchronizes the node with the first aggregator that answers, or the leader that it names: sends its state, receives its
orders.

One request is always held open; a change is sent at once by a second one. No other clock is trusted: time is counted by
CLOCK_BOOTTIME from the last answer that was read. An answer that waited while this process was frozen is dropped.

`SyncClient` keeps the two requests going and chooses the aggregator. `AggregatorConnection` sends requests to one
aggregator with the node's credentials, and reads its answers within bounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import re
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import httpx

from healthd.core import wire
from healthd.core.backoff import Backoff
from healthd.core.bounded import read_stream
from healthd.core.errors import BadInputError, ConfigError, HealthdError, UnreachableError, connection_words
from healthd.core.file_trust import check_file
from healthd.core.http import trust
from healthd.core.http.addresses import check_aggregator
from healthd.core.http.client import problem_in, read_token
from healthd.core.model import PROTOCOL, NodeState, OrderReport, SyncAnswer, SyncRequest, Use
from healthd.core.tasks import LogOnce
from healthd.node.clock import Clock
from healthd.node.interfaces import peer_address
from healthd.node.orders.orders import Orders
from healthd.node.services import StepSource
from healthd.node.settings import SyncSettings
from healthd.node.state.store import NodeStore, digest_of

MAX_ANSWER_BYTES = 2 << 20
# The title of the problem by which an aggregator says that no open gate has this executor.
NOT_EXECUTOR = "NotExecutor"
CONNECT_SECONDS = 5.0
# A host that is gone without a word is noticed within ten seconds, though a request is held: another one may lead.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
# By this status an aggregator that stands by says who leads, in the header Leader.
NOT_LEADER = 421
_ADDRESS = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,253}/?")
# From an aggregator to the one that it names, and once more where that one has just lost the lead.
MOST_HOPS = 2
# Beyond the wait that was asked for: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0
# Results of one round come within milliseconds of each other; one message for all of them is enough.
GATHER_SECONDS = 0.05
FIRST_PAUSE_SECONDS = 0.5
# Until an aggregator says how long it holds a request.
HOLD_SECONDS = 25.0
# An aggregator that never holds an answer back must not make the node ask as fast as it can.
HASTY_SECONDS = 0.5
HASTY_ANSWERS = 8

log = logging.getLogger(__name__)


class NotWantedError(UnreachableError):
    """No open gate has this executor: that is normal before a gate and after its answer."""


class ElsewhereError(UnreachableError):
    """It stands by; `leader` is the URL of the one that leads, as it says."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


class AskedToWaitError(UnreachableError):
    """It answers and cannot serve now; it says in how many `seconds` it may."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class UnforeseenError(UnreachableError):
    """An exception while an answer was handled; the log has the traceback."""


class Connection(Protocol):
    """The way to one aggregator. `peer_address` is where the ranks of other nodes reach this one; None: not known."""

    url: str
    peer_address: str | None

    async def post(self, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        """The answer, which the aggregator may hold back for `wait_seconds`. Raises UnreachableError."""

    async def close(self) -> None:
        """End what is under way."""


Connect = Callable[[str], Awaitable[Connection]]
"""The connection to the aggregator with this URL."""


class SyncClient:
    """Start `run_held` and `run_urgent` as supervised tasks; call `notify` after every change of state or reports."""

    def __init__(
        self,
        store: NodeStore,
        orders: Orders,
        settings: SyncSettings,
        *,
        key: str,
        clock: Clock,
        seed: int | None = None,
        on_error: Callable[[Exception], None] = lambda _: None,
        steps: StepSource | None = None,
        connect: Connect | None = None,
    ) -> None:
        """`on_error` is called when handling an answer raises an unforeseen exception. `connect` None: by HTTP."""
        self._steps = steps
        self._store = store
        self._orders = orders
        self._settings = settings
        self._key = key
        self._clock = clock
        self._chance = random.Random(seed)  # noqa: S311
        self._incarnation = secrets.token_hex(8)
        self._seq = 0
        self._connect_to = connect or self._connect_by_http
        self._connection: Connection | None = None
        self._connected = False
        self._wait_seconds = math.inf  # the pause that the last round of attempts was asked for
        self._answered: SyncAnswer | None = None
        self._answered_at = 0.0
        # What the aggregator has.
        self._known_digest: str | None = None
        self._known: NodeState | None = None
        # An older aggregator does not know `use`: it asks for everything each time.
        self._use_is_known = True
        self._full_at = 0.0
        self._sent: tuple[str, Mapping[str, OrderReport]] | None = None
        self._trouble = LogOnce(log)
        self._on_error = on_error
        self._changed = asyncio.Event()
        self._tls = check_sync_settings(settings)

    def notify(self) -> None:
        """Something has changed; whether it is worth a message is decided later."""
        self._changed.set()

    @property
    def connected_to(self) -> str | None:
        """The aggregator that answered last; None while none does."""
        return self._connection.url if self._connected and self._connection is not None else None

    # --- the two loops ----------------------------------------------------------------------------------------

    async def run_held(self) -> None:
        """Keep one request open for ever; connect, and fail over to the next aggregator of the list."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, self._settings.backoff_max_seconds)
        failures = hasty = 0
        try:
            while True:
                if not self._connected and not await self._connect():
                    failures += 1
                    pause = min(backoff.after(failures), self._wait_seconds)
                    await asyncio.sleep(pause * self._chance.uniform(0.5, 1.0))
                    continue
                began = self._clock.boot()
                try:
                    await self._exchange(self._held_for())
                    failures = 0
                except UnforeseenError as error:
                    # It may answer the first request after each connect well: that is no reason to ask again at once.
                    await self._disconnect(error)
                    failures += 1
                    await asyncio.sleep(backoff.after(failures))
                except UnreachableError as error:
                    failures = 0
                    await self._disconnect(error)
                hasty = hasty + 1 if self._clock.boot() - began < HASTY_SECONDS else 0
                if hasty > HASTY_ANSWERS:
                    await asyncio.sleep(HASTY_SECONDS)
        finally:
            await self._close()

    async def run_urgent(self) -> None:
        """Send what is new at once, beside the request that is held open, for ever."""
        while True:
            await self._changed.wait()
            if self._sent is None or self._sent[1] == self._orders.reports():
                # A gate may wait for the report on an order; a result can wait for the next one.
                await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            if not self._connected or not self._has_news():
                continue
            try:
                await self._exchange(0.0)
            except UnreachableError as error:
                await self._disconnect(error)

    def _held_for(self) -> float:
        """How long the next request may be held."""
        wanted = self._answered.hold_seconds if self._answered is not None else None
        return min(HOLD_SECONDS if wanted is None or not wanted > 0 else wanted, self._settings.wait_seconds)

    def _has_news(self) -> bool:
        return self._sent != (digest_of(self._store.snapshot()), self._orders.reports())

    async def _connect(self) -> bool:
        """Try all aggregators in order, and whom they name as the leader; whether one answers."""
        self._wait_seconds = math.inf
        for listed in self._settings.aggregators:
            url: str | None = listed
            for _ in range(1 + MOST_HOPS):
                if url is None:
                    break
                try:
                    await self._open(url)
                except ElsewhereError as elsewhere:
                    url = self._onward(url, elsewhere)
                except UnreachableError as error:
                    if isinstance(error, AskedToWaitError):
                        self._wait_seconds = min(self._wait_seconds, max(FIRST_PAUSE_SECONDS, error.seconds))
                    self._complain(error)
                    break
                else:
                    log.info("aggregator %s answers", url)
                    self._trouble.clear()
                    return True
        return False

    def _onward(self, url: str, elsewhere: ElsewhereError) -> str | None:
        """The leader's address; None where the node may not go there."""
        if (why := why_not_followed(elsewhere.leader, url, self._settings)) is None:
            return elsewhere.leader
        self._complain(UnreachableError(f"aggregator {url} names {elsewhere.leader!r} as the leader: {why}"))
        return None

    async def _open(self, url: str) -> None:
        """Connect; the first request is not held, so that both sides know each other at once. UnreachableError."""
        await self._close()
        self._connection = await self._connect_to(url)
        self._known_digest, self._known, self._full_at, self._use_is_known = None, None, 0.0, True
        # Known before the first request, and renewed whenever the route may have changed.
        self._store.set_peer_address(self._connection.peer_address)
        self._connected = True  # not before: what is new goes with the first request, and not beside it
        try:
            await self._exchange(0.0)
        except UnreachableError:
            self._connected = False
            raise

    async def _connect_by_http(self, url: str) -> Connection:
        node = self._store.settings
        connection = AggregatorConnection(url, node.name, self._key, self._settings, self._tls)
        connection.peer_address = await asyncio.to_thread(peer_address, node.interface, url)
        return connection

    async def _disconnect(self, error: UnreachableError) -> None:
        self._complain(error)
        await self._close()

    async def _close(self) -> None:
        self._connected = False
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _complain(self, error: UnreachableError) -> None:
        """Log each new error once: an aggregator that is away for an hour is one line."""
        self._trouble.say(str(error), logging.INFO if isinstance(error, NotWantedError) else logging.WARNING)

    # --- one exchange -------------------------------------------------------------------------------------------------

    async def _exchange(self, wait_seconds: float) -> None:
        """
        One request and its answer. Raises UnreachableError when there is no answer that can be used.

        An unforeseen exception is logged and counted, and the aggregator is asked again later.
        """
        try:
            await self._ask(wait_seconds)
        except HealthdError:
            raise
        except Exception as error:
            self._on_error(error)
            url = self._connection.url if self._connection is not None else ""
            log.exception("the sync with aggregator %s failed unexpectedly", url)
            text = f"{type(error).__name__}: {error}"[:300]
            raise UnforeseenError(f"aggregator {url}: unexpected error: {text}") from None

    async def _ask(self, wait_seconds: float) -> None:
        request = self.compose()
        sent_at = self._clock.boot()
        connection = self._connection
        if connection is None:
            raise UnreachableError("aggregator: the connection was closed")
        answer = await connection.post(request, wait_seconds)
        if self._clock.boot() - sent_at > wait_seconds + 2 * SLACK_SECONDS:
            raise UnreachableError(f"aggregator {connection.url}: its answer is too old to act on")
        self.apply(request, answer, sent_at)
        if answer.retry_after_seconds > 0 and request.use is None:  # somebody waits for what it says
            await asyncio.sleep(min(answer.retry_after_seconds, self._settings.backoff_max_seconds))

    def compose(self) -> SyncRequest:
        """
        The next request: with the whole state when the aggregator does not have this digest, or a while has passed.
        """
        now = self._clock.boot()
        state = self._store.exact()
        digest = digest_of(state)
        reports = self._orders.reports()
        use = self._use(state, digest)
        full = (digest != self._known_digest and use is None) or now - self._full_at >= self._settings.full_seconds
        self._seq += 1
        self._sent = (digest, reports)
        return SyncRequest(
            protocol=PROTOCOL,
            incarnation=self._incarnation,
            seq=self._seq,
            last_answer=self._answered.answer if self._answered is not None else None,
            since_answer_seconds=now - self._answered_at if self._answered is not None else None,
            state=state if full else None,
            digest=digest,
            ages={result.check: result.age_seconds for result in state.results},
            orders=reports,
            issuer=self._store.issuer,
            steps=self._steps.waiting() if self._steps is not None else (),
            step_jobs=tuple(self._steps.jobs) if self._steps is not None else (),
            use=None if full else use,
        )

    def _use(self, state: NodeState, digest: str) -> Use | None:
        """Who uses the node, where nothing else has changed since the state that the aggregator has."""
        known, since = self._known, self._known_digest
        if not self._use_is_known or known is None or since is None or since == digest:
            return None
        use = Use(since=since, allocated=state.allocated, leases=state.leases, running=state.running)
        return use if digest_of(_used(known, use)) == digest else None

    def apply(self, request: SyncRequest, answer: SyncAnswer, sent_at: float) -> bool:
        """
        Apply an answer; returns False when a newer one was read already.

        The aggregator numbers its answers. An answer to a request that was sent after the newest answer was read is
        newer whatever its number, because the aggregator may have lost count.
        """
        if self._steps is not None:
            self._steps.told(request.steps)
        last = self._answered
        if last is not None and answer.issuer == last.issuer and answer.seq <= last.seq and sent_at < self._answered_at:
            return False
        if answer.send_all:
            self._use_is_known = self._use_is_known and request.use is None
            self._known_digest = self._known = None
        elif request.use is not None and request.use.since == self._known_digest and self._known is not None:
            self._known_digest, self._known = request.digest, _used(self._known, request.use)
        elif request.state is not None:
            self._known_digest, self._known = request.digest, request.state
            # Spread, so that a fleet that started together does not send all states in one second.
            self._full_at = sent_at - self._chance.uniform(0.0, 0.2) * self._settings.full_seconds
        if answer.orders is not None or answer.quarantine is not None:
            # An aggregator that makes no statement yet may have lost its database: its last statement stands.
            self._store.set_quarantine(answer.quarantine, answer.issuer)
            self._store.set_accused(answer.accused)
        self._orders.apply(
            answer.orders, issuer=answer.issuer, acknowledged=answer.acknowledged, carried=request.orders
        )
        # The next request confirms this answer, so this comes after everything in it was applied.
        self._answered, self._answered_at = answer, self._clock.boot()
        return True


def _used(state: NodeState, use: Use) -> NodeState:
    """The state with other users."""
    return dataclasses.replace(state, allocated=use.allocated, leases=use.leases, running=use.running)


# --- one aggregator ---------------------------------------------------------------------------------------------------


class AggregatorConnection:
    """The HTTP connections to one aggregator; close it with `close`."""

    def __init__(self, url: str, node: str, key: str, settings: SyncSettings, context: ssl.SSLContext | None) -> None:
        """`key` is the node's own key."""
        self.url = url
        self.peer_address: str | None = None
        self._address = f"{url.rstrip('/')}/v1/nodes/{node}/sync"
        self._key = key
        self._token_file = settings.token_file
        self._executor = {"executor": settings.executor} if settings.executor is not None else {}
        transport = httpx.AsyncHTTPTransport(
            verify=context if context is not None else False,  # never used without TLS
            trust_env=False,
            limits=httpx.Limits(max_connections=4, keepalive_expiry=60.0),
            socket_options=KEEPALIVE,
        )
        self._http = httpx.AsyncClient(transport=transport, trust_env=False, timeout=httpx.Timeout(CONNECT_SECONDS))

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
                body = await read_stream(response.aiter_raw(), MAX_ANSWER_BYTES, what="its answer")
        except TimeoutError:
            raise UnreachableError(f"aggregator {self.url}: its answer does not end") from None
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: the client was closed meanwhile.
            raise UnreachableError(f"aggregator {self.url} cannot be reached: {connection_words(error)}") from None
        except HealthdError as error:
            raise UnreachableError(f"aggregator {self.url}: {error}") from None
        if response.status_code != 200:
            raise self._refusal(response, body)
        try:
            return wire.decode(body, SyncAnswer, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}: {error}") from None

    def _refusal(self, response: httpx.Response, body: bytes) -> UnreachableError:
        title, detail = problem_in(body)
        status, headers = response.status_code, response.headers
        said = f"aggregator {self.url} refuses: HTTP {status}{f': {detail}' if detail else ''}"
        if status == NOT_LEADER and _ADDRESS.fullmatch(leader := headers.get("leader", "")):
            return ElsewhereError(said, leader)
        if status == 503 and (seconds := headers.get("retry-after", "")).isdecimal():
            return AskedToWaitError(said, float(seconds[:9]))
        return NotWantedError(said) if status == 409 and title == NOT_EXECUTOR else UnreachableError(said)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Healthd-Node-Key": self._key}
        file = self._token_file
        if file is not None:
            try:
                headers["Authorization"] = f"Bearer {read_token(file)}"
            except ConfigError as error:
                raise UnreachableError(str(error)) from None
        return headers


def check_sync_settings(settings: SyncSettings) -> ssl.SSLContext | None:
    """The TLS context for the aggregators; None without one. Raises ConfigError for what cannot be used."""
    context = trust.trusting(settings.ca_file) if any(url.startswith("https") for url in settings.aggregators) else None
    if settings.token_file is not None and settings.aggregators:
        check_file(settings.token_file, "token file")
    for url in settings.aggregators:
        check_aggregator(url, where="node.sync.aggregators")
    return context


def why_not_followed(leader: str, told_by: str, settings: SyncSettings) -> str | None:
    """
    Why the node does not go where an aggregator sends it; None where it may: its token goes there too.

    An address of the settings may always be used. Any other one only over TLS, from an aggregator and to one whose
    certificates the CA of the settings has signed.
    """
    if leader.rstrip("/") in (url.rstrip("/") for url in settings.aggregators):
        return None
    if settings.ca_file is None:
        return "it is not in node.sync.aggregators; add it there, or name the aggregators' CA as ca_file"
    if not (leader.startswith("https://") and told_by.startswith("https://")):
        return "it is not in node.sync.aggregators, and without TLS its identity is unverified; add it there"
    return None
