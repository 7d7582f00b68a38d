"""What can name a node: one rule, for the daemon that bears the name and for the aggregator that hears it."""

from __future__ import annotations

import re

from healthd.errors import BadInputError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def check_name(node: str) -> None:
    """BadInputError unless the text can be a node's name: a host name or an instance id."""
    if not _NAME.fullmatch(node):
        raise BadInputError(f"{node[:80]!r} cannot name a node; use letters, digits, dots and dashes (at most 253)")
