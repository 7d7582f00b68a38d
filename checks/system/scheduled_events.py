"""Events that AWS has scheduled for an EC2 instance: stop, retire, reboot or interrupt."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_tz
from typing import Any, NamedTuple

from checks.contract import Action, Context, Finding, Limit, Measurement, Status, check
from checks.host.identity import on_ec2
from checks.host.machine import HostError
from checks.host.metadata import may_ask
from checks.json_text import parse_json
from checks.limits import within
from checks.printable import printable_line

MAINTENANCE = "events/maintenance/scheduled"
REBALANCE = "events/recommendations/rebalance"
SPOT = "spot/instance-action"
MAX_EVENTS = 16  # that are shown; an instance has a handful
_MAX_TEXT = 200
_EPOCH = datetime.datetime(1970, 1, 1)  # noqa: DTZ001 - UTC, as all times here
_ENDED = ("completed", "canceled")

# By code: what happens, and what to do where it is not to wait.
_CODES: Mapping[str, tuple[str, Action]] = {
    "instance-stop": ("EC2 will stop this instance", Action.REPLACE),
    "instance-retirement": ("EC2 will retire this instance (stop or terminate it)", Action.REPLACE),
    "instance-reboot": ("EC2 will reboot this instance", Action.INSPECT),
    "system-reboot": ("EC2 will reboot the host of this instance", Action.INSPECT),
    "system-maintenance": ("EC2 will maintain the network or power of this instance's host", Action.INSPECT),
    "spot-terminate": ("EC2 will terminate this Spot instance", Action.REPLACE),
    "spot-stop": ("EC2 will stop this Spot instance", Action.REPLACE),
    "spot-hibernate": ("EC2 will hibernate this Spot instance", Action.REPLACE),
    "rebalance": ("EC2 has announced that it may interrupt this Spot instance at any moment", Action.REPLACE),
}
_OTHER = ("EC2 has scheduled an event of an unknown kind for this instance", Action.INSPECT)
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d{1,9})?Z")


class Event(NamedTuple):
    """One event. `code` is one of `_CODES` or "other"; `at` is in seconds since the epoch."""

    code: str
    at: float
    text: str


@dataclass(frozen=True)
class Params:
    """What a metadata service that does not answer means."""

    required: bool = False  # then unknown instead of skip: containers behind a hop limit of 1 cannot reach the service


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def scheduled_events(ctx: Context[Params]) -> Iterator[Finding]:
    """
    EC2 has scheduled no stop, retirement, reboot, maintenance or Spot interruption for this instance.

    An event is a warning, because the node is usable until it begins. A gate that knows how long its job runs (`healthd
    gate --runtime`, or `runtime` under `[policy]`) excludes nodes whose event begins before the job would end, and
    nodes on EC2 whose events are unknown. On machines that are not on EC2, according to the firmware tables, the check
    sends no request.

    Reads:   the instance metadata service, version 2: events/maintenance/scheduled,
             events/recommendations/rebalance, spot/instance-action; the clock. All requests together have 1 s;
             `HEALTHD_IMDS=off` and `AWS_EC2_METADATA_DISABLED=true` forbid them.
    Judges:  warn ScheduledEvent | skip NotApplicable (not on EC2; the service may not be asked, or does not answer and
             is not `required`) | unknown NoData (it does not answer and is `required`; an answer cannot be read).
    Cost:    four requests to a link-local address, some milliseconds; harmless to jobs.
    Source:  EC2 User Guide, "Scheduled events for your instances", "Spot Instance interruption notices", "Instance
             rebalance recommendations"; forms as in aws/aws-node-termination-handler, ec2metadata.go.
    Unverified on hardware: the answers of a real instance; they were written by documentation.
    """
    here = on_ec2(ctx.host)
    if not may_ask(None, on_ec2=here):
        if not here:
            yield Finding(status=Status.SKIP, reason="NotApplicable", message="not on EC2", target="node")
            return
        yield _not_known("HEALTHD_IMDS or AWS_EC2_METADATA_DISABLED turns the metadata service off")
        return
    try:
        said = ctx.host.metadata((MAINTENANCE, REBALANCE, SPOT))
    except HostError as error:
        if ctx.params.required:
            raise
        yield _not_known(str(error))
        return
    now = ctx.host.epoch_seconds()
    events = sorted((*_maintenance(said[MAINTENANCE]), *_spot(said[SPOT], said[REBALANCE])), key=lambda event: event.at)
    soonest: set[str] = set()
    for event in events[:MAX_EVENTS]:
        yield _warning(event, now, measured=event.code not in soonest)
        soonest.add(event.code)
    if not events:
        yield within(
            0.0,
            name="scheduled_events_count",
            target="node",
            limit=Limit(lower=None, upper=0.0, origin="default"),
            reason="ScheduledEvent",
            subject="events that EC2 has scheduled for this instance:",
        )


def _warning(event: Event, now: float, *, measured: bool) -> Finding:
    what, action = _CODES.get(event.code, _OTHER)
    when = (_EPOCH + datetime.timedelta(seconds=event.at)).strftime("%Y-%m-%d %H:%M UTC")
    measurement = Measurement(
        name="scheduled_event_seconds",  # until it begins, negative once it has
        value=event.at - now,
        lower=None,
        upper=None,
        origin="none",
        labels={"code": event.code},
    )
    return Finding(
        status=Status.WARN,
        reason="ScheduledEvent",
        message=f"{what}, at {when}: {event.text}",
        target="node",
        measurements=(measurement,) if measured else (),  # of each code the one that comes first
        action=action,
    )


def _not_known(why: str) -> Finding:
    """Skipped, with a number that was looked for and not found, by which a gate tells it from a machine off EC2."""
    nothing = Measurement(name="scheduled_events_count", value=None, lower=None, upper=None, origin="none")
    text = f"events that EC2 has scheduled for this instance are unknown: {why}"
    return Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node", measurements=(nothing,))


def _maintenance(text: str | None) -> Iterator[Event]:
    """
    `[{"NotBefore": "21 Jan 2019 09:00:43 GMT", "Code": "system-reboot", "Description": "scheduled reboot", "EventId":
    "instance-event-0d59937288b749b32", "NotAfter": "...", "State": "active"}]`; `[]` where there is none.
    """
    rows = _parsed(text, MAINTENANCE)
    if not isinstance(rows, list):
        raise HostError("NoData", f"{MAINTENANCE}: the metadata service returned no list of events")
    for row in rows:
        if not isinstance(row, dict):
            raise HostError("NoData", f"{MAINTENANCE}: {_shown(row)} is not an event")
        # Events that are over stay listed for a while, and their descriptions begin so.
        if str(row.get("State", "")).lower() in _ENDED or _shown(row.get("Description")).lower().startswith(
            tuple(f"[{word}]" for word in _ENDED)
        ):
            continue
        code = _shown(row.get("Code"))
        text = f"{_shown(row.get('Description'))} ({code}, {_shown(row.get('EventId'))})"
        at = _seconds(row.get("NotBefore"), MAINTENANCE)
        yield Event(code=code if code in _CODES else "other", at=at, text=text)


def _spot(action: str | None, rebalance: str | None) -> Iterator[Event]:
    """`{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`; `{"noticeTime": "2020-10-27T08:22:00Z"}`; or 404."""
    if action is not None:
        row = _parsed(action, SPOT)
        if not isinstance(row, dict):
            raise HostError("NoData", f"{SPOT}: {_shown(action)} is not an action")
        code = f"spot-{_shown(row.get('action'))}"
        at = _seconds(row.get("time"), SPOT)
        yield Event(code=code if code in _CODES else "other", at=at, text="interruption notice")
    if rebalance is not None:
        row = _parsed(rebalance, REBALANCE)
        if not isinstance(row, dict):
            raise HostError("NoData", f"{REBALANCE}: {_shown(rebalance)} is not a recommendation")
        yield Event(code="rebalance", at=_seconds(row.get("noticeTime"), REBALANCE), text="rebalance recommendation")


def _parsed(text: str | None, name: str) -> Any:
    if text is None:
        raise HostError("NoData", f"{name}: the metadata service does not have it")
    try:
        return parse_json(text)
    except ValueError as error:
        raise HostError("NoData", f"{name}: the metadata service returned no JSON: {error}") from None


def _seconds(text: object, name: str) -> float:
    """A time in one of the two forms that the service writes, in seconds since the epoch."""
    said = text if isinstance(text, str) else ""
    found = _ISO.fullmatch(said)
    parts = tuple(map(int, found.groups())) if found else (parsedate_tz(said) or ())[:6]
    try:
        return (datetime.datetime(*parts) - _EPOCH).total_seconds()  # type: ignore[arg-type]  # noqa: DTZ001 - both are UTC
    except (ValueError, TypeError):
        raise HostError("NoData", f"{name}: {_shown(text)} is not a time") from None


def _shown(value: object) -> str:
    return printable_line(str(value))[:_MAX_TEXT]
