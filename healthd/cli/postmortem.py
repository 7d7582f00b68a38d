"""`healthd postmortem`: why a job died, from the notes of its nodes."""

from __future__ import annotations

import base64
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from checks.atomic_file import write_atomically
from checks.printable import some
from healthd.aggregator.jobs.postmortem_records import PostmortemPhase, PostmortemState
from healthd.cli.fleet.line import gate_client
from healthd.cli.settings.options import Command, load_settings
from healthd.core import wire
from healthd.core.backoff import Backoff
from healthd.core.bounded import read_file
from healthd.core.errors import (
    BadInputError,
    ConfigError,
    HealthdError,
    NotFoundError,
    OutputError,
    UnreachableError,
    words_of,
)
from healthd.core.redaction import redact
from healthd.core.text import moment
from healthd.postmortem import EXIT_CODES
from healthd.postmortem.catalogue import Kind, Outlook, Place
from healthd.postmortem.collect import complete, measure
from healthd.postmortem.judge import JobVerdict, Measured, judge, listed, outcome_word, wants_devices
from healthd.postmortem.notes import MAX_NOTES_BYTES, Notes, case_of, is_first, pack, read_notes, redacted

if TYPE_CHECKING:
    from healthd.core.http.gates import GateClient

T = TypeVar("T")

WAIT_SECONDS = 0.5  # for the devices to be free, from one look to the next
MOST_UNREAD = 3
MOST_MISSING = 8
HOLD_SECONDS = 20.0  # of one request: load balancers cut at 30 to 60 s
AWAY_SECONDS = 20.0  # an aggregator that restarts is back by then
LEAST_SECONDS = 1.0  # less than that left: nothing more is waited for
RESERVE_SECONDS = 2.0  # to judge and to print


@click.command(
    cls=Command,
    examples=(
        "healthd postmortem notes/*.json          # all nodes of a job, from 'healthd run --notes-dir notes'",
        "healthd postmortem notes/*.json --json",
    ),
)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[NOTES]...")
@click.option("--json", "as_json", is_flag=True, help="Print only the verdict, as JSON.")
@click.option("--from-run", is_flag=True, hidden=True, help="Notes on standard input, from the parent of a command.")
@click.option("--logs", multiple=True, hidden=True)
@click.option("--measure/--no-measure", "measured", default=True, hidden=True)
@click.option("--seconds", type=float, default=60.0, hidden=True)
@click.option("--json-out", type=click.Path(path_type=Path), hidden=True)
@click.option("--notes-dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--job", hidden=True)
@click.option("--attempt", type=int, default=0, hidden=True)
@click.option("--node", hidden=True)
@click.option("--aggregator", hidden=True)
@click.option("--token-file", type=click.Path(path_type=Path), hidden=True)
@click.option("--ca-file", type=click.Path(path_type=Path), hidden=True)
@click.option("--config", type=click.Path(path_type=Path), hidden=True)
def postmortem(
    files: tuple[Path, ...],
    as_json: bool,
    from_run: bool,
    logs: tuple[str, ...],
    measured: bool,
    seconds: float,
    json_out: Path | None,
    notes_dir: Path | None,
    job: str | None,
    attempt: int,
    node: str | None,
    **options: Any,
) -> int:
    """
    Explain why a job died: which rank failed first, of what, and what to do.

    NOTES are the files of 'healthd run --notes-dir', one per node. Exit code: 0 a verdict, 3 unknown, 2 usage.
    """
    if from_run:
        return _after_run(_Asked(logs, measured, seconds, json_out, notes_dir, job, attempt, node, options))
    if not files:
        raise click.UsageError("no notes given: name the files that 'healthd run --notes-dir DIR' wrote")
    verdict = judge(case_of([_read(file) for file in files]))
    if as_json:
        sys.stdout.write(wire.encode(verdict).decode() + "\n")
    else:
        click.echo("\n".join(screen(verdict)))
    return 3 if verdict.kind is Kind.UNKNOWN else 0


def _read(file: Path) -> Notes:
    try:
        return read_notes(read_file(file, MAX_NOTES_BYTES), str(file))
    except OSError as error:
        raise ConfigError(f"{file}: {words_of(error)}") from None
    except BadInputError as error:
        raise ConfigError(f"{error}; use files written by 'healthd run --notes-dir'") from None


