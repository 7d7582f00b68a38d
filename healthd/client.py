"""
Talking to an aggregator from the command line: one place for addresses, tokens, TLS, retries and errors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from healthd import wire
from healthd.errors import ConfigError, HealthdError, UnreachableError, connection_words, words_of
from healthd.model import Decision, GateRequest, Verdict

# How long one held request may stay open: load balancers cut at 30 to 60 s.
HOLD_SECONDS = 20.0
# Beyond what was asked to be held: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0
# A page of 500 nodes with all that is known of them is some 20 MB; what is longer than this is not ours.
ANSWER_BYTES = 64 << 20
# From the first byte of an answer to its last: who sends a byte a second must not keep a job's hook for a day.
ANSWER_SECONDS = 60.0
# What an aggregator answers to who brings no token.
NO_TOKEN = 401
# Gates of one job that are looked through for an attempt: as many as one page holds.
MOST_ATTEMPTS = 500
# An aggregator says itself when a gate has expired; so much later it is taken for away.
GRACE_SECONDS = 15.0


class RefusedError(HealthdError):
    """The aggregator understood and refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


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
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: the token cannot be read: {words_of(error)}; name another with --token-file"
        ) from None
    if not text:
        raise ConfigError(f"{file}: holds no token; make one with 'healthd token'")
    return text.splitlines()[0].strip()


