"""Profiles on their way from a worker to the runner: in parts that fit in lines of `checks.worker.protocol`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from checks.contract import MAX_PROFILE_BYTES, PROFILE_FORMAT, Profile
from checks.worker.protocol import ProtocolError, shorten

MAX_PROFILES = 16  # of one command
PROFILE_ID = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")
_PART_BYTES = 36 * 1024  # 48 KiB as base64: with the other members less than a line may have


def fits(profile: Profile) -> bool:
    """Whether the runner takes it: any other costs the worker its life, and the check its findings."""
    known = PROFILE_ID.fullmatch(profile.id) is not None and profile.format == PROFILE_FORMAT
    return known and len(profile.content) <= MAX_PROFILE_BYTES


def split(profile: Profile) -> Iterator[dict[str, Any]]:
    """The parts of a profile as plain values; the last one says so."""
    starts = range(0, max(1, len(profile.content)), _PART_BYTES)
    for start in starts:
        yield {
            "id": profile.id,
            "target": profile.target,
            "said": shorten(profile.said),
            "format": profile.format,
            "data": base64.b64encode(profile.content[start : start + _PART_BYTES]).decode("ascii"),
            "last": start == starts[-1],
        }


class ProfileParts:
    """Puts the profiles of one command together. What is too much, or no profile, raises ProtocolError."""

    def __init__(self) -> None:
        self.whole: list[Profile] = []
        """The profiles that are complete."""
        self._id: str | None = None
        self._content = bytearray()

    def add(self, plain: Any) -> None:
        """The next part."""
        if not isinstance(plain, dict):
            raise ProtocolError("profile is not an object")
        values: Mapping[str, Any] = plain
        id_, target, said, form, data = (values.get(name) for name in ("id", "target", "said", "format", "data"))
        if not isinstance(id_, str) or not PROFILE_ID.fullmatch(id_) or form != PROFILE_FORMAT:
            raise ProtocolError(f"profile {str(id_)[:60]!r} has no id or no known format")
        if not (isinstance(target, str) and isinstance(said, str) and isinstance(data, str)):
            raise ProtocolError(f"profile {id_} lacks required members")
        if self._id not in (None, id_):
            raise ProtocolError(f"profile {id_} begins before {self._id} is complete")
        self._id = id_
        try:
            self._content += base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise ProtocolError(f"profile {id_} is not base64") from None
        if len(self._content) > MAX_PROFILE_BYTES or len(self.whole) >= MAX_PROFILES:
            raise ProtocolError(f"profile {id_}: more than {MAX_PROFILES} of {MAX_PROFILE_BYTES} bytes")
        if values.get("last") is True:
            content = bytes(self._content)
            self._content.clear()
            self._id = None
            self.whole.append(
                Profile(id=id_, target=target[:200], said=shorten(said), format=PROFILE_FORMAT, content=content)
            )
