"""
Talking to an aggregator from the command line: one place for addresses, tokens, TLS, retries and errors.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from healthd.core import wire
from healthd.core.admission import why_unanswered
from healthd.core.errors import BadInputError, ConfigError, HealthdError, UnreachableError, connection_words, words_of
from healthd.core.file_trust import check_file
from healthd.core.model import Decision, GateRequest, Verdict

# How long one held request may stay open: load balancers cut at 30 to 60 s.
HOLD_SECONDS = 20.0
# Beyond what was asked to be held: the way there and back, and a busy aggregator.
SLACK_SECONDS = 10.0
# A page of 500 nodes with all that is known of them is some 20 MB; what is longer than this is not ours.
ANSWER_BYTES = 64 << 20
# From the first byte of an answer to its last: who sends a byte a second must not keep a job's hook for a day.
ANSWER_SECONDS = 60.0
# What an aggregator answers to a question that cannot be meant, to no token, and to one that may not do this.
BAD_REQUEST, NO_TOKEN, WRONG_TOKEN = 400, 401, 403
# Refusals that no second try can change: the question or the token has to.
USAGE = frozenset({BAD_REQUEST, NO_TOKEN, WRONG_TOKEN, 404, 409, 413, 422})
# Gates of one job that are looked through for an attempt: as many as one page holds.
MOST_ATTEMPTS = 500
# How long a gate is asked for where neither the request nor the aggregator says.
WAIT_SECONDS = 600.0
# An aggregator says itself when a gate has expired. It may hold that back while it takes bad nodes out of the way
# (`actuator.answer`, 120 s at most), so only who is silent on it for longer gives no answer any more.
GRACE_SECONDS = 150.0
# One that was heard and restarts is back by then, also where the wait ends meanwhile.
BACK_SECONDS = 15.0


class RefusedError(HealthdError):
    """The aggregator understood and refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def told(self) -> HealthdError:
        """As ConfigError where the question or the token is wrong, so that no second try can help; else itself."""
        return ConfigError(str(self)) if self.status in USAGE else self


class NotAdmittedError(HealthdError):
    """The aggregator is there and no yes came of it: never to be taken for one that cannot be reached."""


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
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: the token cannot be read: {words_of(error)}; name another with --token-file"
        ) from None
    if not text:
        raise ConfigError(f"{file}: holds no token; make one with 'healthd token'")
    return text.splitlines()[0].strip()


