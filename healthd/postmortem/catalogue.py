"""
What lines of a job's output and of the kernel log mean: the one catalogue of signatures, as data in `catalogue.toml`.

A line is an observation of some strength about some subject, and the subject is not who prints the line. `judge` puts
observations together; `verdicts` says what they come to.
"""

from __future__ import annotations

import enum
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalogue.toml")


class Kind(str, enum.Enum):
    """What a job died of."""

    HARDWARE = "hardware"
    NETWORK = "network"
    HOST = "host"
    STORAGE = "storage"
    SOFTWARE = "software"
    DATA = "data"
    STOPPED = "stopped"
    UNKNOWN = "unknown"


class Strength(str, enum.Enum):
    """How much an observation says."""

    FACT = "fact"
    """A record of the kernel or of a control group that is tied to this job."""
    REPORT = "report"
    """A process says it about itself, in a form that is printed only on failure."""
    MENTION = "mention"
    """Healthy runs print the words too, or they are about others: it proposes nothing."""
    CONSEQUENCE = "consequence"
    """Left by an abort, a kill or a lost peer: it explains nothing."""


class Subject(str, enum.Enum):
    """What an observation is about. Only a subject may be named in a verdict."""

    RANK = "rank"
    DEVICE = "device"
    NODE = "node"
    NAMED = "named"
    """The rank or node that the line names."""
    PEER = "peer"
    PATH = "path"
    """A file, a store or an address, which has two ends."""
    NOBODY = "nobody"


class Place(str, enum.Enum):
    """Where in the chain of events a line of evidence stands."""

    INITIATING = "initiating"
    CASCADE = "cascade"
    """It waited for another, or lost it."""
    TEARDOWN = "teardown"
    """It was ended because another had failed."""


class Outlook(str, enum.Enum):
    """What a retry can do."""

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    NONE = "do not retry"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Signature:
    """One kind of observation and its meaning; the head of catalogue.toml says what the fields are."""

    name: str
    kind: Kind
    strength: Strength
    subject: Subject
    outlook: Outlook
    suggests: str
    settles: str
    action: str
    source: str
    """Where the text, or its meaning, is defined; "" for our own observation."""
    others: str = ""
    patterns: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    kernel: bool = False
    general: bool = False
    device: bool = False
    program: bool = False

    @cached_property
    def compiled(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern) for pattern in self.patterns)

    def search(self, text: str) -> re.Match[str] | None:
        """The first of its patterns that matches somewhere in a line."""
        return next((found for each in self.compiled if (found := each.search(text))), None)

    @property
    def place(self) -> Place:
        """Where it stands in the chain of events."""
        if self.strength is not Strength.CONSEQUENCE:
            return Place.INITIATING
        return Place.CASCADE if self.subject is Subject.PEER else Place.TEARDOWN


def _signature(entry: dict[str, Any]) -> Signature:
    return Signature(
        kind=Kind(entry.pop("kind")),
        strength=Strength(entry.pop("strength")),
        subject=Subject(entry.pop("subject")),
        outlook=Outlook(entry.pop("outlook")),
        patterns=tuple(entry.pop("pattern")),
        examples=tuple(entry.pop("examples")),
        negative=tuple(entry.pop("negative")),
        **entry,
    )


SIGNATURES = tuple(_signature(entry) for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["signature"])
BY_NAME = {signature.name: signature for signature in SIGNATURES}
