"""
Service accounts of Kubernetes as callers, verified by the API server.

A projected token is bound to an audience, to a pod and to that pod's node. Only the API server can verify it
(TokenReview). Reviews are cached for a while by the SHA-256 of the token. While the API server cannot be reached,
cached reviews stay valid and all other tokens are refused: an unverified caller has no access. The settings say what
each account may do.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fnmatch
import logging
import math
import os
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from checks.printable import some
from healthd.aggregator.identity.tokens import IMPLIED, PEER, AuthError, Caller, Scope
from healthd.aggregator.settings import AggregatorSettings
from healthd.clients.kubernetes import ApiServer, KubernetesError, api_server, members
from healthd.core import wire
from healthd.core.errors import BadInputError
from healthd.core.node_name import can_name
from healthd.core.workload import Pod
from healthd.integrations.kubernetes.settings import KubernetesCallers

log = logging.getLogger(__name__)

PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
NEEDS = "create on tokenreviews"

MOST_TOKEN_BYTES = 8192
"""A projected token has some 1,200."""
MOST_KEPT = 50_000
"""Reviews: a node and a hook on each of 20,000 nodes. One takes about a kilobyte."""
MOST_REFUSED = 1000
REFUSED_SECONDS = 10.0
"""How long a refusal is kept: whoever asks in a loop asks the API server no more often."""
MOST_AT_ONCE = 8
"""Reviews under way: the API server has other clients, and a review takes milliseconds."""
MOST_OF_ADDRESS = 6
"""Reviews under way for one address: whoever floods leaves places to others."""
MOST_A_SECOND = 400.0
"""Reviews that are asked in a second: 10,000 nodes that find their aggregator again take half a minute."""
SUSPECT_SECONDS = 60.0
"""How long an address comes last after a refusal."""
SUSPECTS_A_SECOND = 20.0
"""Reviews in a second for all such addresses together."""
MOST_SUSPECTS_WAITING = 64
"""Requests of such an address that wait; the others are answered 503 at once."""
MOST_SUSPECTS = 10_000
MOST_WAITING = 5000
"""Requests that wait for a review; a fleet that finds its aggregator again sends one from each node."""
REVIEW_SECONDS = 5.0
"""How long a review may take."""
AWAY_SECONDS = 2.0
"""How long the API server is not asked again after it could not be."""
LEAST_SECONDS = 5.0
"""How long a review counts where the token seems to expire at once: the API server's clock decides that, not ours."""

OF_THE_TOKEN = frozenset({400, 413, 422})
"""HTTP statuses that are about one review, and say nothing of the API server."""

USER = "system:serviceaccount:"
OF_POD = "authentication.kubernetes.io/"
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")
NODE_NAMES_SINCE = "Kubernetes 1.32 does, and 1.30 with the feature ServiceAccountTokenPodNodeInfo"

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class _Review:
    """What the API server said of a token, at `at` by the clock of the reviews; `until` is when the token expires."""

    caller: Caller
    at: float
    until: float


class _Pace:
    """So many in a second, and `burst` at once."""

    def __init__(self, a_second: float, burst: float) -> None:
        self._a_second, self._burst = a_second, burst
        self._left, self._at = burst, 0.0

    def wait_seconds(self, now: float) -> float:
        """How long until the next one may go; 0: now."""
        self._left = min(self._burst, self._left + (now - self._at) * self._a_second)
        self._at = now
        return max(0.0, (1.0 - self._left) / self._a_second)

    def take(self) -> None:
        """One goes."""
        self._left -= 1.0


