"""
To which shard a request goes, where a fleet has several: by the node, the gate or the nodes of the gate that it names.

What is about the whole fleet is asked of the leaders of all shards and put together; a shard that does not answer is
named in the answer. The front of the shard does the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, quote, urlencode

from fastapi import Request
from prometheus_client import CollectorRegistry

from checks.json_text import parse_json
from healthd.aggregator import merging
from healthd.aggregator.api import (
    MEDIA_TYPE,
    ASGIScope,
    Door,
    HttpError,
    Message,
    Receive,
    Send,
    ShardList,
    no_shard,
    problem_of,
    read_body,
    respond,
    scope_of,
)
from healthd.aggregator.auth import Guard, Scope
from healthd.aggregator.front import FORWARDED, Front
from healthd.aggregator.metrics import ByShard, tasks_metric
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import DEFAULT_SHARD, Directory, check_shard, shard_by
from healthd.aggregator.ui import Asked, Gathered, Kind, Reader, authorization_of, pages_of
from healthd.core.errors import BadInputError, HealthdError, StoreError
from healthd.core.http.server import exposition
from healthd.core.tasks import Tasks
from healthd.core.wire import encode

log = logging.getLogger(__name__)

SHARD = b"x-healthd-shard"
"""The header by which aggregators tell each other for which shard a request is; callers say `?shard=`."""
PART_SECONDS = 5.0
"""How long a shard may take for its part of an answer about the fleet: who asked waits 10 s for it."""
PART_BYTES = 64 << 20
REMEMBER_SECONDS = 60.0
"""How long the shard of a node that another aggregator leads is remembered, and that of a pool."""
MOST_POOLS = 1000
MOST_ALIASES = 8
"""Names that no node has are looked for in every shard: a gate that names more of them and no node is of `default`."""

_SYNC = re.compile(r"/v1/nodes/([^/]+)/sync")
_NODE = re.compile(r"/(?:v1/)?nodes/([^/]+)(?:/.*)?")
_OF_GATE = re.compile(r"(/postmortem|/evidence|/lease|/outcome|/notes|/handshake|/members/.*|/override)$")
_GATE = re.compile(r"(?:/v1/gates|/v1/validations|/gates|/jobs)/(.+)")
_ALL = re.compile(r"(?:POST /v1/fleet/recover|POST /v1/fleet/breaker/reset|(?:PUT|DELETE) /v1/overrides/.+)")
_ALL_OF_FLEET = ("/v1/fleet/recover", "/v1/fleet/breaker/reset")
"""What changes something in all shards, or in the one of `?shard=`."""
_ONE = ("/v1/report",)
"""What is counted within a shard and makes no sense added up: who asks says which."""

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a shard answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """None where it is none."""
        try:
            return parse_json(self.body)
        except ValueError:
            return None

    @property
    def detail(self) -> str:
        """Of a problem, in one line."""
        found = self.json()
        text = found.get("detail") if isinstance(found, dict) else None
        return " ".join(str(text or f"HTTP {self.status}").split())[:500]


class Shards(Protocol):
    """The shards as this aggregator knows them: who answers for each, how many leaders each has had, and for people."""

    @property
    def fronts(self) -> Mapping[str, Front]: ...

    @property
    def terms(self) -> Mapping[str, int]: ...

    def shown(self) -> ShardList: ...


class Router:
    """The ASGI application of an aggregator of several shards, which are the values of a label of nodes."""

    def __init__(
        self, shards: Shards, directory: Directory, label: str, guard: Guard, settings: AggregatorSettings
    ) -> None:
        self._shards, self._directory, self._label = shards, directory, label
        self._guard, self._settings = guard, settings
        self._placed: dict[str, tuple[str, float]] = {}
        self._pools: dict[str, tuple[str, float]] = {}
        self._tasks = Tasks()
        self._pages = pages_of(Door(settings=settings, guard=guard), _Leaders(self))

    async def close(self) -> None:
        """Give up what is asked."""
        await self._tasks.stop(1.0)

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        match = _SYNC.fullmatch(scope["path"])
        try:
            if match is not None:
                await self._sync(match[1], scope, receive, send)
            elif FORWARDED in dict(scope["headers"]):
                await self._forwarded(scope, receive, send)
            else:
                await self._route(scope, receive, send)
        except HealthdError as error:
            problem, headers = problem_of(error)
            if problem.status >= 500:
                log.warning("%s %s: %s", scope["method"], scope["path"], error)
            await respond(send, problem.status, encode(problem), MEDIA_TYPE, headers)

    async def _forwarded(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """From another aggregator, which says for which shard it is."""
        if (shard := dict(scope["headers"]).get(SHARD)) is None:
            raise HttpError(503, "an aggregator without shard_label has sent this; set it on every one", {})
        await self._front(shard.decode("latin-1"))(scope, receive, send)

    async def _route(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        if (needed := scope_of(method, path)) is not None:
            await self._guard.admit(_text(headers.get(b"authorization")), needed)
        if path in _OWN and method in ("GET", "HEAD"):
            await self._own(path, scope, send)
        elif path in _BY_SHARD and (shard := self._shard_asked(scope)) is not None:
            await self._pass(shard, scope, receive, send)
        elif method == "GET" and path in merging.MERGED:
            await self._merge(scope, send)
        elif method == "POST" and path in ("/v1/gates", "/v1/validations"):
            await self._ask_gate(scope, receive, send)
        elif _ALL.fullmatch(f"{method} {path}"):
            await self._ask_all(scope, receive, send)
        elif path == "/events":
            await self._changes(scope, receive, send)
        elif path in _PAGES or _REASON.fullmatch(path):
            await self._pages(scope, receive, send)
        elif match := _NODE.fullmatch(path):
            await self._of_node(match[1], scope, receive, send)
        elif path == "/v1/gates/lease" or (match := _GATE.fullmatch(path)):
            await self._of_gate(_gate_named(scope), scope, receive, send)
        else:
            await self._anywhere(scope, receive, send)

    def _shard_asked(self, scope: ASGIScope) -> str | None:
        """The shard of `?shard=`; None where the whole fleet is meant. BadInputError for one that there is not."""
        known = sorted(self._shards.fronts)
        shard = _query(scope).get("shard")
        if shard is None and scope["path"] in _ONE:
            raise BadInputError(
                f"{scope['path']} is about one shard: name it with ?shard= (--shard), one of: {', '.join(known)}"
            )
        if shard is not None and shard not in known:
            raise no_shard(shard, known)
        return shard

    def _front(self, shard: str) -> Front:
        front = self._shards.fronts.get(shard)
        if front is None:
            raise HttpError(
                503, f"shard {shard[:80]!r} is not known here; ask again, or see GET /v1/shards", {"retry-after": "1"}
            )
        return front

    async def _pass(self, shard: str, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Let the front of a shard answer; where it asks another aggregator, that one knows of which shard."""
        front = self._front(shard)
        await front(_for_shard(scope, shard), receive, send)

    async def _anywhere(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """What is the same in every shard."""
        led = (shard for shard, front in self._shards.fronts.items() if front.leads)
        await self._pass(next(led, DEFAULT_SHARD), scope, receive, send)

    async def _changes(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """The stream of changes of a page: of one node or gate, or of the fleet."""
        kind, _, name = _query(scope).get("topic", "fleet").partition(":")
        if kind == "node":
            await self._of_node(name, scope, receive, send)
        elif kind == "gate":
            await self._of_gate(name, scope, receive, send)
        else:
            await self._pages(scope, receive, send)

    # --- of this aggregator -------------------------------------------------------------------------------------------

    async def _own(self, path: str, scope: ASGIScope, send: Send) -> None:
        plain, headers = "text/plain; charset=utf-8", dict(scope["headers"])
        if path == "/livez":
            await respond(send, 200, b"ok\n", plain, {})
            return
        if path == "/readyz":
            told = {shard: await self._readiness(front, shard, scope) for shard, front in self._shards.fronts.items()}
            text = "".join(f"{shard}: {line}\n" for shard, (_, said) in told.items() for line in said.splitlines())
            ready = any(status == 200 for status, _ in told.values())
            await respond(send, 200 if ready else 503, text.encode() or b"knows no shard yet\n", plain, {})
            return
        if path == "/v1/shards":
            await respond(send, 200, encode(self._shards.shown()), "application/json", {})
            return
        await self._guard.admit(_text(headers.get(b"authorization")), Scope.READ)
        accept = headers.get(b"accept", b"").decode("latin-1")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(tasks_metric())
        registry.register(ByShard({shard: front.collect for shard, front in self._shards.fronts.items()}))
        body, media_type = exposition(registry, accept)
        await respond(send, 200, body, media_type, {})

    async def _readiness(self, front: Front, shard: str, scope: ASGIScope) -> tuple[int, str]:
        if not front.leads:
            return front.readiness()
        answer = await self._part(front, shard, scope)
        return (503, answer) if isinstance(answer, str) else (answer.status, answer.body.decode())

    # --- of one shard -------------------------------------------------------------------------------------------------

    async def _sync(self, node: str, scope: ASGIScope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        fronts = self._shards.fronts
        known = self._placed.get(node)
        if known is not None and (front := fronts.get(known[0])) is not None and front.knows(node):
            await front(scope, receive, send)
            return
        wanted = Scope.GATE if "executor" in _query(scope) else Scope.SYNC
        caller = await self._guard.admit(_text(headers.get(b"authorization")), wanted)
        caller.check_speaks_for((node,))
        shard = (await self._placements((node,))).get(node)
        if shard is None:
            body = await self._body(receive, headers)
            shard = await self._place(node, body)
            receive = _again(body, receive)
        await self._pass(shard, scope, receive, send)

    async def _place(self, node: str, body: bytes) -> str:
        """Of which shard a new node is, by the label that it says."""
        try:
            said = parse_json(body)
            state = said.get("state")
            labels = {} if state is None else state.get("labels", {})
            value = shard_by(self._label, labels)
        except (ValueError, AttributeError):
            raise BadInputError("sync: the body is no sync; update the older side") from None
        if state is None:
            raise HttpError(503, f"node {node} has yet to say its labels here; ask again", {"retry-after": "1"})
        shard = check_shard(str(value))
        if shard not in self._shards.fronts:
            await self._look_up(lambda: self._directory.register(shard))
        found = await self._look_up(lambda: self._directory.place(node, shard))
        if found is None:
            raise HttpError(503, f"shard {shard} was removed just now; ask again", {"retry-after": "1"})
        self._remember({node: found})
        return found

    async def _of_node(self, node: str, scope: ASGIScope, receive: Receive, send: Send) -> None:
        shard = (await self._placements((node,))).get(node)
        method = scope["method"]
        if shard is None and not scope["path"].startswith("/v1/"):
            await self._anywhere(scope, receive, send)
            return
        if shard is None and method == "PUT":
            await self._ask_all(scope, receive, send)  # one that has yet to come is kept out of whichever it comes to
            return
        if shard is None:
            await self._first(scope, receive, send)
            return
        if method != "DELETE" or scope["path"].count("/") != 3:
            await self._pass(shard, scope, receive, send)
            return
        answer = await self._part(self._front(shard), shard, scope)
        if isinstance(answer, str):
            raise HttpError(503, answer, {"retry-after": "1"})
        if answer.status == 200:
            await self._look_up(lambda: self._directory.forget(node))
            self._placed.pop(node, None)
        await _send(answer, send)

    async def _of_gate(self, gate: str, scope: ASGIScope, receive: Receive, send: Send) -> None:
        with_tables = self._with_tables()
        shard = await self._look_up(lambda: self._directory.of_gate(gate, with_tables))
        if shard is not None:
            await self._pass(shard, scope, receive, send)
        elif scope["path"].startswith("/v1/"):
            await self._first(scope, receive, send)
        else:
            await self._anywhere(scope, receive, send)

    async def _ask_gate(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """A gate, or a validation by hand: its nodes are of one shard."""
        body = await self._body(receive, dict(scope["headers"]))
        shard = await self._shard_of_gate(body, scope)
        await self._pass(shard, scope, _again(body, receive), send)

    async def _shard_of_gate(self, body: bytes, scope: ASGIScope) -> str:
        """BadInputError for one whose nodes are of two. What makes no sense, a leader tells."""
        try:
            said = parse_json(body)
        except ValueError:
            return DEFAULT_SHARD
        asked = said if isinstance(said, dict) else {}
        join = asked.get("join") if isinstance(asked.get("join"), dict) else None
        listed = asked.get("nodes") if isinstance(asked.get("nodes"), list) else []
        names = [name for name in ([join.get("node")] if join else listed or []) if isinstance(name, str)]
        pool = asked.get("pool")
        placed = dict(await self._placements(names))
        if names and not placed:
            placed = await self._by_other_names(names, scope)
        of: dict[str, str] = {}
        for name in names:
            if name in placed:
                of.setdefault(placed[name], name)
        if join is not None and of and isinstance(asked.get("job"), str):
            job, with_tables = asked["job"], self._with_tables()
            for shard in await self._look_up(lambda: self._directory.of_open_gates(job, with_tables)):
                of.setdefault(shard, "another member of the group")
        if not of and isinstance(pool, str):
            of = dict.fromkeys(await self._shards_of_pool(pool, scope), f"a node of pool {pool[:80]}")
        if len(of) > 1:
            (one, first), (other, second) = sorted(of.items())[:2]
            raise BadInputError(
                f"a gate's nodes are of one shard: {first} is of {one}, {second} of {other}; ask a gate for each"
            )
        return next(iter(of), DEFAULT_SHARD)

    async def _shards_of_pool(self, pool: str, scope: ASGIScope) -> Collection[str]:
        """
        The shards that have nodes of a pool: by what their leaders know, and by the database, which has old labels of
        those that do not answer.
        """
        now = time.monotonic()
        if (known := self._pools.get(pool)) is not None and now < known[1]:
            return (known[0],)
        with_tables = self._with_tables()
        found = set(await self._look_up(lambda: self._directory.of_pool(pool, with_tables)))
        for shard, answer in (await self._parts(_as_get(scope, "/v1/fleet"))).items():
            if isinstance(answer, Answer) and answer.status == 200:
                found.discard(shard)
                if pool in answer.json()["pools"]:
                    found.add(shard)
        if len(found) == 1:
            if len(self._pools) >= MOST_POOLS:
                self._pools.clear()
            self._pools[pool] = (next(iter(found)), now + REMEMBER_SECONDS)
        return found

    async def _by_other_names(self, names: Collection[str], scope: ASGIScope) -> dict[str, str]:
        """Of nodes that are asked for by other names than their own."""
        found: dict[str, str] = {}
        for name in list(names)[:MOST_ALIASES]:
            path = f"/v1/nodes/{name}"
            answers = await self._parts(_as_get(scope, path))
            for shard, answer in answers.items():
                if isinstance(answer, Answer) and answer.status == 200:
                    found[name] = shard
        return found

    # --- of all shards ------------------------------------------------------------------------------------------------

    async def _merge(self, scope: ASGIScope, send: Send) -> None:
        good, unanswered = self._sorted(await self._parts(scope))
        if isinstance(good, Answer):
            await _send(good, send)
            return
        found = merging.MERGED[scope["path"]](good, unanswered, _query(scope))
        if found is None:
            raise HttpError(503, f"not all shards answer: {_listed(unanswered)}", {"retry-after": "5"})
        await respond(send, 200, json.dumps(found).encode(), "application/json", {})

    async def _ask_all(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Change the same in all shards; the first answer, or the error of those that failed. Safe to repeat."""
        body = await self._body(receive, dict(scope["headers"]))
        good, unanswered = self._sorted(await self._parts(scope, body), tolerated=(404,))
        if isinstance(good, Answer):
            await _send(good, send)
            return
        if unanswered:
            done = f"it is done in {', '.join(good)}, and not in all" if good else "it is done in none"
            raise HttpError(503, f"{_listed(unanswered)}; {done}: ask again", {"retry-after": "5"})
        if len(good) == 0:
            raise AssertionError("one of them answered, or none does")
        await respond(send, 200, json.dumps(merging.of_all(list(good.values()))).encode(), "application/json", {})

    async def _first(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """
        What names nothing that the database knows by that name, such as a node by another one: the shard that knows it
        answers. 404 only where all have answered so.
        """
        body = await self._body(receive, dict(scope["headers"]))
        answers = await self._parts(scope, body)
        strange: Answer | None = None
        for answer in answers.values():
            if isinstance(answer, Answer) and answer.status != 404:
                await _send(answer, send)
                return
            strange = answer if isinstance(answer, Answer) else strange
        missing = {shard: answer for shard, answer in answers.items() if isinstance(answer, str)}
        if missing or strange is None:
            raise HttpError(503, f"not all shards answer: {_listed(missing)}; ask again", {"retry-after": "5"})
        await _send(strange, send)

    def _sorted(
        self, answers: Mapping[str, Answer | str], tolerated: Collection[int] = ()
    ) -> tuple[Mapping[str, Any] | Answer, Mapping[str, str]]:
        """
        The records of those that answered, or what one of them refuses; and why others do not answer.

        An answer of a tolerated status counts only where no other one is good.
        """
        refused = [one for one in answers.values() if isinstance(one, Answer) and 400 <= one.status < 500]
        if hard := [one for one in refused if one.status not in tolerated]:
            return hard[0], {}
        good: dict[str, Any] = {}
        unanswered: dict[str, str] = {}
        for shard, answer in answers.items():
            if isinstance(answer, str):
                unanswered[shard] = answer
            elif answer.status == 200 and (record := answer.json()) is not None:
                good[shard] = record
            elif answer.status not in tolerated:
                unanswered[shard] = answer.detail
        if not good and not unanswered and refused:
            return refused[0], {}
        return good, unanswered

    async def _parts(self, scope: ASGIScope, body: bytes = b"", only: str = "") -> Mapping[str, Answer | str]:
        """What each shard answers, or why it does not; with `only` that one alone."""
        asked = {
            shard: self._tasks.start(f"part of {shard}", self._part(front, shard, scope, body))
            for shard, front in self._shards.fronts.items()
            if only in ("", shard)
        }
        try:
            return {shard: await task for shard, task in asked.items()}
        finally:
            for task in asked.values():
                task.cancel()

    async def _part(self, front: Front, shard: str, scope: ASGIScope, body: bytes = b"") -> Answer | str:
        if front.leader is None:
            return front.readiness()[1]
        heard = _Heard()
        try:
            async with asyncio.timeout(PART_SECONDS):
                await front(_for_shard(scope, shard), _again(body, _never), heard.send)
        except TimeoutError:
            return f"its leader ({front.leader}) did not answer within {PART_SECONDS:g} s"
        return heard.answer()

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def _with_tables(self) -> tuple[str, ...]:
        return tuple(shard for shard, term in self._shards.terms.items() if term)

    async def _placements(self, nodes: Collection[str]) -> Mapping[str, str]:
        """The shards of nodes, by what is remembered, or else by the database."""
        now, fronts = time.monotonic(), self._shards.fronts
        found: dict[str, str] = {}
        for node in nodes:
            known = self._placed.get(node)
            if known is not None and (now < known[1] or ((front := fronts.get(known[0])) and front.knows(node))):
                found[node] = known[0]
        if unknown := [node for node in nodes if node not in found]:
            looked = await self._look_up(lambda: self._directory.placed(unknown))
            self._remember(looked)
            found.update(looked)
        return found

    def _remember(self, placed: Mapping[str, str]) -> None:
        if len(self._placed) + len(placed) > 2 * self._settings.max_nodes:
            self._placed.clear()
        until = time.monotonic() + REMEMBER_SECONDS
        self._placed.update({node: (shard, until) for node, shard in placed.items()})

    async def _look_up(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(PART_SECONDS):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise StoreError(f"the database did not answer within {PART_SECONDS:g} s; see that it is up") from None

    async def _body(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        most = max(self._settings.max_body_bytes, self._settings.max_state_bytes)
        return await read_body(
            receive, dict(headers), max_bytes=most, timeout_seconds=self._settings.read_timeout_seconds
        )


class _Leaders:
    """The leaders of all shards, for the pages over the whole fleet; see `ui.Leaders`."""

    def __init__(self, router: Router) -> None:
        self._router, self._reader = router, Reader()

    @property
    def names(self) -> Collection[str]:
        return tuple(self._router._shards.fronts)

    async def gather(self, request: Request, kind: Kind[V], asked: Asked, only: str) -> Gathered[V]:
        """The views of all shards, or of one. One that a leader does not make, of another version, is unanswered."""
        router = self._router
        if only and only not in self.names:
            raise no_shard(only, self.names)
        query = {name: value for name, value in dataclasses.asdict(asked).items() if value}
        scope = _as_get(_plain(request.scope), f"/page/{kind.name}", query)
        views: dict[str, V] = {}
        unanswered: dict[str, str] = {}
        for shard, answer in (await router._parts(scope, only=only)).items():
            if isinstance(answer, str):
                unanswered[shard] = answer
            elif answer.status in (401, 403):
                raise HttpError(answer.status, f"shard {shard}: {answer.detail}")
            elif answer.status != 200:
                unanswered[shard] = answer.detail
            else:
                try:
                    views[shard] = self._reader.read(shard, kind, answer.body)
                except BadInputError as error:
                    unanswered[shard] = f"{error}; update the older aggregator"
        return Gathered(views=views, unanswered=unanswered, shards=router._shards.shown().shards, only=only)

    async def follow(
        self, request: Request, shard: str, topic: str, after: str, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Read the stream of changes of a shard until it ends; nothing where there is none."""
        good = False

        async def hear(message: Message) -> None:
            nonlocal good
            if message["type"] == "http.response.start":
                good = message["status"] == 200
            elif good and (chunk := message.get("body", b"")):
                await take(chunk)

        scope = _as_get(_plain(request.scope), "/events", {"topic": topic, "after": after})
        await self._router._front(shard)(_for_shard(scope, shard), _again(b"", _never), hear)

    async def call(self, request: Request, method: str, path: str, body: bytes, query: Mapping[str, str]) -> bytes:
        """What the API answers to the visitor of a page, by the token of their cookie. HttpError for a refusal."""
        headers = [pair for pair in request.scope["headers"] if pair[0] not in (*_OF_BODY, b"authorization")]
        if (token := authorization_of(request)) is not None:
            headers.append((b"authorization", token.encode("latin-1")))
        if body:
            headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        asked = _as_get(_plain(request.scope), path, query)
        heard = _Heard()
        try:
            async with asyncio.timeout(2 * PART_SECONDS):
                await self._router({**asked, "method": method, "headers": headers}, _again(body, _never), heard.send)
        except TimeoutError:
            raise HttpError(
                503, f"{path} was not answered within {2 * PART_SECONDS:g} s; look, and ask again"
            ) from None
        answer = heard.answer()
        if answer.status != 200:
            raise HttpError(answer.status, answer.detail)
        return answer.body


_OWN = ("/livez", "/readyz", "/metrics", "/v1/shards")
_BY_SHARD = frozenset((*merging.MERGED, *_ALL_OF_FLEET, *_ONE))
"""The paths of the fleet, which know `?shard=`."""
_PAGES = ("/", "/gates", "/jobs", "/heat", "/history", "/several")
_REASON = re.compile(r"/reasons/[^/]+")


class _Heard:
    """An answer as it comes."""

    def __init__(self) -> None:
        self._status = 500
        self._headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._size = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            self._size += len(chunk)
            if self._size > PART_BYTES:
                raise HttpError(503, f"the part of a shard has more than {PART_BYTES} bytes; ask for less")
            self._chunks.append(chunk)

    def answer(self) -> Answer:
        """All of it."""
        return Answer(status=self._status, headers=self._headers, body=b"".join(self._chunks))


async def _send(answer: Answer, send: Send) -> None:
    headers = {name: value for name, value in answer.headers.items() if name not in ("content-length", "content-type")}
    await respond(send, answer.status, answer.body, answer.headers.get("content-type", "text/plain"), headers)


def _for_shard(scope: ASGIScope, shard: str) -> ASGIScope:
    headers = [(name, value) for name, value in scope["headers"] if name != SHARD]
    return {**scope, "headers": [*headers, (SHARD, shard.encode())]}


_OF_BODY = (b"content-length", b"content-type")


def _as_get(scope: ASGIScope, path: str, query: Mapping[str, str] = MappingProxyType({})) -> ASGIScope:
    headers = [pair for pair in scope["headers"] if pair[0] not in (*_OF_BODY, b"last-event-id")]
    asked, raw = urlencode(query).encode(), quote(path).encode()
    return {**scope, "method": "GET", "path": path, "raw_path": raw, "query_string": asked, "headers": headers}


def _plain(scope: ASGIScope) -> ASGIScope:
    """The scope as the server made it, without what an application has put into it."""
    return {name: scope[name] for name in _SCOPE if name in scope}


_SCOPE = ("type", "asgi", "http_version", "scheme", "headers", "client", "server", "root_path", "method")


def _again(body: bytes, receive: Receive) -> Receive:
    """A request whose body has been read already."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


async def _never() -> Message:
    """Nobody goes away."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


def _gate_named(scope: ASGIScope) -> str:
    """The gate, or the job, that a path names."""
    if scope["path"] == "/v1/gates/lease":
        return _query(scope).get("job", "")
    path: str = scope["path"]
    match = _GATE.fullmatch(path)
    return "" if match is None else _OF_GATE.sub("", match[1])


def _listed(unanswered: Mapping[str, str]) -> str:
    return "; ".join(f"{shard}: {why}" for shard, why in unanswered.items())


def _query(scope: ASGIScope) -> dict[str, str]:
    text: str = scope["query_string"].decode("latin-1")
    return {key: values[-1] for key, values in parse_qs(text, keep_blank_values=True).items()}


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")
