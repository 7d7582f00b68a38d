"""
The client of an aggregator: addresses, tokens, TLS and errors in one place, and a gate as the caller sees it.

A certificate that this client does not trust, and TLS on only one side, need a change of the command or its settings,
so they are not retried. An expired certificate is: the aggregator's operator renews it, and the same command succeeds.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import quote, urlencode, urlsplit

from checks.printable import some
from healthd.core import wire
from healthd.core.backoff import Backoff
from healthd.core.bounded import read_file
from healthd.core.errors import (
    BadInputError,
    ConfigError,
    HealthdError,
    NotFoundError,
    UnreachableError,
    connection_words,
    words_of,
)
from healthd.core.file_trust import check_file
from healthd.core.http.addresses import check_aggregator
from healthd.core.http.connection import FAILURES, Answer, Connection, NotSentError, is_cut_off
from healthd.core.model import Verdict
from healthd.core.text import span

if TYPE_CHECKING:
    from healthd.core.model import Decision, GateRequest, HandshakeAnswer, HandshakeBody

# X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED, _CRL_NOT_YET_VALID and _CRL_HAS_EXPIRED of OpenSSL's x509_vfy.h.
_PASSING_CODES = frozenset({9, 10, 11, 12})
# What OpenSSL calls an answer that is not TLS.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
PROBE_SECONDS = 3.0
"""How long the question may take whether a port speaks TLS: it is asked only where a plain request was just cut off."""


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """What verifies the other side by this CA; None is the system's. ConfigError where the file cannot be used."""
    if ca_file is not None:
        check_file(ca_file, "CA file")
    try:
        if ca_file is not None and ca_file.is_fifo():
            raise OSError("it is a pipe")  # OpenSSL would wait in it, and hear no signal
        return ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except (OSError, ssl.SSLError) as error:
        if ca_file is None:
            raise ConfigError(f"the system's CAs cannot be loaded: {words_of(error)}; use --ca-file") from None
        raise ConfigError(f"{ca_file}: not a CA file: {words_of(error)}; name another with --ca-file") from None


def verification(url: str, ca_file: Path | None = None) -> ssl.SSLContext | Literal[False]:
    """
    How a client verifies the other side of `url`: by a CA file, else by the authorities of the system.

    False without TLS, for which all authorities would be loaded in vain; a bad CA file is told there too.
    """
    return trusting(ca_file) if ca_file is not None or not url.startswith("http://") else False


def setting_to_change(url: str, error: Exception) -> str | None:
    """Why no request to `url` can succeed with these settings, and what to change; None where another try may help."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return None if cause.verify_code in _PASSING_CODES else connection_words(error)
        if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
            return connection_words(error)
    return https_instead(url) if is_cut_off(error) else None


def https_instead(url: str) -> str | None:
    """What to change where `url` is plain HTTP and its port speaks TLS; None otherwise."""
    address = urlsplit(url)
    if address.scheme != "http" or not _speaks_tls(address.hostname or "", address.port or 80):
        return None
    return f"it speaks TLS: write https://{address.netloc}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came of; at most as many as a library nests."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent, and nothing is believed
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host, port), PROBE_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        return True
    return False


# Talking to an aggregator from the command line: one place for addresses, tokens, TLS and errors.


# How long one held request may stay open: load balancers cut at 30 to 60 s.
HOLD_SECONDS = 20.0
# Beyond what was asked to be held: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0
# While an answer is awaited and another aggregator could be asked, the one that was asked must answer /livez: each so
# often, within that time. One that is frozen takes connections and says nothing. Both follow `slack_seconds`.
LOOK_AGAIN_SECONDS = 0.2  # before what could not be cut yet is cut again
ALIVE_EVERY_RATIO, ALIVE_WITHIN_RATIO = 0.2, 0.2
# A page of 500 nodes with all that is known of them is some 20 MB; what is longer than this is not ours.
ANSWER_BYTES = 64 << 20
PAGE_BYTES = 64 << 10
# From the first byte of an answer to its last: who sends a byte a second must not keep a job's hook for a day.
ANSWER_SECONDS = 60.0
TOKEN_FILE_BYTES = 64 << 10
# What an aggregator answers to a question that cannot be meant, to no token, and to one that may not do this.
BAD_REQUEST, NO_TOKEN, WRONG_TOKEN, TOO_MANY = 400, 401, 403, 429
# Refusals that no second try can change: the question or the token has to.
ANSWERED_BY_NOBODY = frozenset({502, 503, 504})
"""One that stands by and knows no leader, or whatever is before it: nothing was done, and another one may answer."""
USAGE = frozenset({BAD_REQUEST, NO_TOKEN, WRONG_TOKEN, 404, 409, 413, 422})


class RefusedError(HealthdError):
    """The aggregator understood and refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def told(self) -> HealthdError:
        """As ConfigError where the question or the token is wrong, so that no second try can help; else itself."""
        return ConfigError(str(self)) if self.status in USAGE else self


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """
    Where the aggregators of a fleet are, the preferred first, and how to speak to them. `token` None sends none;
    `ca_file` None trusts the system's.

    `token_file` in the place of `token` is read again when it changes: projected tokens of Kubernetes last an hour, and
    a gate may hold for longer.
    """

    urls: tuple[str, ...]
    token: str | None
    ca_file: Path | None
    token_file: Path | None = None

    @property
    def names(self) -> str:
        """The addresses, for a sentence."""
        return ", ".join(self.urls)


