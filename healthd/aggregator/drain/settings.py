"""What an operator can set of the drain controller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from healthd.core.config import choice, tables_of
from healthd.core.integrations import actuator_tables, actuators, table_of
from healthd.integrations import INTEGRATIONS

R = TypeVar("R")

_OWNER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class ActuatorSettings:
    """Settings of the drain controller. ValueError names a value that is not allowed."""

    kind: str = choice("none", lambda: ("none", *actuators(INTEGRATIONS)))
    """Which scheduler. none: healthd changes nothing outside of itself, and only gates keep jobs off a node."""

    mode: Literal["observe", "act"] = "observe"
    """observe (the default): only report what would be done, so that an operator can see it first."""

    owner: str = "healthd"
    """Name that identifies our marks. Two aggregators on one scheduler need two owners, or each undoes the other's
    marks."""

    look_seconds: float = 10.0
    """How often the wanted and the actual state are compared. Rejects of gates and changes of quarantines are acted
    on at once."""

    answer_seconds: float = 20.0
    """How long the reject of a gate is delayed until the nodes at fault are removed, so that the retry lands
    elsewhere. Two calls take milliseconds. After this time the scheduler counts as unreachable, which must not block
    the job."""

    gate_seconds: float = 600.0
    """How long a gate's reject alone removes a node. Ten minutes: the retry has been placed by then, and a node that
    keeps failing is quarantined by rule."""

    removals_per_minute: int = 10
    """How fast nodes are removed, in nodes per minute: if all fail at once, the nodes are hardly the cause.
    `out_ratio` of the policy limits how many may be out at a time."""

    backoff_max_seconds: float = 300.0
    """Longest pause after failed calls. Five minutes: a scheduler that is back is soon up to date again."""

    integrations: Mapping[str, Any] = tables_of(lambda: actuator_tables(INTEGRATIONS))
    """The tables of integrations that are set, by key; see `of`."""

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner):
            raise ValueError(f"owner: {self.owner!r} must be 1 to 63 letters, digits, '.', '-', '_'")
        if self.removals_per_minute < 1:
            raise ValueError(f"removals_per_minute: must be at least 1, not {self.removals_per_minute}")
        for name in ("look_seconds", "gate_seconds", "backoff_max_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name.removesuffix('_seconds')}: must be more than 0, not {getattr(self, name)}")
        if not 0 <= self.answer_seconds <= 120:
            raise ValueError(f"answer: must be from 0 s to 120 s, not {self.answer_seconds:g} s")

    def of(self, key: str, record: type[R]) -> R:
        """The table of an integration; with its defaults where nothing is set."""
        return table_of(self.integrations, key, record)
