"""
Jobs that died, as data: `cases/*.toml`. Texts are of the programs' own sources; names and numbers are invented.

A case maps each node that left notes to lines of these forms; times are seconds after the job's start:

    36000.4 TEXT           a line of output
    K 35999.8 TEXT         a line of the kernel log
    M TIER STATUS [REASON TARGET]   what checks found afterwards
    steps                  the steps of a training loop, from 35800 to 35998
    lost RANKS AT          these ranks lose their connections, and say so
    watchdog RANKS AT      the watchdogs of these ranks end them
    oom N, code N, signal N, pid N, start SECONDS, command WORDS
    sent AT SIGNAL [NAME]  a signal that the parent passed on; without a name from outside of the container

`kind`, `node` ("" for none), `rank` and `outlook` list what is right; `suspected` only where it must be so; `shows`
is in the evidence, `says` in the sentence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthd.postmortem.judge import FailedCheck, JobVerdict, Measured
from healthd.postmortem.notes import Notes, Sent, Words

STARTED = 1.7e9
LOST = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2395,"
    " remote process exited or there was a network error, NCCL version 2.27.5"
)
WATCHDOG = (
    "[E1126 04:22:44.000123 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4123, OpType=ALLREDUCE, NumelIn=16777216, NumelOut=16777216, Timeout(ms)=600000) ran for 600021 "
    "milliseconds before timing out.",
    "#0 all_reduce from /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:300",
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5a9616c1b6 in libc10.so)",
    "Fatal Python error: Aborted",
)


@dataclass(frozen=True)
class CaseOf:
    """One job and what is right to say of it."""

    name: str
    nodes: Mapping[str, tuple[str, ...]]
    right: Mapping[str, Any]

    def notes(self) -> list[Notes]:
        """The notes of its nodes."""
        return [notes_of_node(node, lines) for node, lines in self.nodes.items()]

    def faults(self, verdict: JobVerdict) -> list[str]:
        """What is wrong with a verdict; [] where it is right."""
        right = self.right
        found = [
            f"{name} {value!r} is not one of {right[name]!r}"
            for name, value in (
                ("kind", verdict.kind.value),
                ("node", verdict.node or ""),
                ("rank", verdict.rank),
                ("outlook", verdict.outlook.value),
            )
            if name in right and value not in right[name]
        ]
        if "suspected" in right and verdict.suspected is not right["suspected"]:
            found.append(f"suspected is {verdict.suspected}")
        if right.get("shows", "") not in " ".join(each.text for each in verdict.evidence):
            found.append(f"{right['shows']!r} is not in the evidence")
        if right.get("says", "") not in f"{verdict.sentence} ":
            found.append(f"{right['says']!r} is not in the sentence {verdict.sentence!r}")
        return found


def all_cases() -> list[CaseOf]:
    """All cases of all families."""
    found = []
    for file in sorted((Path(__file__).parent / "cases").glob("*.toml")):
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["case"]:
            nodes = {name: tuple(entry.pop(name)) for name in [*entry] if name.startswith("n") and name[1:].isdecimal()}
            found.append(CaseOf(name=entry.pop("name"), nodes=nodes, right=entry))
    return found


def ranks_of(text: str) -> Iterator[int]:
    """`0-2,5` as numbers."""
    for part in text.split(","):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def notes_of_node(node: str, lines: Iterable[str]) -> Notes:
    """The notes of one node out of its lines."""
    out: list[tuple[float, str]] = []
    kernel: list[tuple[float, str]] = []
    measured: list[Measured] = []
    signals: list[Sent] = []
    more: dict[str, Any] = {"code": 1, "signal": None, "pid": None, "oom": 0}
    command, offset = ("torchrun", "--nproc-per-node", "8", "train.py"), 0.0
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "steps":
            out += [(35800 + 2 * step, f"step {step} | loss 1.{9200 - step} | lr 3.0e-04") for step in range(100)]
        elif word == "K":
            at, _, text = rest.partition(" ")
            kernel.append((float(at), text))
        elif word == "M":
            tier, status, *problem = rest.split()
            failed = (FailedCheck(reason=problem[0], target=problem[1], message="m"),) if problem else ()
            measured.append(Measured(node=node, tier=tier, status=status, problems=failed))
        elif word in ("lost", "watchdog"):
            ranks, at = rest.split()
            for rank in ranks_of(ranks):
                texts = (f"[rank{rank}]: {LOST}",) if word == "lost" else (f"[rank{rank}]:{each}" for each in WATCHDOG)
                out += [(float(at) + rank / 100, text.format(rank)) for text in texts]
        elif word == "sent":
            at, number, *by = rest.split()
            signals.append(Sent(at=STARTED + float(at), signal=int(number), pid=7 if by else 0, uid=0, by=" ".join(by)))
        elif word == "command":
            command = tuple(rest.split())
        elif word == "start":
            offset = float(rest)
        elif word in more:
            more[word] = int(rest)
        else:
            out.append((float(word), rest))
    out.sort(key=lambda each: each[0])
    if more["signal"] is not None:
        more["code"] = 128 + more["signal"]
    return Notes(
        version=1,
        host=node,
        command=command,
        directory="/app",
        started=STARTED + offset,
        ended=STARTED + max([36000.0 + offset, *(at for at, _ in out)]) + 5,
        code=more["code"],
        signal=more["signal"],
        signals=tuple(signals),
        environment={},
        streams=(Words(name="stderr", bytes=0, chunks=tuple((STARTED + at, f"{text}\n") for at, text in out)),),
        memory_events={"before": {"oom_kill": 0}, "after": {"oom_kill": more["oom"]}},
        pid=more["pid"],
        kernel=tuple((STARTED + at, text) for at, text in kernel),
        measured=tuple(measured),
    )