@dataclass(frozen=True)
class _Asked:
    """The options of `healthd run`, for its post-mortem."""

    logs: tuple[str, ...]
    measured: bool
    seconds: float
    json_out: Path | None
    notes_dir: Path | None
    job: str | None
    attempt: int
    node: str | None
    options: Mapping[str, Any]
    """How to reach the aggregator, as all commands take it."""

    def measure(self, tier: str, notes: Notes, deadline: float, gate: str | None = None) -> Measured:
        """What checks of this node say now, by the settings that `healthd run` was given."""
        return measure(tier, notes.host, deadline - time.monotonic(), config=self.options.get("config"), gate=gate)


def exit_code(verdict: JobVerdict) -> int:
    """
    What `--exit-style verdict` exits with; 0 for the command's own code.

    A code says no more than is known: "do not retry" needs a certain verdict, and a suspected one a measurement.
    """
    if verdict.kind is Kind.UNKNOWN:
        return 0
    if verdict.suspected and (not verdict.measured or verdict.outlook is Outlook.NONE):
        return 0
    return EXIT_CODES[verdict.outlook.value]


def _after_run(asked: _Asked) -> int:
    """For the parent of a command: complete its notes, measure, print; the exit code is that of the outlook."""
    notes = read_notes(sys.stdin.buffer.read(MAX_NOTES_BYTES), "notes")
    # The parent counts from the command's end, and this process has taken its time to start.
    gone = min(max(0.0, time.time() - notes.ended), asked.seconds)
    deadline = time.monotonic() + asked.seconds - gone - RESERVE_SECONDS
    notes = complete(notes, asked.logs)
    code, verdict, by_fleet = 0, None, False
    if notes.code != 0:
        verdict = judge(case_of([notes]))
        if asked.measured and verdict.kind is not Kind.STOPPED:
            notes = dataclasses.replace(notes, measured=(asked.measure("passive", notes, deadline),))
        missing: tuple[str, ...] = ()
        if asked.job is not None:
            notes, told = _ask_fleet(asked, asked.job, notes, deadline)
            if told is not None and told.postmortem.verdict is not None:
                verdict, missing, by_fleet = told.postmortem.verdict, told.missing, True
        if not by_fleet:
            verdict = judge(case_of([notes]))
            if asked.measured and wants_devices(verdict) and not any(each.tier == "quick" for each in notes.measured):
                notes = _measure_devices(asked, notes, deadline)
                verdict = judge(case_of([notes]))
        click.echo("\n".join(screen(verdict, notes.unread, missing)))
        if asked.json_out is not None:
            _write(asked.json_out, wire.indented(wire.encode(verdict)), "--json-out")
        code = exit_code(verdict)
    if asked.notes_dir is not None:
        rank = "" if notes.rank is None else f"-rank{notes.rank}"
        _write(asked.notes_dir / f"{notes.host}{rank}.json", wire.encode(redacted(notes)), "--notes-dir")
    word = outcome_word(verdict) if verdict is not None else "ok" if is_first(notes) else None
    if asked.job is not None and word is not None and not by_fleet:
        line = "the command exited with 0" if verdict is None else verdict.sentence
        _tell_outcome(asked, asked.job, word, redact(line), deadline + RESERVE_SECONDS - time.monotonic())
    return code


def _ask_fleet(asked: _Asked, job: str, notes: Notes, deadline: float) -> tuple[Notes, PostmortemState | None]:
    """
    What the aggregator says of the end, by the notes of all nodes; None, and a line on standard error, where it cannot.

    Also the notes, with what was measured because the aggregator asked for it.
    """
    try:
        settings = load_settings({k: v for k, v in asked.options.items() if v is not None}, section="gate")
        node = asked.node or next(iter(settings.gate.node), None) or os.environ.get("NODE_NAME") or settings.node.name
        with gate_client(settings) as aggregator:
            gate = _heard(lambda: aggregator.gate_of(job, asked.attempt), deadline)
            if gate is None:
                raise NotFoundError(f"job {job} has no gate for attempt {asked.attempt}")
            asked_devices = False
            while True:
                body = {"node": node, "notes": base64.b64encode(pack(notes)).decode(), "measures": asked.measured}
                found = _heard(lambda: _send(aggregator, gate, body, deadline), deadline)  # noqa: B023  called at once
                if found.postmortem.phase is PostmortemPhase.FINAL:
                    return notes, found
                if deadline - time.monotonic() < LEAST_SECONDS:
                    # Its verdict, if any, is from before what was measured here.
                    if asked_devices:
                        raise UnreachableError("the aggregator did not judge this node's measurements in time")
                    return notes, found
                if found.member in found.to_measure and not asked_devices:
                    notes, asked_devices = _measure_devices(asked, notes, deadline, gate), True
    except HealthdError as error:
        click.echo(f"healthd: this node is judged alone: {error}", err=True)
        return notes, None