class Aggregator:
    """A client of one aggregator. `slack_seconds` is how long an answer that is not held back may take."""

    def __init__(self, endpoint: Endpoint, *, slack_seconds: float = SLACK_SECONDS) -> None:
        self._slack_seconds = slack_seconds
        if not endpoint.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--aggregator {endpoint.url!r} is not a URL; write http://host:8090 or https://host:8090"
            )
        headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        verify: Any = True
        if endpoint.ca_file is not None:
            import ssl

            try:
                verify = ssl.create_default_context(cafile=str(endpoint.ca_file))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"{endpoint.ca_file}: not a CA file: {words_of(error)}; name another with --ca-file"
                ) from None
        self.url = endpoint.url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, verify=verify, trust_env=False)

    def __enter__(self) -> Aggregator:
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

        `hold_seconds` is how long the other side may hold the answer back, as it was asked to.
        """
        content = None if body is None else wire.encode(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        params = {key: value for key, value in (query or {}).items() if value is not None}
        try:
            status, phrase, content_type, found = self._exchange(method, path, content, headers, params, hold_seconds)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise UnreachableError(f"aggregator {self.url} cannot be reached: {connection_words(error)}") from None
        if 200 <= status < 300:
            if "json" not in content_type and found.strip() not in (b"", b"ok"):
                raise UnreachableError(f"aggregator {self.url} did not answer JSON: is this really an aggregator?")
            return found
        detail = _detail(found) or f"HTTP {status} {phrase}"
        if status == NO_TOKEN and "authorization" not in self._http.headers:
            detail = "a token is required: name its file with --token-file or HEALTHD_TOKEN_FILE"
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
        chunks: list[bytes] = []
        size = 0
        timeout = httpx.Timeout(SLACK_SECONDS, read=hold_seconds + self._slack_seconds)
        request = self._http.build_request(
            method, path, content=content, headers=headers, params=params, timeout=timeout
        )
        with contextlib.closing(self._http.send(request, stream=True)) as answer:
            end = time.monotonic() + ANSWER_SECONDS
            for chunk in answer.iter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > ANSWER_BYTES or time.monotonic() > end:
                    much = f"{ANSWER_BYTES >> 20} MiB" if size > ANSWER_BYTES else f"{ANSWER_SECONDS:g} s"
                    raise UnreachableError(f"aggregator {self.url}: its answer to {path} did not end within {much}")
            content_type = str(answer.headers.get("content-type", ""))
            return answer.status_code, answer.reason_phrase, content_type, b"".join(chunks)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a path."""
        import msgspec

        try:
            return msgspec.json.decode(self.call("GET", path, query=query))
        except msgspec.DecodeError as error:
            raise UnreachableError(f"aggregator {self.url}{path} did not answer JSON: {error}") from None

    def withdraw(self, job: str, attempt: int) -> bool:
        """End the gate of a job, or give its nodes back; false when there is none."""
        import msgspec

        found = self.call("GET", "/v1/gates", query={"job": job, "limit": 1}, hold_seconds=0.0)
        try:
            mine = [gate["id"] for gate in msgspec.json.decode(found)["gates"] if gate["attempt"] == attempt]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its list of gates cannot be read: {error}") from None
        for gate_id in mine:
            self.call("DELETE", f"/v1/gates/{gate_id}/lease", hold_seconds=0.0)
        return bool(mine)

    def newest_gate(self, job: str) -> str | None:
        """The id of a job's newest gate; None when it has none."""
        import msgspec

        found = self.call("GET", "/v1/gates", query={"job": job, "limit": 1}, hold_seconds=0.0)
        try:
            return next((str(gate["id"]) for gate in msgspec.json.decode(found)["gates"]), None)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its list of gates cannot be read: {error}") from None

    def leave(self, gate: str, member: str) -> None:
        """Tell a gate that a member of its group ends without starting the job. Safe to repeat."""
        self.call("DELETE", f"/v1/gates/{gate}/members/{member}", hold_seconds=0.0)

    def acknowledge(self, gate: str, node: str, *, wait_seconds: float = 10.0) -> tuple[bool | None, tuple[str, ...]]:
        """Confirm the start on a node: whether all go (None: not settled yet), and who has not confirmed."""
        import msgspec

        body = {"node": node, "event": "acknowledge"}
        path, query = f"/v1/gates/{gate}/handshake", {"wait": f"{wait_seconds:g}"}
        found = self.call("POST", path, body=body, query=query, hold_seconds=wait_seconds)
        try:
            answer = msgspec.json.decode(found)
            go = answer["go"]
            return (None if go is None else bool(go)), tuple(map(str, answer["missing"]))
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its answer cannot be read: {error}") from None

    def outcome(self, job: str, attempt: int, status: str, message: str) -> str | None:
        """Tell how a job ended; the id of its gate, None when there is none. Safe to repeat."""
        gate_id = self._gate_of(job, attempt)
        if gate_id is not None:
            body = {"status": status, "message": message}
            self.call("POST", f"/v1/gates/{gate_id}/outcome", body=body, hold_seconds=0.0)
        return gate_id

    def _gate_of(self, job: str, attempt: int) -> str | None:
        """The gate of an attempt, among the newest of its job; None when it has none."""
        import msgspec

        query = {"job": job, "limit": MOST_ATTEMPTS}
        found = self.call("GET", "/v1/gates", query=query, hold_seconds=0.0)
        try:
            gates = msgspec.json.decode(found)["gates"]
            return next((str(gate["id"]) for gate in gates if gate["attempt"] == attempt), None)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its list of gates cannot be read: {error}") from None

    def ask(
        self,
        request: GateRequest,
        *,
        wait_seconds: float,
        on_hold: Callable[[Decision], None],
        gone_seconds: float | None = None,
        on_away: Callable[[UnreachableError], None] | None = None,
        hold_seconds: float = HOLD_SECONDS,
    ) -> Decision:
        """
        Ask for a gate and follow it to its last word.

        A lost answer is asked again: the same job and attempt get the same gate. UnreachableError when the aggregator
        stayed away until `wait_seconds` (and some grace for its own expiry) were over, or for `gone_seconds` at a
        stretch; None where it may come back at any time. `on_away` is told whenever it goes away. `on_hold` hears
        every `hold_seconds` what it waits for.
        """
        end = time.monotonic() + wait_seconds + GRACE_SECONDS
        pause = 0.2
        away: UnreachableError | None = None
        heard = time.monotonic()
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise away or UnreachableError(f"aggregator {self.url} gave no last word in time")
            try:
                hold = max(0.0, min(HOLD_SECONDS, hold_seconds, left))
                body = self.call("POST", "/v1/gates", body=request, query={"wait": f"{hold:g}"}, hold_seconds=hold)
            except UnreachableError as error:
                now = time.monotonic()
                if now + pause > end - GRACE_SECONDS or (gone_seconds is not None and now - heard > gone_seconds):
                    raise
                if away is None and on_away is not None:
                    on_away(error)
                away = error
                time.sleep(pause)
                pause = min(pause * 2, 5.0 if gone_seconds is None else min(5.0, gone_seconds / 4))
                continue
            heard, away = time.monotonic(), None
            pause = 0.2
            decision = wire.decode(body, Decision, what=f"answer of {self.url}")
            if decision.decision is not Verdict.HOLD:
                return decision
            on_hold(decision)


def _detail(body: bytes) -> str:
    """What the problem document says, in one line; empty where there is none."""
    import msgspec

    try:
        problem = msgspec.json.decode(body[:65536])
        detail = problem.get("detail") or problem.get("title")
    except (msgspec.DecodeError, AttributeError, UnicodeDecodeError):
        return ""
    return " ".join(str(detail or "").split())[:500]