class _Turns:
    """
    Who may ask the API server next. Addresses take turns; those with a refusal lately come last, and slowly.

    Whoever has a turn gives it back with `done`. On the event loop alone.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._under_way: Counter[str] = Counter()
        self._suspects: OrderedDict[str, float] = OrderedDict()
        self._all = _Pace(MOST_A_SECOND, MOST_AT_ONCE)
        self._slow = _Pace(SUSPECTS_A_SECOND, 1.0)
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, address: str) -> None:
        """Wait for a turn. AuthError(503) for one too many of an address that comes last."""
        queue = self._waiting.setdefault(address, deque())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        if self._is_suspect(address):
            self._trim(address)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.done(address)
            raise

    def done(self, address: str) -> None:
        """The turn is over."""
        self._under_way[address] -= 1
        if self._under_way[address] <= 0:
            del self._under_way[address]
        self._give()

    def refused(self, address: str) -> None:
        """A token from there was refused."""
        _put(self._suspects, address, self._clock() + SUSPECT_SECONDS, MOST_SUSPECTS)
        self._trim(address)

    def _is_suspect(self, address: str) -> bool:
        return self._clock() < self._suspects.get(address, -math.inf)

    def _trim(self, address: str) -> None:
        queue = self._waiting.get(address, deque())
        while len(queue) > MOST_SUSPECTS_WAITING:
            turn = queue.pop()
            if not turn.done():
                text = f"tokens from {address} were refused recently, and {MOST_SUSPECTS_WAITING} requests wait already"
                turn.set_exception(AuthError(503, f"{text}; try again later"))

    def _give(self) -> None:
        while self._under_way.total() < MOST_AT_ONCE and (address := self._next()) is not None:
            queue = self._waiting[address]
            turn = queue.popleft()
            self._waiting.move_to_end(address)
            if not queue:
                del self._waiting[address]
            if not turn.done():
                self._all.take()
                if self._is_suspect(address):
                    self._slow.take()
                self._under_way[address] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        """The address whose turn it is; None where none may go now. A timer looks again where only time is lacking."""
        free = [one for one in self._waiting if self._under_way[one] < MOST_OF_ADDRESS]
        good = next((one for one in free if not self._is_suspect(one)), None)
        address = good or next(iter(free), None)
        if address is None:
            return None
        now = asyncio.get_running_loop().time()
        seconds = max(self._all.wait_seconds(now), 0.0 if good is not None else self._slow.wait_seconds(now))
        if seconds <= 0.0:
            return address
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._again)
        return None

    def _again(self) -> None:
        self._timer = None
        self._give()


class TokenReviews:
    """
    Who the bearers of service account tokens are, on the event loop alone.

    `clock` counts seconds, `wall` is the time of day by which tokens expire.
    """

    def __init__(
        self,
        settings: KubernetesCallers,
        server: ApiServer,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._audience = settings.audience or ""
        self._server = server
        self._clock = clock
        self._wall = wall
        self._kept: OrderedDict[bytes, _Review] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[AuthError, float]] = OrderedDict()
        self._asking: dict[bytes, asyncio.Event] = {}
        self._turns = _Turns(clock)
        self._waiting = 0
        self._away = ""
        self._away_until = float("-inf")
        self._probing = False

    def known(self, digest: bytes) -> Caller | None:
        """The caller by what was said lately, without asking; None where nothing was, or not lately enough."""
        review = self._kept.get(digest)
        if review is None:
            return None
        now = self._clock()
        good = now < review.until and now - review.at < self._settings.outage_seconds
        return review.caller if good else None

    def fresh(self, digest: bytes) -> Caller | None:
        """As `known`, where it need not be asked again yet."""
        review = self._kept.get(digest)
        if review is None:
            return None
        now = self._clock()
        return review.caller if now < review.until and now - review.at < self._settings.review_seconds else None

    def trouble(self) -> str:
        """Why the API server could not be asked when that was tried last; empty where it could."""
        return self._away

    async def identify(self, token: str, digest: bytes) -> Caller | None:
        """
        The caller that a token stands for; None where it is no token of a service account at all.

        AuthError with 401 or 403 where the API server, or the settings, do not let it in; 503 where the API server
        cannot say, and has not said lately.
        """
        while True:
            if (caller := self.fresh(digest)) is not None:
                return caller
            refused = self._refused.get(digest)
            if refused is not None and self._clock() < refused[1]:
                raise refused[0]
            # One request asks, the others of the same token wait for what it hears. Where it was given up meanwhile,
            # the next one asks.
            if (asking := self._asking.get(digest)) is None:
                break
            await self._wait(asking.wait())
        if (claims := claims_of(token)) is None:
            return None
        self._check_audience(claims)
        done = self._asking[digest] = asyncio.Event()
        try:
            return await self._ask(token, digest, claims)
        finally:
            del self._asking[digest]
            done.set()

    async def _ask(self, token: str, digest: bytes, claims: Mapping[str, object]) -> Caller:
        try:
            status = await self._review(token)
        except KubernetesError as error:
            if (caller := self.known(digest)) is not None:
                return caller
            raise AuthError(503, f"{error}; the token cannot be verified until the API server responds") from None
        now = self._clock()
        try:
            caller = self._caller_of(status)
        except AuthError as error:
            self._kept.pop(digest, None)
            self._turns.refused(PEER.get())
            _put(self._refused, digest, (error, now + REFUSED_SECONDS), MOST_REFUSED)
            raise
        self._refused.pop(digest, None)
        expires = claims.get("exp")
        left = float(expires) - self._wall() if isinstance(expires, int | float) else LEAST_SECONDS
        _put(self._kept, digest, _Review(caller=caller, at=now, until=now + max(LEAST_SECONDS, left)), MOST_KEPT)
        return caller

    async def _review(self, token: str) -> Mapping[str, object]:
        """The status of the token's review. KubernetesError where there is none, or could not be one just before."""
        self._check_there()
        address = PEER.get()
        await self._wait(self._turns.take(address))
        try:
            self._check_there()
            self._probing = probing = bool(self._away)
            try:
                return await self._review_now(token)
            finally:
                self._probing = self._probing and not probing
        finally:
            self._turns.done(address)

    def _check_there(self) -> None:
        """KubernetesError where the API server could not be asked just before, or one request tries that already."""
        if self._away and (self._probing or self._clock() < self._away_until):
            raise KubernetesError(self._away)

    async def _review_now(self, token: str) -> Mapping[str, object]:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._audience]},
        }
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                answer = await self._server.create(PATH, body, needs=NEEDS)
            status = members(answer, "status")
            if not isinstance(status, dict):
                raise KubernetesError(f"API server {self._server.url}: its TokenReview has no status")
        except TimeoutError:
            error = KubernetesError(f"API server {self._server.url}: no TokenReview within {REVIEW_SECONDS:g} s")
            self._is_away(error)
            raise error from None
        except KubernetesError as error:
            self._is_away(error)
            raise
        if self._away:
            log.info("API server %s: token reviews work again", self._server.url)
            self._away = ""
        return status

    def _is_away(self, error: KubernetesError) -> None:
        if error.status in OF_THE_TOKEN:
            return
        self._away_until = self._clock() + AWAY_SECONDS
        if not self._away:
            text = "%s; service-account tokens reviewed within the last %g s stay valid, other tokens are refused"
            log.warning(text, error, self._settings.outage_seconds)
        self._away = str(error)

    async def _wait(self, what: Coroutine[object, object, object]) -> None:
        """Wait as one of so many; AuthError(503) where those are waiting already."""
        if self._waiting >= MOST_WAITING:
            what.close()
            raise AuthError(503, f"{MOST_WAITING} requests already wait for reviews of their tokens; try again later")
        self._waiting += 1
        try:
            await what
        finally:
            self._waiting -= 1

    # --- what an answer means -----------------------------------------------------------------------------------------

    def _check_audience(self, claims: Mapping[str, object]) -> None:
        """AuthError for a token that says itself that it is for others: the API server need not be asked."""
        told = claims.get("aud")
        meant = [str(one) for one in told] if isinstance(told, list) else [] if told is None else [str(told)]
        if self._audience not in meant:
            others = f"for {some([one[:80] for one in meant], 2)}" if meant else "bound to no audience"
            raise AuthError(
                401,
                f"this Kubernetes token is {others}, not for audience {self._audience!r}; have it projected into the "
                "pod with that audience",
            )

    def _caller_of(self, status: Mapping[str, object]) -> Caller:
        """The caller of a review. AuthError where it is nobody's token, or of an account that may do nothing here."""
        if status.get("authenticated") is not True:
            why = status.get("error")
            told = f" ({' '.join(why.split()).strip('[]')[:200]})" if isinstance(why, str) and why else ""
            raise AuthError(401, f"Kubernetes does not accept this token{told}; have the pod send its current one")
        audiences = status.get("audiences")
        if not isinstance(audiences, list) or self._audience not in audiences:
            raise AuthError(401, f"Kubernetes does not confirm that this token is for audience {self._audience!r}")
        user = members(status, "user", "username")
        account = user.removeprefix(USER).replace(":", "/", 1) if isinstance(user, str) else ""
        if not isinstance(user, str) or not user.startswith(USER) or account.count("/") != 1:
            raise AuthError(
                403, f"{str(user)[:80]!r} is not a Kubernetes service account; other users have no token here"
            )
        settings, bound = self._settings, _bound_to(status)
        if account in settings.admins:
            return Caller(name=account, scopes=IMPLIED[Scope.ADMIN])
        if _among(account, settings.nodes):
            pod, node = _place(account, bound)
            return Caller(name=account, scopes=IMPLIED[Scope.SYNC], nodes=(node,), pod=pod)
        if account in settings.controllers:
            return Caller(name=account, scopes=IMPLIED[Scope.GATE])
        if account in settings.readers:
            return Caller(name=account, scopes=IMPLIED[Scope.READ])
        if _among(account, settings.hooks):
            pod, node = _place(account, bound)
            return Caller(name=account, scopes=IMPLIED[Scope.GATE], nodes=(node,), pod=pod)
        raise AuthError(
            403,
            f"service account {account} is not authorized; the operator of the aggregator adds it "
            "to 'hooks' or 'nodes' of [aggregator.kubernetes]",
        )


