"""Talking to an aggregator from the command line: one place for addresses, tokens, TLS and errors."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from healthd.core import wire
from healthd.core.bounded import read_file, read_parts
from healthd.core.errors import BadInputError, ConfigError, HealthdError, UnreachableError, connection_words, words_of
from healthd.core.file_trust import check_file
from healthd.core.http import tls

# How long one held request may stay open: load balancers cut at 30 to 60 s.
HOLD_SECONDS = 20.0
# Beyond what was asked to be held: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0
# A page of 500 nodes with all that is known of them is some 20 MB; what is longer than this is not ours.
ANSWER_BYTES = 64 << 20
# From the first byte of an answer to its last: who sends a byte a second must not keep a job's hook for a day.
ANSWER_SECONDS = 60.0
TOKEN_FILE_BYTES = 64 << 10
# What an aggregator answers to a question that cannot be meant, to no token, and to one that may not do this.
BAD_REQUEST, NO_TOKEN, WRONG_TOKEN = 400, 401, 403
# Refusals that no second try can change: the question or the token has to.
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
    """Where an aggregator is and how to speak to it. `token` None sends none; `ca_file` None trusts the system's."""

    url: str
    token: str | None
    ca_file: Path | None


def read_token(file: Path | None) -> str | None:
    """The first line of a token file; None without a file. ConfigError names the file."""
    if file is None:
        return None
    check_file(file, "token file")
    try:
        text = read_file(file, TOKEN_FILE_BYTES).decode().strip()
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: the token cannot be read: {words_of(error)}; name another with --token-file"
        ) from None
    if not text:
        raise ConfigError(f"{file}: holds no token; make one with 'healthd token'")
    token = text.splitlines()[0].strip()
    if not (token.isascii() and token.isprintable() and " " not in token):  # no header could carry it
        raise ConfigError(f"{file}: a token is one word of letters, digits and signs of ASCII; copy it again")
    return token


class Aggregator:
    """A client of one aggregator. `slack_seconds` is how long an answer that is not held back may take."""

    def __init__(self, endpoint: Endpoint, *, slack_seconds: float = SLACK_SECONDS) -> None:
        self._slack_seconds = slack_seconds
        self._socket: socket.socket | None = None
        if not endpoint.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--aggregator {endpoint.url!r} is not a URL; write http://host:8090 or https://host:8090"
            )
        headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        verify = tls.verification(endpoint.url, endpoint.ca_file)
        self.url = endpoint.url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, verify=verify, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

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

        ConfigError where no try can succeed with this address and CA: see `healthd.core.http.tls`.

        `hold_seconds` is how long the other side may hold the answer back, as it was asked to.
        """
        content = None if body is None else wire.encode(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        params = {key: value for key, value in (query or {}).items() if value is not None}
        try:
            status, phrase, content_type, found = self._exchange(method, path, content, headers, params, hold_seconds)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if (change := tls.setting_to_change(self.url, error)) is not None:
                raise ConfigError(f"aggregator {self.url}: {change}") from None
            raise UnreachableError(f"aggregator {self.url} cannot be reached: {connection_words(error)}") from None
        if 200 <= status < 300:
            if "json" not in content_type and found.strip() not in (b"", b"ok"):
                raise UnreachableError(f"aggregator {self.url} did not answer JSON: is this really an aggregator?")
            return found
        detail = problem_in(found)[1] or f"HTTP {status} {phrase}"
        if status == NO_TOKEN and "authorization" not in self._http.headers:
            detail = "a token is required: name its file with --token-file or HEALTHD_TOKEN_FILE"
        elif status in (NO_TOKEN, WRONG_TOKEN):
            detail += "; name the file of another with --token-file or HEALTHD_TOKEN_FILE"
        if status == BAD_REQUEST and "json" not in content_type and (change := tls.https_instead(self.url)) is not None:
            raise ConfigError(f"aggregator {self.url}: {change}")  # nginx and Go's servers answer plain HTTP so
        if not 400 <= status < 500 or status in (408, 429) or "json" not in content_type:
            raise UnreachableError(f"aggregator {self.url}: {detail}")
        raise RefusedError(f"aggregator {self.url}: {detail}", status)

    def _exchange(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        params: Mapping[str, Any],
        hold_seconds: float,
    ) -> tuple[int, str, str, bytes]:
        """Status, its phrase, the type of the content and the content, bounded in size and time."""
        seconds = hold_seconds + self._slack_seconds
        timeout = httpx.Timeout(min(SLACK_SECONDS, self._slack_seconds), read=seconds)
        head = threading.Timer(seconds + 1.0, self._cut)  # the time-out of httpx, which is first, counts from each byte
        head.daemon = True

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                self._socket = info["return_value"].get_extra_info("socket")
            elif event.endswith(".receive_response_headers.started"):
                head.start()

        request = self._http.build_request(
            method, path, content=content, headers=headers, params=params, timeout=timeout, extensions={"trace": trace}
        )
        try:
            sent = self._http.send(request, stream=True)
        finally:
            head.cancel()
        with contextlib.closing(sent) as answer:
            try:
                body = read_parts(answer.iter_bytes(), ANSWER_BYTES, until=time.monotonic() + ANSWER_SECONDS)
            except BadInputError as error:
                text = f"aggregator {self.url}: its answer to {path} has no end: {error}"
                raise UnreachableError(text) from None
            return answer.status_code, answer.reason_phrase, str(answer.headers.get("content-type", "")), body

    def _cut(self) -> None:
        """End the connection, whatever comes over it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS too: its own would not be thread-safe

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a path."""
        return self.call_json("GET", path, query=query)

    def call_json(self, method: str, path: str, *, query: Mapping[str, Any] | None = None) -> Any:
        """As `call`, and the answer's JSON."""
        try:
            return wire.decode(self.call(method, path, query=query), Any, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}{path} did not answer JSON: {error}") from None


def problem_in(body: bytes) -> tuple[str, str]:
    """Title and detail of the problem document of a refusal, one line each; empty where there is none."""
    try:
        problem = wire.decode(body[:65536], dict[str, Any], what="problem")
    except BadInputError:
        return "", ""
    title, detail = (" ".join(str(problem.get(name) or "").split())[:500] for name in ("title", "detail"))
    return title, detail or title