TOKEN_REMEDY = "name another with --token-file, or make one with 'healthd token'"


def read_token(file: Path, *, remedy: str = TOKEN_REMEDY) -> str:
    """The first line of a token file. ConfigError names the file, and the remedy where it holds none."""
    check_file(file, "token file")
    try:
        text = read_file(file, TOKEN_FILE_BYTES).decode().strip()
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the token cannot be read: {words_of(error)}; {remedy}") from None
    if not text:
        raise ConfigError(f"{file}: contains no token; {remedy}")
    token = text.splitlines()[0].strip()
    if not (token.isascii() and token.isprintable() and " " not in token):  # no header could carry it
        raise ConfigError(f"{file}: a token is one word of ASCII letters, digits and signs; copy it again")
    return token


class _Token:
    """A token, or the one that a file has now. ConfigError where the file has none at the start."""

    def __init__(self, token: str | None, file: Path | None) -> None:
        self._file = file
        self._stamp = None if file is None else _stamp(file)
        self._token = token if file is None else read_token(file)

    def now(self) -> str | None:
        """The token; of a file that cannot be read any more the last one, which the aggregator may still take."""
        if self._file is not None and (stamp := _stamp(self._file)) not in (None, self._stamp):
            with contextlib.suppress(ConfigError):
                self._token, self._stamp = read_token(self._file), stamp
        return self._token


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What is another one when the file was written or replaced; None for a pipe, which is read once."""
    try:
        status = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class BusyError(UnreachableError):
    """The aggregator answers, but not now: the caller has as many open gates or held requests as it may (429)."""


class _NextError(UnreachableError):
    """The address gives no answer, and another one may be asked the same without doing it twice."""


class _SilentError(OSError):
    """The other side takes connections and answers nothing."""


class Aggregator:
    """
    A client of the aggregators of one fleet, each of which answers for all. The one that answered last is asked first.
    Where it cannot be reached, says 503 or is frozen, the next one is asked the same, within the same time, if twice is
    as once; `on_next` is told what failed. `slack_seconds` is how long an answer that is not held back may take.
    """

    def __init__(self, endpoint: Endpoint, *, slack_seconds: float = SLACK_SECONDS) -> None:
        self._slack_seconds = slack_seconds
        self.on_next: Callable[[UnreachableError], None] | None = None
        for url in endpoint.urls or ("",):
            check_aggregator(url, where="--aggregator")
        self._token = _Token(endpoint.token, endpoint.token_file)
        self._urls = tuple(url.rstrip("/") for url in endpoint.urls)
        self._asked = 0
        plain = next((url for url in self._urls if not url.startswith("http://")), self._urls[0])
        self._tls = verification(plain, endpoint.ca_file) or None
        self._idle: dict[str, list[Connection]] = {}
        self._closed = False

    @property
    def url(self) -> str:
        """The address that is asked now."""
        return self._urls[self._asked]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True  # a thread that nobody waits for asks nothing more
        for connection in [one for idle in self._idle.values() for one in idle]:
            connection.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        hold_seconds: float = HOLD_SECONDS,
    ) -> bytes:
        """
        The body of a good answer; UnreachableError where nobody answers (5xx too), RefusedError with the reason.

        ConfigError where no try can succeed with this address and CA: see `healthd.core.http.client`.

        `hold_seconds` is how long the other side may hold the answer back, as it was asked to.
        """
        content = None if body is None else wire.encode(wire.sparse(body))
        params = {key: value for key, value in (query or {}).items() if value is not None}
        held, twice = "wait" in params, _twice_is_as_once(method, path)
        end = time.monotonic() + hold_seconds + self._slack_seconds
        failed: list[HealthdError] = []
        while True:
            others = len(self._urls) - len(failed) - 1
            left = end - time.monotonic()
            try:
                return self._ask(
                    method,
                    path,
                    content,
                    params,
                    # An answer that is held back says nothing for long; there only /livez tells a frozen aggregator.
                    seconds=left / (others + 1) if twice and not held else left,
                    connect_seconds=min(SLACK_SECONDS, self._slack_seconds, left) / (others + 1),
                    watched=twice and others > 0,
                )
            except (_NextError, ConfigError) as error:
                failed.append(error)
                self._asked = (self._asked + 1) % len(self._urls)
                if len(self._urls) == 1:
                    raise
            except UnreachableError:
                self._asked = (self._asked + 1) % len(self._urls)
                raise
            if not others:
                raise self._nobody(failed)
            if self.on_next is not None:
                self.on_next(UnreachableError(str(failed[-1])))
            if held:
                end = max(end, time.monotonic() + self._slack_seconds)
                hold = max(0.0, min(hold_seconds, end - time.monotonic() - self._slack_seconds))
                params["wait"] = f"{hold:g}"

    def _nobody(self, failed: Sequence[HealthdError]) -> HealthdError:
        """What is said when no address answers; each is named."""
        told = [str(error).removeprefix("aggregator ") for error in failed]
        text = f"none of {len(self._urls)} aggregators responds: {'; '.join(told)}"
        return ConfigError(text) if all(isinstance(one, ConfigError) for one in failed) else UnreachableError(text)

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Mapping[str, Any],
        *,
        seconds: float,
        connect_seconds: float,
        watched: bool,
    ) -> bytes:
        """As `call`, of the address that is asked now; _NextError where another one may be."""
        headers = {} if content is None else {"Content-Type": "application/json"}
        if token := self._token.now():
            headers["Authorization"] = f"Bearer {token}"
        try:
            answer = self._exchange(
                method,
                path,
                content,
                headers,
                params,
                seconds=seconds,
                connect_seconds=connect_seconds,
                watched=watched,
            )
        except _SilentError as error:
            raise _NextError(f"aggregator {self.url} does not respond: {error}") from None
        except FAILURES as error:
            if (change := setting_to_change(self.url, error)) is not None:
                raise ConfigError(f"aggregator {self.url}: {change}") from None
            text = f"aggregator {self.url} cannot be reached: {connection_words(error)}"
            raise (_NextError if _may_ask_again(method, path, error) else UnreachableError)(text) from None
        status, content_type, found = answer.status, answer.kind, answer.body
        if 200 <= status < 300:
            if "json" not in content_type and found.strip() not in (b"", b"ok"):
                raise UnreachableError(f"aggregator {self.url} did not return JSON: is this really an aggregator?")
            return found
        raise self._refusal(status, answer.phrase, content_type, found, with_token=token is not None)

    def _refusal(self, status: int, phrase: str, content_type: str, found: bytes, *, with_token: bool) -> HealthdError:
        """What an answer that is not good comes to."""
        detail = problem_in(found)[1] or f"HTTP {status} {phrase}"
        if status == NO_TOKEN and not with_token:
            detail = "a token is required: name its file with --token-file or HEALTHD_TOKEN_FILE"
        elif status in (NO_TOKEN, WRONG_TOKEN):
            detail += "; use the file of another token with --token-file or HEALTHD_TOKEN_FILE"
        if status == BAD_REQUEST and "json" not in content_type and (change := https_instead(self.url)) is not None:
            return ConfigError(f"aggregator {self.url}: {change}")  # nginx and Go's servers answer plain HTTP so
        if status in ANSWERED_BY_NOBODY:
            return _NextError(f"aggregator {self.url}: {detail}")
        if status == TOO_MANY:
            return BusyError(f"aggregator {self.url}: {detail}")
        if not 400 <= status < 500 or status == 408 or "json" not in content_type:
            return UnreachableError(f"aggregator {self.url}: {detail}")
        return RefusedError(f"aggregator {self.url}: {detail}", status)

    def _exchange(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        params: Mapping[str, Any],
        *,
        seconds: float,
        connect_seconds: float,
        watched: bool,
    ) -> Answer:
        """The answer, bounded in size and time."""
        url = self.url
        connection = self._connection(url)
        try:
            with self._watched(url, connection) if watched else contextlib.nullcontext():
                return connection.exchange(
                    method,
                    path if not params else f"{path}?{urlencode(params, doseq=True)}",
                    content,
                    headers,
                    connect_seconds=connect_seconds,
                    send_seconds=min(SLACK_SECONDS, self._slack_seconds),
                    seconds=seconds,
                    body_bytes=ANSWER_BYTES,
                    body_seconds=ANSWER_SECONDS,
                )
        except BadInputError as error:
            raise UnreachableError(f"aggregator {url}: its answer to {path} does not end: {error}") from None
        finally:
            if self._closed:
                connection.close()
            self._idle.setdefault(url, []).append(connection)

    def _connection(self, url: str) -> Connection:
        """One that is not in use, or a new one: another thread may be in the middle of a request. RuntimeError."""
        if self._closed:
            raise RuntimeError("this client is closed")
        try:
            return self._idle.get(url, []).pop()
        except IndexError:
            return Connection(url, self._tls)

    @contextlib.contextmanager
    def _watched(self, url: str, asked: Connection) -> Iterator[None]:
        """End what is asked meanwhile with a _SilentError once the aggregator does not answer /livez."""
        every, within = (ratio * self._slack_seconds for ratio in (ALIVE_EVERY_RATIO, ALIVE_WITHIN_RATIO))
        over, silent = threading.Event(), threading.Event()

        def look() -> None:
            eye = Connection(url, self._tls)
            while not over.wait(every):
                try:
                    eye.exchange(
                        "GET",
                        "/livez",
                        None,
                        {},
                        connect_seconds=within,
                        send_seconds=within,
                        seconds=within,
                        body_bytes=PAGE_BYTES,
                        body_seconds=within,
                    )
                except (*FAILURES, BadInputError):
                    while not over.is_set():  # what is still connecting cannot be cut yet
                        silent.set()
                        asked.cut()
                        over.wait(LOOK_AGAIN_SECONDS)
            eye.close()

        threading.Thread(target=look, name="liveness of the aggregator", daemon=True).start()
        try:
            yield
        except FAILURES:
            if silent.is_set():
                raise _SilentError(f"no answer to /livez in {within:g} s") from None
            raise
        finally:
            over.set()

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a path."""
        return self.call_json("GET", path, query=query)

    def call_json(self, method: str, path: str, *, query: Mapping[str, Any] | None = None) -> Any:
        """As `call`, and the answer's JSON."""
        try:
            return wire.decode(self.call(method, path, query=query), Any, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}{path} did not return JSON: {error}") from None