def provider(settings: AggregatorSettings) -> TokenReviews | None:
    """The reviews of an aggregator; None where no service account is let in. ConfigError outside of a pod."""
    wanted = settings.of("kubernetes", KubernetesCallers)
    if not wanted.on:
        return None
    return TokenReviews(wanted, api_server(os.environ, wanted.service_account, wanted.api_server))


def _among(account: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(account, pattern) for pattern in patterns)


def _bound_to(status: Mapping[str, object]) -> Mapping[str, str]:
    """What the token is bound to: `pod-name`, `pod-uid` and `node-name`, as far as the API server says it."""
    extra = members(status, "user", "extra")
    found: dict[str, str] = {}
    for key, values in extra.items() if isinstance(extra, dict) else ():
        if isinstance(key, str) and isinstance(values, list) and values and isinstance(values[0], str):
            found[key.removeprefix(OF_POD)] = values[0]
    return found


def _place(account: str, bound: Mapping[str, str]) -> tuple[Pod, str]:
    """The pod that a token is bound to and that pod's node; AuthError where the API server does not say them."""
    name, uid, node = bound.get("pod-name", ""), bound.get("pod-uid", ""), bound.get("node-name", "")
    if not name or not uid:
        raise AuthError(
            403,
            f"this token of service account {account} is not bound to a pod, so its node is unknown; have it "
            "projected into the pod (a volume of kind serviceAccountToken)",
        )
    pod = Pod(namespace=account.partition("/")[0], name=name, uid=uid)
    if not can_name(node):
        raise AuthError(
            403,
            f"Kubernetes does not report on which node pod {pod.full_name} runs ({NODE_NAMES_SINCE}); update the "
            "cluster, or use tokens of a token table",
        )
    return pod, node


def claims_of(token: str) -> Mapping[str, object] | None:
    """
    What a JSON web token says of itself, which proves nothing; None for what is none.

    Only the API server can tell whether it says the truth: of use for what speaks against the token, and for how long
    one that it has accepted will be good.
    """
    if len(token) > MOST_TOKEN_BYTES or (form := _TOKEN.fullmatch(token)) is None:
        return None
    try:
        text = base64.urlsafe_b64decode(form[1] + "=" * (-len(form[1]) % 4))
        return wire.decode(text, dict[str, Any], what="claims")
    except (BadInputError, binascii.Error, ValueError):
        return None


def _put(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Keep it as the newest; the oldest give way."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
