"""What the tests of docs commands, and those beside them, are made with."""

from __future__ import annotations

import re
from collections.abc import Iterator


def lines(text: str) -> Iterator[str]:
    """Every line that somebody may type: in prose and in blocks, continued lines as one."""
    text = text.replace("\\\n", " ")
    for language, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text):
        if language in ("bash", "dockerfile"):
            yield from block.splitlines()
        else:
            yield from re.findall(r"(?m)^[$#] (.*)$" if language == "console" else r"(?m)^\$ (.*)$", block)
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    for words in re.findall(r"(?<!`)`([^`]+)`", prose):
        if re.search(r"(^|[\s/])(healthd|kubectl|make|python3? -m) ", words):
            yield words