def _may_ask_again(method: str, path: str, error: Exception) -> bool:
    """Whether a request that failed so may be sent once more elsewhere: it was not sent, or twice is as once."""
    return isinstance(error, NotSentError) or _twice_is_as_once(method, path)


_SAFE_CHANGES = ("/v1/gates", "/v1/fleet/recover", "/v1/fleet/breaker/reset")


def _twice_is_as_once(method: str, path: str) -> bool:
    return method != "POST" or path.startswith(_SAFE_CHANGES)


def problem_in(body: bytes) -> tuple[str, str]:
    """Title and detail of the problem document of a refusal, one line each; empty where there is none."""
    try:
        problem = wire.decode(body[:65536], dict[str, Any], what="problem")
    except BadInputError:
        return "", ""
    title, detail = (" ".join(str(problem.get(name) or "").split())[:500] for name in ("title", "detail"))
    return title, detail or title


# What was asked of a gate beside its answer: pure. Whether an admission answers it (what starts a job is the names in
# it, so they are looked at), and for people: which nodes were asked for, which terms were asked and which were
# applied.


MOST_NAMED = 3
MOST_ASKED = 16
"""Nodes that are named in a line on what was asked."""


def why_unanswered(request: GateRequest, decision: Decision) -> str:
    """
    Why an admission is no answer to the request (no nodes, others than asked, too few); empty where it is one.

    Of a pool the aggregator chooses the nodes, so only their number can be judged; of a group the members that a gate
    admits whatever it found (`would`) may be fewer than its size.
    """
    if decision.decision is not Verdict.ADMIT:
        return ""
    names = [node.asked or node.node for node in decision.nodes]
    if not names:
        return "lists no node"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"lists {twice[0]} twice"
    least, most = _bounds(request, anyway=decision.would is not None)
    if request.nodes and (strange := [name for name in names if name not in request.nodes]):
        more = f" and {len(strange) - MOST_NAMED} more" if len(strange) > MOST_NAMED else ""
        return f"lists {', '.join(strange[:MOST_NAMED])}{more}, which was not requested"
    if not least <= len(names) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        return f"lists {len(names)} nodes although {wanted} were requested"
    return ""


