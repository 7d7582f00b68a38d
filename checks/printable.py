r"""
Text of others where a person reads it: control characters are shown, not carried out.

What a node, a plug-in or a kernel log says may hold escape sequences that move a terminal's cursor, overwrite what it
showed before, or set its title, and Unicode's direction overrides, which show other words than are there. All of them
become `\u001b` and the like: the form of JSON, in which they may stand only inside of strings, so that a JSON document
stays the same document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 but for tab and newline, DEL, C1 (8-bit CSI and OSC), Arabic letter mark, direction marks, line and paragraph
# separators, direction overrides and isolates, and halves of characters, which no encoder takes.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROL_BYTES = re.compile(
    rb"[\0-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)
# All bytes but those with which a match begins.
_PLAIN = bytes(sorted({*range(0x20, 0x100), 9, 10} - {0x7F, 0xC2, 0xD8, 0xE2}))


def printable(text: str) -> str:
    """The text with every control character escaped but for tabs and newlines; the same again when called again."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_line(text: str) -> str:
    """The same as one line: a newline is escaped too, where it could pass for another line of ours."""
    return printable(text).replace("\n", "\\u000a")


def printable_bytes(body: bytes, *, backslash: bytes = b"\\") -> bytes:
    """The same for UTF-8, as cheap as can be where there is nothing to do. `backslash` is how the format writes one."""
    if not body.translate(None, _PLAIN):
        return body
    return _CONTROL_BYTES.sub(lambda found: backslash + b"u%04x" % ord(found[0].decode()), body)


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