class Aggregator:
    """
    A client of one aggregator. `slack_seconds` is how long an answer that is not held back may take, `grace_seconds`
    how much later than its wait a gate may be decided.
    """

    def __init__(
        self, endpoint: Endpoint, *, slack_seconds: float = SLACK_SECONDS, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self._slack_seconds, self._grace_seconds = slack_seconds, grace_seconds
        if not endpoint.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--aggregator {endpoint.url!r} is not a URL; write http://host:8090 or https://host:8090"
            )
        headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        verify: Any = True
        if endpoint.ca_file is not None:
            import ssl

            check_file(endpoint.ca_file, "CA file")
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
        elif status in (NO_TOKEN, WRONG_TOKEN):
            detail += "; name the file of another with --token-file or HEALTHD_TOKEN_FILE"
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
        return self.call_json("GET", path, query=query)

    def call_json(self, method: str, path: str, *, query: Mapping[str, Any] | None = None) -> Any:
        """As `call`, and the answer's JSON."""
        try:
            return wire.decode(self.call(method, path, query=query), Any, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}{path} did not answer JSON: {error}") from None

    def withdraw(self, job: str, attempt: int) -> bool:
        """End the gate of a job, or give its nodes back; false when there is none."""
        mine = [gate for gate, asked in self._gates(job, most=1) if asked == attempt]
        for gate in mine:
            self.call("DELETE", f"/v1/gates/{gate}/lease", hold_seconds=0.0)
        return bool(mine)

    def newest_gate(self, job: str) -> str | None:
        """The id of a job's newest gate; None when it has none."""
        return next((gate for gate, _ in self._gates(job, most=1)), None)

    def leave(self, gate: str, member: str) -> None:
        """Tell a gate that a member of its group ends without starting the job. Safe to repeat."""
        self.call("DELETE", f"/v1/gates/{gate}/members/{quote(member, safe='')}", hold_seconds=0.0)

    def acknowledge(self, gate: str, node: str, *, wait_seconds: float = 10.0) -> tuple[bool | None, tuple[str, ...]]:
        """Confirm the start on a node: whether all go (None: not settled yet), and who has not confirmed."""
        body = {"node": node, "event": "acknowledge"}
        path, query = f"/v1/gates/{gate}/handshake", {"wait": f"{wait_seconds:g}"}
        found = self.call("POST", path, body=body, query=query, hold_seconds=wait_seconds)
        try:
            answer = wire.decode(found, dict[str, Any], what="its answer")
            go = answer["go"]
            return (None if go is None else bool(go)), tuple(map(str, answer["missing"]))
        except (BadInputError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its answer cannot be read: {error}") from None

    def outcome(self, job: str, attempt: int, status: str, message: str) -> str | None:
        """Tell how a job ended; the id of its gate, None when there is none. Safe to repeat."""
        gate = next((gate for gate, asked in self._gates(job, most=MOST_ATTEMPTS) if asked == attempt), None)
        if gate is not None:
            body = {"status": status, "message": message}
            self.call("POST", f"/v1/gates/{gate}/outcome", body=body, hold_seconds=0.0)
        return gate

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
        what it waits for; `on_away` is told whenever the aggregator goes away.

        How long is the aggregator's to say: the wait of its gate, counted from the first that is heard of it. Until
        then, and where it says none, it is the request's, else WAIT_SECONDS; `longest_seconds` beats all of them.
        NotAdmittedError for an answer that cannot be read, or that admits other nodes than were asked for.
        UnreachableError when the aggregator was away at the end of that, or for `gone_seconds` at a stretch (None: it
        may come back at any time). NotAdmittedError when it was there and had decided nothing `grace_seconds` later.
        """
        began = heard = time.monotonic()
        wait = WAIT_SECONDS if request.wait_seconds is None else request.wait_seconds
        wait = wait if longest_seconds is None else longest_seconds
        pause, gate, away = 0.2, "", False
        while True:
            left = began + wait + self._grace_seconds - time.monotonic()
            if left <= 0:
                raise NotAdmittedError(f"aggregator {self.url} has not decided gate {gate} in its {wait:g} s")
            try:
                # Nothing is known of the gate yet: who only hears it after the wait has no more use for it.
                most = left if gate else max(0.0, began + wait - time.monotonic())
                hold = max(0.0, min(HOLD_SECONDS, hold_seconds, most))
                body = self.call("POST", "/v1/gates", body=request, query={"wait": f"{hold:g}"}, hold_seconds=hold)
            except UnreachableError as error:
                now = time.monotonic()
                end = max(began + wait, heard + BACK_SECONDS) if gate else began + wait
                if now + pause > end or (gone_seconds is not None and now - heard > gone_seconds):
                    raise
                if not away and on_away is not None:
                    on_away(error)
                away = True
                time.sleep(pause)
                pause = min(pause * 2, 5.0 if gone_seconds is None else min(5.0, gone_seconds / 4))
                continue
            heard, away, pause = time.monotonic(), False, 0.2
            decision = self._read(body)
            if decision.decision is not Verdict.HOLD:
                if why := why_unanswered(request, decision):
                    raise NotAdmittedError(f"aggregator {self.url}: its answer admits and {why}; not admitted")
                return decision
            if decision.id != gate and longest_seconds is None:
                # Another one than before where the aggregator has lost its database: that one counts anew.
                began, wait = heard, _wait_of(decision, wait)
            gate = decision.id
            on_hold(decision)

    def _read(self, body: bytes) -> Decision:
        """The decision in an answer; NotAdmittedError where there is none, so that its gate is given back."""
        try:
            return wire.decode(body, Decision, what="its answer")
        except BadInputError as error:
            raise NotAdmittedError(f"aggregator {self.url}: {error}; not admitted") from None


def _wait_of(decision: Decision, otherwise: float) -> float:
    """How long the aggregator says that it holds this gate, in seconds."""
    told = decision.policy.get("wait_seconds")
    return float(told) if isinstance(told, (int, float)) and 0 <= told < math.inf else otherwise


def _detail(body: bytes) -> str:
    """What the problem document says, in one line; empty where there is none."""
    try:
        problem = wire.decode(body[:65536], dict[str, Any], what="problem")
    except BadInputError:
        return ""
    detail = problem.get("detail") or problem.get("title")
    return " ".join(str(detail or "").split())[:500]