def _bounds(request: GateRequest, *, anyway: bool) -> tuple[int, int]:
    """How few and how many nodes an admission may name."""
    if request.join is not None:
        return (1 if anyway else request.min_nodes or request.join.size), request.join.size
    most = len(request.nodes) or request.count or 0
    return request.min_nodes or most, most


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a gate: what the request said (None: it left that to the settings), and what was applied."""

    name: str
    asked: str | None
    applied: str


def nodes_asked(request: GateRequest) -> str:
    """Which nodes a request asks for: `n1, n2, n3`, `2 nodes of pool train`, `group a of 4`."""
    if request.join is not None:
        text = f"group {request.join.group} of {request.join.size}"
        return f"{text}: {some(request.nodes, MOST_ASKED)}" if request.nodes else text
    if request.pool is not None:
        return f"{request.count} node{'' if request.count == 1 else 's'} of pool {request.pool}"
    return some(request.nodes, MOST_ASKED)


def terms_of(decision: Decision) -> tuple[Term, ...]:
    """The terms of a decision, as far as it has them."""
    asked = {} if decision.request is None else _as_asked(decision.request)
    applied = decision.policy
    words: list[tuple[str, str, str]] = []
    if "mode" in applied and "tier" in applied:
        words += [("mode", "mode", str(applied["mode"])), ("tier", "tier", str(applied["tier"]))]
    for key, name in (("max_age_seconds", "maximum age of the evidence"), ("wait_seconds", "wait")):
        if isinstance(applied.get(key), (int, float)):
            words.append((key, name, span(applied[key])))
    if applied.get("runtime_seconds"):
        words.append(("runtime_seconds", "expected runtime", span(applied["runtime_seconds"])))
    if applied.get("lease_seconds"):
        words.append(("lease_seconds", "lease if no node can observe the job's end", span(applied["lease_seconds"])))
    if "collective" in applied:
        words.append(("collective", "collectives over the nodes", _yes(applied["collective"])))
    if "needed" in applied and "wanted" in applied:
        words.append(("needed", "nodes needed", f"{applied['needed']} of {applied['wanted']}"))
    return tuple(Term(name=name, asked=asked.get(key), applied=text) for key, name, text in words)


def _as_asked(request: GateRequest) -> Mapping[str, str]:
    """The terms that a request names, in the words of `terms_of`."""
    found: dict[str, Any] = {
        "mode": None if request.mode is None else request.mode.value,
        "tier": None if request.tier is None else request.tier.value,
        "max_age_seconds": None if request.max_age_seconds is None else span(request.max_age_seconds),
        "wait_seconds": None if request.wait_seconds is None else span(request.wait_seconds),
        "runtime_seconds": None if request.runtime_seconds is None else span(request.runtime_seconds),
        "lease_seconds": None if request.lease_seconds is None else span(request.lease_seconds),
        "collective": None if request.collective is None else _yes(request.collective),
        "needed": None if request.min_nodes is None else f"at least {request.min_nodes}",
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def _yes(value: object) -> str:
    return "yes" if value else "no"


# A gate from the side of who asks: ask until it is decided, confirm, leave, give back, tell how the job ended.


# Gates of one job that are looked through for an attempt: as many as one page holds.
MOST_ATTEMPTS = 500
NOT_FOUND = 404
# How long a gate is asked for where neither the request nor the aggregator says.
WAIT_SECONDS = 600.0
# An aggregator says itself when a gate has expired. It may hold that back while it takes bad nodes out of the way
# (`answer` under `[actuator]`, 120 s at most), so only who is silent on it for longer gives no answer any more.
GRACE_SECONDS = 150.0
# One that was heard and restarts is back by then, also where the wait ends meanwhile.
BACK_SECONDS = 15.0


WITHDRAWN = "Released"
"""The code of the reason in the decision of a gate that was withdrawn while it was open."""


@dataclass(frozen=True, kw_only=True)
class GivenBack:
    """
    The nodes whose leases end, none where the gate was `withdrawn` before it had any, or where the nodes have let go
    after an earlier release. `at` is the time of the first release; None: of an older aggregator, which does not say.
    """

    nodes: tuple[str, ...]
    withdrawn: bool
    at: float | None


class NotAdmittedError(HealthdError):
    """The aggregator is there and no yes came of it: never to be taken for one that cannot be reached."""


class GateClient(Aggregator):
    """
    A client for gates. `slack_seconds` is as of `Aggregator`, `grace_seconds` how much later than its wait a gate may
    be decided.
    """

    def __init__(
        self, endpoint: Endpoint, *, slack_seconds: float = SLACK_SECONDS, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        super().__init__(endpoint, slack_seconds=slack_seconds)
        self._grace_seconds = grace_seconds

    def withdraw(self, job: str, attempt: int, *, patience_seconds: float = 0.0) -> GivenBack:
        """
        End the gate of a job, or give its nodes back. Safe to repeat. `patience_seconds` is how much longer than usual
        an aggregator may take: one that takes over needs some.

        NotFoundError where there is no such gate and no lease.
        """
        query = {"job": job, "attempt": attempt}
        try:
            found = self.call("DELETE", "/v1/gates/lease", query=query, hold_seconds=patience_seconds)
        except RefusedError as error:
            raise NotFoundError(str(error)) if error.status == NOT_FOUND else error from None
        try:
            said = wire.decode(found, dict[str, Any], what="its answer")
            decision = said.get("decision") or {}
            codes = [reason["code"] for reason in decision.get("reasons", ())]
            at = said.get("released_at")
            return GivenBack(
                nodes=tuple(str(row["node"]) for row in said["released"]),
                withdrawn=WITHDRAWN in codes,
                at=float(at) if isinstance(at, int | float) else None,
            )
        except (BadInputError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its answer cannot be read: {error}") from None

    def newest_gate(self, job: str) -> str | None:
        """The id of a job's newest gate; None when it has none."""
        return next((gate for gate, _ in self._gates(job, most=1)), None)

    def leave(self, gate: str, member: str) -> None:
        """Tell a gate that a member of its group ends without starting the job. Safe to repeat."""
        self.call("DELETE", f"/v1/gates/{gate}/members/{quote(member, safe='')}", hold_seconds=0.0)

    def handshake(self, gate: str, step: HandshakeBody, *, wait_seconds: float) -> HandshakeAnswer:
        """One step of the end of a gate that several hooks ask for, held for `wait_seconds`. Safe to repeat."""
        path, query = f"/v1/gates/{gate}/handshake", {"wait": f"{wait_seconds:g}"}
        found = self.call("POST", path, body=step, query=query, hold_seconds=wait_seconds)
        from healthd.core.model import HandshakeAnswer  # records of answers wait until there is one

        try:
            return wire.decode(found, HandshakeAnswer, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}: {error}") from None

    def outcome(self, job: str, attempt: int, status: str, message: str) -> str | None:
        """Tell how a job ended; the id of its gate, None when there is none. Safe to repeat."""
        gate = self.gate_of(job, attempt)
        if gate is not None:
            body = {"status": status, "message": message}
            self.call("POST", f"/v1/gates/{gate}/outcome", body=body, hold_seconds=0.0)
        return gate

    def gate_of(self, job: str, attempt: int) -> str | None:
        """The id of the gate of a job and attempt; None when there is none."""
        return next((gate for gate, asked in self._gates(job, most=MOST_ATTEMPTS) if asked == attempt), None)

    def _gates(self, job: str, *, most: int) -> tuple[tuple[str, int], ...]:
        """Gates of a job, newest first: the id, and for which attempt it was asked."""
        found = self.call("GET", "/v1/gates", query={"job": job, "limit": most}, hold_seconds=0.0)
        try:
            # Gates of a group count on by themselves (`attempt`): what its members asked for is listed apart.
            return tuple(
                (str(gate["id"]), int(gate.get("asked_attempt", gate["attempt"])))
                for gate in wire.decode(found, dict[str, Any], what="its answer")["gates"]
            )
        except (BadInputError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its list of gates cannot be read: {error}") from None

    def ask(
        self,
        request: GateRequest,
        *,
        on_hold: Callable[[Decision], None],
        longest_seconds: float | None = None,
        gone_seconds: float | None = None,
        on_away: Callable[[UnreachableError], None] | None = None,
        hold_seconds: float = HOLD_SECONDS,
    ) -> Decision:
        """
        Ask for a gate and follow it to its last word.

        A lost answer is asked again: the same job and attempt get the same gate. `on_hold` hears every `hold_seconds`
        what it waits for; `on_away` is told whenever the aggregator goes away, or another one is asked instead.

        How long is the aggregator's to say: the wait of its gate, counted from the first that is heard of it. Until
        then, and where it says none, it is the request's, else WAIT_SECONDS; `longest_seconds` beats all of them.
        NotAdmittedError for an answer that cannot be read, or that admits other nodes than were asked for.
        UnreachableError when the aggregator was away at the end of that, or for `gone_seconds` at a stretch (None: it
        may come back at any time). NotAdmittedError when it was there and had decided nothing `grace_seconds` later.
        """
        self.on_next = on_away
        began = heard = time.monotonic()
        wait = WAIT_SECONDS if request.wait_seconds is None else request.wait_seconds
        wait = wait if longest_seconds is None else longest_seconds
        backoff = Backoff(0.2, 5.0 if gone_seconds is None else min(5.0, gone_seconds / 4))
        failures, gate, away = 0, "", False
        while True:
            left = began + wait + self._grace_seconds - time.monotonic()
            if left <= 0:
                raise NotAdmittedError(f"aggregator {self.url} did not decide gate {gate} within its {wait:g} s")
            try:
                # Nothing is known of the gate yet: who only hears it after the wait has no more use for it.
                most = left if gate else max(0.0, began + wait - time.monotonic())
                hold = max(0.0, min(HOLD_SECONDS, hold_seconds, most))
                body = self.call("POST", "/v1/gates", body=request, query={"wait": f"{hold:g}"}, hold_seconds=hold)
            except UnreachableError as error:
                now, failures = time.monotonic(), failures + 1
                pause = backoff.after(failures)
                end = max(began + wait, heard + BACK_SECONDS) if gate else began + wait
                if now + pause > end or (gone_seconds is not None and now - heard > gone_seconds):
                    if isinstance(error, BusyError):
                        raise NotAdmittedError(str(error)) from None
                    raise
                if not away and on_away is not None:
                    on_away(error)
                away = True
                time.sleep(pause)
                continue
            heard, away, failures = time.monotonic(), False, 0
            decision = self._read(body)
            if decision.decision is not Verdict.HOLD:
                if why := why_unanswered(request, decision):
                    raise NotAdmittedError(f"aggregator {self.url}: its answer admits but {why}; not admitted")
                return decision
            if decision.id != gate and longest_seconds is None:
                # Another one than before where the aggregator has lost its database: that one counts anew.
                began, wait = heard, _wait_of(decision, wait)
            gate = decision.id
            on_hold(decision)

    def _read(self, body: bytes) -> Decision:
        """The decision in an answer; NotAdmittedError where there is none, so that its gate is given back."""
        from healthd.core.model import Decision

        try:
            return wire.decode(body, Decision, what="its answer")
        except BadInputError as error:
            raise NotAdmittedError(f"aggregator {self.url}: {error}; not admitted") from None


def _wait_of(decision: Decision, otherwise: float) -> float:
    """How long the aggregator says that it holds this gate, in seconds."""
    told = decision.policy.get("wait_seconds")
    return float(told) if isinstance(told, (int, float)) and 0 <= told < math.inf else otherwise
