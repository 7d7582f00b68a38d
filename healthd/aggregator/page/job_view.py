"""What the page of a job's end shows: its verdict as a badge, and the nodes that reported. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from healthd.aggregator.jobs.postmortem_records import Postmortem, PostmortemPhase
from healthd.postmortem.catalogue import Kind, Outlook
from healthd.postmortem.judge import listed

_TONES = {
    Kind.HARDWARE: ("unhealthy", "✕"),
    Kind.NETWORK: ("unhealthy", "✕"),
    Kind.HOST: ("unhealthy", "✕"),
    Kind.STORAGE: ("unhealthy", "✕"),
    Kind.SOFTWARE: ("degraded", "!"),
    Kind.DATA: ("degraded", "!"),
    Kind.STOPPED: ("plain", "■"),
    Kind.UNKNOWN: ("unknown", "?"),
}
OUTLOOKS = {
    Outlook.HERE: "A retry on the same nodes can help.",
    Outlook.ELSEWHERE: "A retry on other nodes can help.",
    Outlook.NONE: "A retry without changes does not help.",
    Outlook.STOPPED: "It was stopped on purpose.",
}
_WAITS = {
    PostmortemPhase.COLLECTING: "waiting for the notes of its nodes",
    PostmortemPhase.MEASURING: "its nodes are being checked",
}


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """The end of a job in words. `waits` is empty once nothing more is waited for."""

    tone: str
    sign: str
    said: str
    waits: str
    outlook: str
    waited: str
    codes: str


def job_end(record: Postmortem) -> JobEnd:
    """The words for a record."""
    verdict = record.verdict
    waits = _WAITS.get(record.phase, "")
    codes = sorted({each.code for each in record.told.values()})
    told = "exit code" + ("s " if len(codes) > 1 else " ") + ", ".join(str(code) for code in codes[:8])
    if verdict is None:
        return JobEnd(tone="running", sign="…", said=waits, waits=waits, outlook="", waited="", codes=told)
    tone, sign = _TONES[verdict.kind]
    return JobEnd(
        tone=tone,
        sign=sign,
        said=f"{'suspected ' if verdict.suspected else ''}{verdict.kind.value}",
        waits=waits,
        outlook=OUTLOOKS[verdict.outlook],
        waited=listed(verdict.waited),
        codes=told,
    )
