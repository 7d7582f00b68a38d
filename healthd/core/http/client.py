"""The client of an aggregator: addresses, tokens and errors in one place."""

from __future__ import annotations

import contextlib
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import (
    BadInputError,
    ConfigError,
    HealthdError,
    UnreachableError,
    connection_words,
    words_of,
)
from healthd.core.file_trust import check_file
from healthd.core.http.addresses import check_aggregator
from healthd.core.http.connection import FAILURES, Answer, Connection, NotSentError
from healthd.core.http.trust import https_instead, setting_to_change, verification

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
ANSWERED_BY_NOBODY = frozenset({502, 503, 504})
"""One that stands by and knows no leader, or whatever is before it: nothing was done, and another one may answer."""
# Refusals that no second try can change: the question or the token has to.
USAGE = frozenset({BAD_REQUEST, NO_TOKEN, WRONG_TOKEN, 404, 409, 413, 422})

TOKEN_REMEDY = "name another with --token-file, or make one with 'healthd token'"

_SAFE_CHANGES = ("/v1/gates", "/v1/fleet/recover", "/v1/fleet/breaker/reset")


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

        ConfigError where no try can succeed with this address and CA: see `healthd.core.http.trust`.

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


def problem_in(body: bytes) -> tuple[str, str]:
    """Title and detail of the problem document of a refusal, one line each; empty where there is none."""
    try:
        problem = wire.decode(body[:65536], dict[str, Any], what="problem")
    except BadInputError:
        return "", ""
    title, detail = (" ".join(str(problem.get(name) or "").split())[:500] for name in ("title", "detail"))
    return title, detail or title


class RefusedError(HealthdError):
    """The aggregator understood and refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def told(self) -> HealthdError:
        """As ConfigError where the question or the token is wrong, so that no second try can help; else itself."""
        return ConfigError(str(self)) if self.status in USAGE else self


class BusyError(UnreachableError):
    """The aggregator answers, but not now: the caller has as many open gates or held requests as it may (429)."""


class _NextError(UnreachableError):
    """The address gives no answer, and another one may be asked the same without doing it twice."""


class _SilentError(OSError):
    """The other side takes connections and answers nothing."""


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


def _may_ask_again(method: str, path: str, error: Exception) -> bool:
    """Whether a request that failed so may be sent once more elsewhere: it was not sent, or twice is as once."""
    return isinstance(error, NotSentError) or _twice_is_as_once(method, path)


def _twice_is_as_once(method: str, path: str) -> bool:
    return method != "POST" or path.startswith(_SAFE_CHANGES)
