"""What AWS has scheduled for an instance: forms of the metadata service, from a real server; and where it is silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checks.contract import Action, Finding, Status
from checks.host.machine import Host, HostError
from checks.system.scheduled_events import MAINTENANCE, REBALANCE, SPOT, scheduled_events
from tests.checks.identity_kit import make_ec2, reply, serving
from tests.checks.identity_kit import read_request as read_first
from tests.checks.scheduled_events_kit import NOW, REBOOT
from tests.hosts.machine import Machine, number

RETIREMENT = {
    "NotBefore": "1 Feb 2019 00:00:00 GMT",
    "Code": "instance-retirement",
    "Description": "The instance is running on degraded hardware",
    "EventId": "instance-event-0123456789abcdef0",
    "State": "active",
}
COMPLETED = {**REBOOT, "State": "completed", "Description": "[Completed] scheduled reboot"}
INTERRUPTION = '{"action": "terminate", "time": "2019-01-20T16:02:00Z"}'
RECOMMENDATION = '{"noticeTime": "2019-01-20T15:58:20Z"}'


class Metadata:
    """The metadata service, which gives these values to those who have its token, and 404 for all others."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values
        self.asked: list[str] = []

    def __call__(self, connection: object) -> None:
        first, headers = read_first(connection)  # type: ignore[arg-type]
        method, path, _ = first.split()
        self.asked.append(f"{method} {path}")
        name = path.removeprefix("/latest/meta-data/")
        if (method, path) == ("PUT", "/latest/api/token"):
            seconds = int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0"))
            answer = reply("200 OK", b"TOKEN==") if 1 <= seconds <= 21600 else reply("400 Bad Request")
        elif headers.get("x-aws-ec2-metadata-token") != "TOKEN==":
            answer = reply("401 Unauthorized")
        elif name in self.values:
            answer = reply("200 OK", self.values[name].encode())
        else:
            answer = reply("404 Not Found", b"<html>Not Found</html>")
        connection.sendall(answer)  # type: ignore[attr-defined]