def _send(aggregator: GateClient, gate: str, body: Mapping[str, Any], deadline: float) -> PostmortemState:
    """Send the notes; the answer, which is held back."""
    hold = max(0.0, min(HOLD_SECONDS, deadline - time.monotonic()))
    query = {"wait": f"{hold:g}"}
    found = aggregator.call("POST", f"/v1/gates/{gate}/notes", body=body, query=query, hold_seconds=hold)
    return wire.decode(found, PostmortemState, what="the aggregator's answer")


def _heard(ask: Callable[[], T], deadline: float) -> T:
    """The answer of an aggregator, which may be restarting; UnreachableError where it stays away."""
    backoff, failures, until = Backoff(0.2, 2.0), 0, min(deadline, time.monotonic() + AWAY_SECONDS)
    while True:
        try:
            return ask()
        except UnreachableError:
            failures += 1
            if time.monotonic() + backoff.after(failures) > until:
                raise
            time.sleep(backoff.after(failures))


def _write(file: Path, content: bytes, option: str) -> None:
    try:
        write_atomically(file, content)
    except OSError as error:
        raise OutputError(f"{option}: {file}: {words_of(error)}") from None


def _measure_devices(asked: _Asked, notes: Notes, deadline: float, gate: str | None = None) -> Notes:
    """The notes with the quick tier, which runs as soon as the devices are free of all but the job of this gate."""
    left = max(0.0, deadline - time.monotonic())
    click.echo(f"healthd: measuring the devices of {notes.host}, up to {left:.0f} s", err=True)
    while True:
        quick = asked.measure("quick", notes, deadline, gate)
        busy = quick.status == "unknown" and quick.note.startswith("Busy")
        if not busy or time.monotonic() + WAIT_SECONDS > deadline:
            return dataclasses.replace(notes, measured=(*notes.measured, quick))
        time.sleep(WAIT_SECONDS)


def _tell_outcome(asked: _Asked, job: str, word: str, line: str, seconds: float) -> None:
    """By the command that people tell it by; what it says of a failure is said."""
    command = [sys.executable, "-P", "-m", "healthd", "gate", "outcome", "--job", job, "--attempt", str(asked.attempt)]
    for option, value in asked.options.items():
        command += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    try:
        subprocess.run(
            [*command, "--message", line, word], check=False, timeout=max(1.0, seconds), stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        click.echo(f"healthd: the outcome of job {job} was not reported in time; run: healthd gate outcome", err=True)


def screen(verdict: JobVerdict, unread: Sequence[str] = (), missing: Sequence[str] = ()) -> Iterator[str]:
    """
    What died, when, of what, how that is known and what to do: for a person, on one screen.

    `unread` is what was looked for and could not be read, `missing` are nodes of the job that have not told.
    """
    word = f"{'suspected ' if verdict.suspected else ''}{verdict.kind.value}"
    when = f" at {moment(verdict.at)}" if verdict.at is not None else ""
    yield f"healthd: why it died: {word.upper()} (confidence: {verdict.confidence}){when}"
    yield f"  {redact(verdict.sentence)}"
    told: set[str] = set()
    for each in verdict.evidence:
        where = each.source if each.rank is None else f"{each.source}, rank {each.rank}"
        yield f"  {each.place.value:<10} {each.node} {where}: {redact(each.text)}"
        if each.reference and each.reference not in told:
            told.add(each.reference)
            yield f"             see {each.reference}"
    shown = {each.rank for each in verdict.evidence if each.place is not Place.INITIATING}
    if others := [rank for rank in verdict.waited if rank not in shown]:
        many = f"{len(others)} others" if len(others) > 1 else "1 other"
        yield f"  and {many} waited or were stopped: rank{'s' if len(others) > 1 else ''} {listed(others)}"
    yield f"  measured:    {redact(verdict.measurement)}"
    if unread:
        more = f", and {len(unread) - MOST_UNREAD} more" if len(unread) > MOST_UNREAD else ""
        yield f"  not read:    {redact('; '.join(unread[:MOST_UNREAD]))}{more}"
    if missing:
        yield f"  no notes of: {some(missing, MOST_MISSING)}"
    if verdict.suspected and verdict.settles:
        yield f"  to confirm:  {verdict.settles}"
    yield f"  what to do:  {verdict.action} ({verdict.outlook.value})"
