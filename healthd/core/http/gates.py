"""A gate as the caller sees it: ask until it is decided, confirm, leave, give back, report how the job ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from healthd.core import wire
from healthd.core.asked import why_unanswered
from healthd.core.backoff import Backoff
from healthd.core.errors import BadInputError, HealthdError, NotFoundError, UnreachableError
from healthd.core.http.client import HOLD_SECONDS, SLACK_SECONDS, Aggregator, BusyError, Endpoint, RefusedError
from healthd.core.model import Verdict

if TYPE_CHECKING:
    from healthd.core.model import Decision, GateRequest, HandshakeAnswer, HandshakeBody

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
        deadline = Deadline(
            request.wait_seconds,
            longest_seconds=longest_seconds,
            gone_seconds=gone_seconds,
            grace_seconds=self._grace_seconds,
        )
        backoff = Backoff(0.2, 5.0 if gone_seconds is None else min(5.0, gone_seconds / 4))
        failures = 0
        while not deadline.is_over():
            hold = deadline.hold(hold_seconds)
            try:
                body = self.call("POST", "/v1/gates", body=request, query={"wait": f"{hold:g}"}, hold_seconds=hold)
            except UnreachableError as error:
                failures += 1
                pause = backoff.after(failures)
                if not deadline.allows_another_try(pause):
                    raise (NotAdmittedError(str(error)) if isinstance(error, BusyError) else error) from None
                if failures == 1 and on_away is not None:
                    on_away(error)
                time.sleep(pause)
                continue
            failures = 0
            decision = self._read(body)
            if decision.decision is not Verdict.HOLD:
                if why := why_unanswered(request, decision):
                    raise NotAdmittedError(f"aggregator {self.url}: its answer admits but {why}; not admitted")
                return decision
            deadline.note(decision)
            on_hold(decision)
        raise NotAdmittedError(
            f"aggregator {self.url} did not decide gate {deadline.gate} within its {deadline.wait_seconds:g} s"
        )

    def _read(self, body: bytes) -> Decision:
        """The decision in an answer; NotAdmittedError where there is none, so that its gate is given back."""
        from healthd.core.model import Decision

        try:
            return wire.decode(body, Decision, what="its answer")
        except BadInputError as error:
            raise NotAdmittedError(f"aggregator {self.url}: {error}; not admitted") from None


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


class Deadline:
    """
    How long a gate is asked for, from the first request on.

    `wait_seconds` is the wait of the request until the aggregator has said another. `longest_seconds` beats both.
    `gone_seconds` is how long the aggregator may be away at a stretch; None: for all of the time. `grace_seconds` is
    how much later than its wait a gate may be decided by an aggregator that is there.
    """

    def __init__(
        self,
        wait_seconds: float | None,
        *,
        longest_seconds: float | None,
        gone_seconds: float | None,
        grace_seconds: float,
    ) -> None:
        asked = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self.wait_seconds = asked if longest_seconds is None else longest_seconds
        self.gate = ""  # the one that is waited for, once there is one
        self._fixed = longest_seconds is not None
        self._gone_seconds = gone_seconds
        self._grace_seconds = grace_seconds
        self._began = self._heard_at = time.monotonic()

    def is_over(self) -> bool:
        """Whether the gate should have been decided by now."""
        return self._left() <= 0

    def hold(self, most_seconds: float) -> float:
        """For how long the next request is held."""
        # Before anything is known of the gate, an answer after the wait is of no more use.
        left = self._left() if self.gate else max(0.0, self._began + self.wait_seconds - time.monotonic())
        return max(0.0, min(HOLD_SECONDS, most_seconds, left))

    def allows_another_try(self, pause_seconds: float) -> bool:
        """Whether there is time to ask again after this pause, while the aggregator is away."""
        now, end = time.monotonic(), self._began + self.wait_seconds
        if self.gate:
            end = max(end, self._heard_at + BACK_SECONDS)
        gone = self._gone_seconds is not None and now - self._heard_at > self._gone_seconds
        return now + pause_seconds <= end and not gone

    def note(self, decision: Decision) -> None:
        """The aggregator holds this gate. The wait that it says counts from the first that is heard of the gate."""
        self._heard_at = time.monotonic()
        # Another gate than before where the aggregator has lost its database: that one counts anew.
        if decision.id != self.gate and not self._fixed:
            self._began, self.wait_seconds = self._heard_at, _wait_of(decision, self.wait_seconds)
        self.gate = decision.id

    def _left(self) -> float:
        return self._began + self.wait_seconds + self._grace_seconds - time.monotonic()


def _wait_of(decision: Decision, otherwise: float) -> float:
    """How long the aggregator says that it holds this gate, in seconds."""
    told = decision.policy.get("wait_seconds")
    return float(told) if isinstance(told, (int, float)) and 0 <= told < math.inf else otherwise