@contextmanager
def asked_of(service: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """This very machine, which is to ask that server as if it were on EC2."""
    with serving(service) as endpoint:  # type: ignore[arg-type]
        monkeypatch.setenv("HEALTHD_IMDS", "on")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
        yield Host()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An instance as data, on which nothing is scheduled."""
    found = Machine(tmp_path / "machine")
    make_ec2(found)
    found.write("/host.json", json.dumps({"time": NOW, "metadata": {MAINTENANCE: "[]"}}))
    return found


def scheduled(machine: Machine, *events: dict[str, str], **others: str) -> list[Finding]:
    machine.say("metadata", **{MAINTENANCE: json.dumps(events)}, **others)
    return machine.findings(scheduled_events)


def test_service_is_asked_by_version_2_and_an_event_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Metadata({MAINTENANCE: json.dumps([REBOOT])})
    with asked_of(service, monkeypatch) as host:
        said = host.metadata((MAINTENANCE, REBALANCE, SPOT))
    assert said == {MAINTENANCE: json.dumps([REBOOT]), REBALANCE: None, SPOT: None}
    assert service.asked == [
        "PUT /latest/api/token",
        f"GET /latest/meta-data/{MAINTENANCE}",
        f"GET /latest/meta-data/{REBALANCE}",
        f"GET /latest/meta-data/{SPOT}",
    ]


def test_command_line_shows_the_event_of_a_real_service() -> None:
    with serving(Metadata({MAINTENANCE: json.dumps([RETIREMENT])})) as endpoint:  # type: ignore[arg-type]
        run = subprocess.run(
            [sys.executable, "-m", "healthd", "check", "scheduled_events", "--json"],
            env={**os.environ, "HEALTHD_IMDS": "on", "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert run.returncode == 0, run.stderr  # a warning
    assert "EC2 will retire this instance" in run.stdout
    assert "2019-02-01 00:00 UTC" in run.stdout


def test_nothing_scheduled_passes_with_a_number(machine: Machine) -> None:
    found = scheduled(machine)
    assert [item.status for item in found] == [Status.PASS]
    assert number(found, "scheduled_events_count").value == 0


def test_each_event_is_a_warning_with_its_time_the_first_one_first(machine: Machine) -> None:
    found = scheduled(machine, RETIREMENT, REBOOT)
    assert [(item.status, item.reason, item.action) for item in found] == [
        (Status.WARN, "ScheduledEvent", Action.INSPECT),
        (Status.WARN, "ScheduledEvent", Action.REPLACE),
    ]
    (first,) = found[0].measurements
    assert (first.value, first.labels) == (61243.0, {"code": "system-reboot"})
    assert "instance-event-0d59937288b749b32" in found[0].message
    assert "2019-01-21 09:00 UTC" in found[0].message


def test_events_of_one_kind_have_one_number(machine: Machine) -> None:
    found = scheduled(machine, {**REBOOT, "NotBefore": "22 Jan 2019 09:00:43 GMT"}, REBOOT)
    assert len(found) == 2
    assert number(found, "scheduled_event_seconds").value == 61243.0


def test_event_that_is_over_says_nothing(machine: Machine) -> None:
    canceled = {**REBOOT, "State": "", "Description": "[Canceled] scheduled reboot"}
    assert [item.status for item in scheduled(machine, COMPLETED, canceled)] == [Status.PASS]


def test_notices_of_a_spot_instance_are_events(machine: Machine) -> None:
    found = scheduled(machine, **{SPOT: INTERRUPTION, REBALANCE: RECOMMENDATION})
    assert [item.measurements[0].value for item in found] == [-100.0, 120.0]
    assert [item.measurements[0].labels["code"] for item in found] == ["rebalance", "spot-terminate"]
    assert {item.status for item in found} == {Status.WARN}


def test_code_that_is_new_is_shown_and_is_no_label(machine: Machine) -> None:
    (found,) = scheduled(machine, {**REBOOT, "Code": "host-teleport"})
    assert found.measurements[0].labels == {"code": "other"}
    assert "host-teleport" in found.message


def test_machine_that_is_not_on_ec2_is_skipped_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Machine(tmp_path / "elsewhere")
    service = Metadata({MAINTENANCE: "[]"})
    with serving(service) as endpoint:  # type: ignore[arg-type]
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
        (found,) = elsewhere.findings(scheduled_events)
    assert (found.status, found.reason, found.measurements) == (Status.SKIP, "NotApplicable", ())
    assert service.asked == []


@pytest.mark.parametrize(("required", "expected"), [(False, Status.SKIP), (True, None)])
def test_service_that_is_silent_is_a_skip_without_a_number_unless_it_is_required(
    machine: Machine, required: bool, expected: Status | None
) -> None:
    machine.unsay("metadata")
    if expected is None:
        with pytest.raises(HostError) as caught:
            machine.findings(scheduled_events, required=required)
        assert caught.value.reason == "NoData"
        return
    (found,) = machine.findings(scheduled_events, required=required)
    assert (found.status, found.reason) == (Status.SKIP, "NotApplicable")
    assert found.measurements[0].value is None


def test_service_that_may_not_be_asked_is_a_skip_without_a_number(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEALTHD_IMDS", "off")
    (found,) = machine.findings(scheduled_events)
    assert (found.status, found.measurements[0].value) == (Status.SKIP, None)


@pytest.mark.parametrize(
    "values",
    [
        {MAINTENANCE: "<html>"},
        {MAINTENANCE: "{}"},
        {MAINTENANCE: "[1]"},
        {MAINTENANCE: "[" * 5000},
        {MAINTENANCE: json.dumps([{**REBOOT, "NotBefore": "soon"}])},
        {MAINTENANCE: json.dumps([{**REBOOT, "NotBefore": "99 Jan 2019 09:00:43 GMT"}])},
        {MAINTENANCE: json.dumps([{"Code": "system-reboot"}])},
        {MAINTENANCE: "[]", SPOT: "terminate"},
        {MAINTENANCE: "[]", SPOT: '{"action": "terminate"}'},
        {MAINTENANCE: "[]", REBALANCE: "[]"},
        {SPOT: INTERRUPTION},
    ],
)
def test_answer_that_cannot_be_read_never_passes(machine: Machine, values: dict[str, str]) -> None:
    machine.write("/host.json", json.dumps({"time": NOW, "metadata": values}))
    with pytest.raises(HostError) as caught:
        machine.findings(scheduled_events)
    assert caught.value.reason == "NoData"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"", reply("503 Busy"), reply("200 OK", b"x" * 100_000)])
def test_server_that_is_not_the_service_gives_no_value(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(connection: object) -> None:
        first, _ = read_first(connection)  # type: ignore[arg-type]
        token = reply("200 OK", b"TOKEN==")
        connection.sendall(token if first.startswith("PUT") else answer)  # type: ignore[attr-defined]

    with asked_of(talk, monkeypatch) as host, pytest.raises(HostError) as caught:
        host.metadata((MAINTENANCE,))
    assert caught.value.reason == "NoData"
    assert "HttpPutResponseHopLimit" in str(caught.value)
