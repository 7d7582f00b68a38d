"""What the tests of systemd, and those beside them, are made with."""

from __future__ import annotations

import configparser
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "deploy/systemd"


UNITS = ("healthd-node.service", "healthd-aggregator.service", "healthd-boot.service")


class Unit(configparser.RawConfigParser):
    """A unit file; of a key that comes twice the last counts, which is enough here."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, interpolation=None)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string((FOLDER / name).read_text(encoding="ascii"))

    def words(self, key: str, section: str = "Unit") -> set[str]:
        return set(self.get(section, key, fallback="").split())
