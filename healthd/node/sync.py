"""
The node's one line outwards: what it knows goes to the first aggregator that answers, its orders come back.

A held request is always open; a change goes at once by a second one. Nobody's clock is trusted: time is counted by
CLOCK_BOOTTIME from the last answer that was read; an answer that lay about while this process was frozen is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError, HealthdError, UnreachableError, connection_words
from healthd.core.file_trust import check_file
from healthd.core.model import PROTOCOL, OrderReport, SyncAnswer, SyncRequest
from healthd.node.clock import Clock
from healthd.node.interfaces import peer_address
from healthd.node.orders.orders import Orders
from healthd.node.settings import SyncSettings
from healthd.node.state.approved_baselines import KeptLimits
from healthd.node.state.digest import digest_of
from healthd.node.state.store import NodeBook

log = logging.getLogger(__name__)

ANSWER_BYTES = 2 << 20
# The title of the problem by which an aggregator tells an executor that no open gate has it.
NOT_EXECUTOR = "NotExecutor"
CONNECT_SECONDS = 5.0
# Beyond the wait that was asked for: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0
# Results of one round come within milliseconds of each other; one message for all of them is enough.
GATHER_SECONDS = 0.05
FIRST_PAUSE_SECONDS = 0.5
# An aggregator that never holds an answer must not make us ask as fast as we can.
HASTY_SECONDS = 0.5
HASTY_ANSWERS = 8


class UnforeseenError(UnreachableError):
    """An answer that nobody thought of: what was raised while it was handled is in the log."""


class NotWantedError(UnreachableError):
    """No open gate has this executor yet, or any more: the way of things before a gate and after its answer."""


class Line:
    """Start `run_held` and `run_urgent` as supervised tasks; `changed` is called after every change that may matter."""

    def __init__(
        self,
        book: NodeBook,
        orders: Orders,
        settings: SyncSettings,
        *,
        key: str,
        clock: Clock,
        seed: int | None = None,
        learned: KeptLimits | None = None,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """`on_error` is told when an answer makes our own code raise."""
        self._learned = learned
        self._book = book
        self._orders = orders
        self._settings = settings
        self._key = key
        self._clock = clock
        self._chance = random.Random(seed)  # noqa: S311
        self._incarnation = secrets.token_hex(8)
        self._seq = 0
        self._url: str | None = None
        self._http: httpx.AsyncClient | None = None
        self._answered: SyncAnswer | None = None
        self._answered_at = 0.0
        self._issuer: str | None = None
        self._known_digest: str | None = None
        self._full_at = 0.0
        self._told: tuple[str, Mapping[str, OrderReport]] | None = None
        self._complaint = ""
        self._on_error = on_error
        self._executor = {"executor": settings.executor} if settings.executor is not None else {}
        self._news = asyncio.Event()
        self._tls = _tls_context(settings.ca_file) if any(u.startswith("https") for u in settings.aggregators) else None
        if settings.token_file is not None and settings.aggregators:
            check_file(settings.token_file, "token file")
        for url in settings.aggregators:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"node.sync.aggregators: {url!r} is not a URL; write http://host:8090 or https://...")

    def changed(self) -> None:
        """Something changed; whether it is worth a message is seen later."""
        self._news.set()

    @property
    def connected_to(self) -> str | None:
        """The aggregator that answered last; None while none does."""
        return self._url

    # --- the two eternal loops ----------------------------------------------------------------------------------------

    async def run_held(self) -> None:
        """Always one request open; connects, and fails over to the next of the list."""
        pause, hasty = FIRST_PAUSE_SECONDS, 0
        try:
            while True:
                if self._url is None and not await self._connect():
                    await asyncio.sleep(pause * self._chance.uniform(0.5, 1.0))
                    pause = min(2 * pause, self._settings.backoff_max_seconds)
                    continue
                began = self._clock.boot()
                try:
                    await self._exchange(self._settings.wait_seconds)
                    pause = FIRST_PAUSE_SECONDS
                except UnforeseenError as error:
                    # It may answer the first, short question well each time: no reason to ask again at once.
                    await self._disconnect(error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._settings.backoff_max_seconds)
                except UnreachableError as error:
                    pause = FIRST_PAUSE_SECONDS
                    await self._disconnect(error)
                hasty = hasty + 1 if self._clock.boot() - began < HASTY_SECONDS else 0
                if hasty > HASTY_ANSWERS:
                    await asyncio.sleep(HASTY_SECONDS)
        finally:
            await self._close()

    async def run_urgent(self) -> None:
        """Sends what is new at once, beside the request that is held."""
        while True:
            await self._news.wait()
            if self._told is None or self._told[1] == self._orders.reports():
                # A gate may wait for the report on an order; a result can wait for the next one.
                await asyncio.sleep(GATHER_SECONDS)
            self._news.clear()
            if self._url is None or not self._worth_telling():
                continue
            try:
                await self._exchange(0.0)
            except UnreachableError as error:
                await self._disconnect(error)

    def _worth_telling(self) -> bool:
        return self._told != (digest_of(self._book.snapshot()), self._orders.reports())

    async def _connect(self) -> bool:
        """Try all aggregators in order; the first exchange is not held, so that both sides know at once."""
        for url in self._settings.aggregators:
            await self._close()
            self._http = httpx.AsyncClient(
                verify=self._tls if self._tls is not None else False,  # never used without TLS
                trust_env=False,
                timeout=httpx.Timeout(CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=4, keepalive_expiry=60.0),
            )
            self._known_digest, self._full_at = None, 0.0
            # Known before the first word, and again whenever the way there may have become another one.
            self._book.set_peer_address(await asyncio.to_thread(peer_address, self._book.settings.interface, url))
            self._url = url  # not before: what is new goes with the first word, and not beside it
            try:
                await self._exchange(0.0)
            except UnreachableError as error:
                self._url = None
                self._complain(error)
            else:
                log.info("aggregator %s answers", url)
                self._complaint = ""
                return True
        return False

    async def _disconnect(self, error: UnreachableError) -> None:
        self._complain(error)
        self._url = None
        await self._close()

    async def _close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def _complain(self, error: UnreachableError) -> None:
        """Once for each new complaint: an aggregator that is away for an hour is one line."""
        complaint = str(error)
        if complaint != self._complaint:
            log.log(logging.INFO if isinstance(error, NotWantedError) else logging.WARNING, "%s", complaint)
        self._complaint = complaint

    # --- one exchange -------------------------------------------------------------------------------------------------

    async def _exchange(self, wait_seconds: float) -> None:
        """
        One request and its answer. UnreachableError when there is no answer that can be used.

        Whatever an answer makes our own code raise is logged and counted, and the aggregator is asked again later.
        """
        try:
            await self._ask(wait_seconds)
        except HealthdError:
            raise
        except Exception as error:
            self._on_error(error)
            log.exception("the exchange with aggregator %s failed unexpectedly", self._url)
            said = f"{type(error).__name__}: {error}"[:300]
            raise UnforeseenError(f"aggregator {self._url}: an unforeseen error: {said}") from None

    async def _ask(self, wait_seconds: float) -> None:
        request = self.compose()
        sent_at = self._clock.boot()
        answer = await self._post(request, wait_seconds)
        if self._clock.boot() - sent_at > wait_seconds + 2 * SLACK_SECONDS:
            raise UnreachableError(f"aggregator {self._url}: its answer is too old to act on")
        self.take(request, answer, sent_at)
        if answer.retry_after_seconds > 0:
            await asyncio.sleep(min(answer.retry_after_seconds, self._settings.backoff_max_seconds))

    def compose(self) -> SyncRequest:
        """What there is to say now: the whole state when its digest is new to the other side, or a while has passed."""
        now = self._clock.boot()
        state = self._book.exact()
        digest = digest_of(state)
        reports = self._orders.reports()
        full = digest != self._known_digest or now - self._full_at >= self._settings.full_seconds
        self._seq += 1
        self._told = (digest, reports)
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
            issuer=self._issuer,
            baseline=self._learned.digest if self._learned is not None else None,
        )

    def take(self, request: SyncRequest, answer: SyncAnswer, sent_at: float) -> bool:
        """
        Take in an answer; false when a newer one was read already.

        Answers are counted by the aggregator; one to a request that was sent after the newest answer was read is newer
        whatever its count says, because the aggregator may have lost count.
        """
        last = self._answered
        if last is not None and answer.issuer == last.issuer and answer.seq <= last.seq and sent_at < self._answered_at:
            return False
        if answer.send_all:
            self._known_digest = None
        elif request.state is not None:
            self._known_digest = request.digest
            # Spread, so that a fleet that started together does not send all states in one second.
            self._full_at = sent_at - self._chance.uniform(0.0, 0.2) * self._settings.full_seconds
        if answer.orders is not None or answer.quarantine is not None:
            # An aggregator that makes no statement yet may have lost its database: what it said before stands.
            self._book.set_quarantine(answer.quarantine)
        if self._learned is not None and answer.baseline is not None:
            self._learned.take(answer.baseline)
        self._orders.apply(
            answer.orders, issuer=answer.issuer, acknowledged=answer.acknowledged, carried=request.orders
        )
        # The next request confirms this answer by its name: so only after all that it says was taken in.
        self._answered, self._answered_at, self._issuer = answer, self._clock.boot(), answer.issuer
        return True

    async def _post(self, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        http, url = self._http, self._url
        if http is None or url is None:
            raise UnreachableError("aggregator: the line was closed")
        address = f"{url.rstrip('/')}/v1/nodes/{self._book.settings.name}/sync"
        timeout = httpx.Timeout(CONNECT_SECONDS, read=wait_seconds + SLACK_SECONDS)
        headers = self._headers()
        try:
            async with http.stream(
                "POST",
                address,
                params={"wait": f"{wait_seconds:g}", **self._executor},
                content=wire.encode(request),
                headers=headers,
                timeout=timeout,
            ) as response:
                body = await _bounded(response)
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: the other loop has closed the client under us.
            raise UnreachableError(f"aggregator {url} cannot be reached: {connection_words(error)}") from None
        except HealthdError as error:
            raise UnreachableError(f"aggregator {url}: {error}") from None
        if response.status_code != 200:
            unwanted = response.status_code == 409 and _problem(body).get("title") == NOT_EXECUTOR
            kind = NotWantedError if unwanted else UnreachableError
            raise kind(f"aggregator {url} refuses: {_detail(response.status_code, body)}")
        try:
            return wire.decode(body, SyncAnswer, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {url}: {error}") from None

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Healthd-Node-Key": self._key}
        file = self._settings.token_file
        if file is not None:
            try:
                headers["Authorization"] = f"Bearer {file.read_text(encoding='ascii').split()[0]}"
            except (OSError, UnicodeDecodeError, IndexError) as error:
                raise UnreachableError(f"{file}: holds no token that can be read: {error}") from None
        return headers


async def _bounded(response: httpx.Response) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > ANSWER_BYTES:
            raise BadInputError(f"its answer is larger than {ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _problem(body: bytes) -> dict[str, Any]:
    """The problem document of a refusal; empty where there is none."""
    try:
        problem: dict[str, Any] = wire.decode(body[:65536], dict, what="problem")
    except BadInputError:
        return {}
    return problem


def _detail(status: int, body: bytes) -> str:
    """What the problem document says, in one line, else the status alone."""
    problem = _problem(body)
    detail = " ".join(str(problem.get("detail") or problem.get("title") or "").split())
    return f"HTTP {status}: {detail[:300]}" if detail else f"HTTP {status}"


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is not None:
        check_file(ca_file, "CA file")
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file}: not a CA file: {error}; name another with --ca-file") from None
