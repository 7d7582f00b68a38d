"""`healthd postmortem`: why a job died, from the notes of its nodes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from checks.atomic_file import write_atomically
from healthd.cli.settings.options import Command
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, OutputError, words_of
from healthd.core.redaction import redact
from healthd.core.text import moment
from healthd.postmortem import EXIT_CODES
from healthd.postmortem.catalogue import Kind, Outlook
from healthd.postmortem.collect import (
    MAX_NOTES_BYTES,
    Notes,
    case_of,
    complete,
    is_first,
    measure,
    read_notes,
    redacted,
)
from healthd.postmortem.judge import Verdict, judge, listed

QUICK_KINDS = (Kind.HARDWARE, Kind.NETWORK, Kind.UNKNOWN)
"""What the devices may be the cause of, whatever the signature is."""
WAIT_SECONDS = 0.5  # for the devices to be free, from one look to the next
MOST_UNREAD = 3
RESERVE_SECONDS = 2.0  # to judge and to print


@click.command(
    cls=Command,
    examples=(
        "healthd postmortem notes/*.json          # all nodes of a job, from 'healthd run --notes-dir notes'",
        "healthd postmortem notes/*.json --json",
    ),
)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[NOTES]...")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON, and nothing else.")
@click.option("--from-run", is_flag=True, hidden=True, help="Notes on standard input, from the parent of a command.")
@click.option("--logs", multiple=True, hidden=True)
@click.option("--measure/--no-measure", "measured", default=True, hidden=True)
@click.option("--seconds", type=float, default=60.0, hidden=True)
@click.option("--json-out", type=click.Path(path_type=Path), hidden=True)
@click.option("--notes-dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--job", hidden=True)
@click.option("--attempt", type=int, default=0, hidden=True)
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
) -> int:
    """
    Say why a job died: which rank failed first, of what, and what to do.

    NOTES are the files of 'healthd run --notes-dir', one of each node. Exit code: 0 a verdict, 3 unknown, 2 usage.
    """
    if from_run:
        return _after_run(logs, measured, seconds, json_out, notes_dir, job, attempt)
    if not files:
        raise click.UsageError("which notes? the files that 'healthd run --notes-dir DIR' has left")
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
        raise ConfigError(f"{error}; give files that 'healthd run --notes-dir' has written") from None


def _after_run(
    logs: tuple[str, ...],
    measured: bool,
    seconds: float,
    json_out: Path | None,
    notes_dir: Path | None,
    job: str | None,
    attempt: int,
) -> int:
    """For the parent of a command: complete its notes, measure, print; the exit code is that of the outlook."""
    deadline = time.monotonic() + seconds - RESERVE_SECONDS
    notes = complete(read_notes(sys.stdin.buffer.read(MAX_NOTES_BYTES), "notes"), logs)
    code, verdict = 0, None
    if notes.code != 0:
        verdict = judge(case_of([notes]))
        if measured and verdict.kind is not Kind.STOPPED:
            notes = _measure(notes, verdict, deadline)
            verdict = judge(case_of([notes]))
        click.echo("\n".join(screen(verdict, notes.unread)))
        if json_out is not None:
            _write(json_out, wire.indented(wire.encode(verdict)), "--json-out")
        code = 0 if verdict.kind is Kind.UNKNOWN else EXIT_CODES[verdict.outlook.value]
    if notes_dir is not None:
        rank = "" if notes.rank is None else f"-rank{notes.rank}"
        _write(notes_dir / f"{notes.host}{rank}.json", wire.encode(redacted(notes)), "--notes-dir")
    word = outcome_word(verdict) if verdict is not None else "ok" if is_first(notes) else None
    if job is not None and word is not None:
        line = "the command exited with 0" if verdict is None else verdict.sentence
        _tell(job, attempt, word, redact(line), deadline + RESERVE_SECONDS - time.monotonic())
    return code


def outcome_word(verdict: Verdict) -> str | None:
    """
    What the aggregator is told of a bad end: infra or failed; None where that would be a guess.

    Nothing is told of what is only suspected, nor of a job that somebody or a scheduler has stopped.
    """
    if verdict.suspected or verdict.kind in (Kind.UNKNOWN, Kind.STOPPED):
        return None
    elsewhere = verdict.kind in (Kind.HOST, Kind.STORAGE) and verdict.outlook is Outlook.ELSEWHERE
    return "infra" if elsewhere or verdict.kind in (Kind.HARDWARE, Kind.NETWORK) else "failed"


def _tell(job: str, attempt: int, word: str, line: str, seconds: float) -> None:
    """By the command that people tell it by; what it says of a failure is said."""
    command = [sys.executable, "-P", "-m", "healthd", "gate", "outcome", "--job", job, "--attempt", str(attempt)]
    try:
        subprocess.run(
            [*command, "--message", line, word], check=False, timeout=max(1.0, seconds), stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        click.echo(f"healthd: the outcome of job {job} could not be told in time; run: healthd gate outcome", err=True)


def _write(file: Path, content: bytes, option: str) -> None:
    try:
        write_atomically(file, content)
    except OSError as error:
        raise OutputError(f"{option}: {file}: {words_of(error)}") from None


def _measure(notes: Notes, verdict: Verdict, deadline: float) -> Notes:
    """Passive checks at once; the quick tier where a device may be the cause, as soon as nobody has the devices."""
    results = [measure("passive", notes.host, deadline - time.monotonic())]
    if verdict.kind in QUICK_KINDS or verdict.device:
        while True:
            quick = measure("quick", notes.host, deadline - time.monotonic())
            busy = quick.status == "unknown" and quick.note.startswith("Busy")
            if not busy or time.monotonic() + WAIT_SECONDS > deadline:
                break
            time.sleep(WAIT_SECONDS)
        results.append(quick)
    return dataclasses.replace(notes, measured=tuple(results))


def screen(verdict: Verdict, unread: Sequence[str] = ()) -> Iterator[str]:
    """
    What died, when, of what, how that is known and what to do: for a person, on one screen.

    `unread` is what was looked for and could not be read.
    """
    word = f"{'suspected ' if verdict.suspected else ''}{verdict.kind.value}"
    when = f" at {moment(verdict.at)}" if verdict.at is not None else ""
    yield f"healthd: why it died: {word.upper()} (confidence: {verdict.confidence}){when}"
    yield f"  {redact(verdict.sentence)}"
    told: set[str] = set()
    if verdict.waited:
        ranks = f"rank{'s' if len(verdict.waited) > 1 else ''} {listed(verdict.waited)}"
        yield f"  waited for it, or ended because of it: {ranks}"
    for each in verdict.evidence:
        where = each.source if each.rank is None else f"{each.source}, rank {each.rank}"
        yield f"  {each.place.value:<10} {each.node} {where}: {redact(each.text)}"
        if each.reference and each.reference not in told:
            told.add(each.reference)
            yield f"             see {each.reference}"
    yield f"  measured:    {redact(verdict.measurement)}"
    if unread:
        more = f", and {len(unread) - MOST_UNREAD} more" if len(unread) > MOST_UNREAD else ""
        yield f"  not read:    {redact('; '.join(unread[:MOST_UNREAD]))}{more}"
    if verdict.suspected and verdict.settles:
        yield f"  to be sure:  {verdict.settles}"
    yield f"  what to do:  {verdict.action} ({verdict.outlook.value})"
