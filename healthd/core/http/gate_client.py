"""A gate from the side of who asks: ask until it is decided, confirm, leave, give back, tell how the job ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from healthd.core import wire
from healthd.core.admission import why_unanswered
from healthd.core.backoff import Backoff
from healthd.core.errors import BadInputError, HealthdError, NotFoundError, UnreachableError
from healthd.core.http.aggregator_client import HOLD_SECONDS, SLACK_SECONDS, Aggregator, Endpoint, RefusedError
from healthd.core.model import Decision, GateRequest, Verdict

# Gates of one job that are looked through for an attempt: as many as one page holds.
MOST_ATTEMPTS = 500
NOT_FOUND = 404
# How long a gate is asked for where neither the request nor the aggregator says.
WAIT_SECONDS = 600.0
# An aggregator says itself when a gate has expired. It may hold that back while it takes bad nodes out of the way
# (`actuator.answer`, 120 s at most), so only who is silent on it for longer gives no answer any more.
GRACE_SECONDS = 150.0
# One that was heard and restarts is back by then, also where the wait ends meanwhile.
BACK_SECONDS = 15.0


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

    def withdraw(self, job: str, attempt: int) -> tuple[str, ...]:
        """
        End the gate of a job, or give its nodes back: the nodes whose leases end, none where it had none yet.

        NotFoundError where there is no such gate and no lease.
        """
        query = {"job": job, "attempt": attempt}
        try:
            found = self.call("DELETE", "/v1/gates/lease", query=query, hold_seconds=0.0)
        except RefusedError as error:
            raise NotFoundError(str(error)) if error.status == NOT_FOUND else error from None
        try:
            return tuple(str(row["node"]) for row in wire.decode(found, dict[str, Any], what="its answer")["released"])
        except (BadInputError, KeyError, TypeError) as error:
            raise UnreachableError(f"aggregator {self.url}: its answer cannot be read: {error}") from None

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
        backoff = Backoff(0.2, 5.0 if gone_seconds is None else min(5.0, gone_seconds / 4))
        failures, gate, away = 0, "", False
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
                now, failures = time.monotonic(), failures + 1
                pause = backoff.after(failures)
                end = max(began + wait, heard + BACK_SECONDS) if gate else began + wait
                if now + pause > end or (gone_seconds is not None and now - heard > gone_seconds):
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
