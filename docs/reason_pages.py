"""The page of reasons, from the catalogue and docs/runbooks/reasons.toml; `docs.generate` writes it."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

from checks.reasons import REASONS, Reason

TEXTS = Path(__file__).parent / "runbooks/reasons.toml"
INTRODUCTION = """<!-- Made by `make docs` from checks/reasons.py and docs/runbooks/reasons.toml: change it there. -->

# What each reason means and what to do

A reason is the stable code behind a verdict. The *blame* decides what it does to the node:

- **node**: the node is unhealthy, and no gate admits it.
- **path**: the fault lies between nodes. No node is marked.
- **check**: healthd could not tell. The node is unknown, so no gate admits it.
- **control**: the aggregator, the request, or the connection to them. The node is not judged.

| reason | meaning | blame | action |
|---|---|---|---|
"""

HEADINGS = {"look": "Look closer", "do": "Do", "other": "Other causes"}


def reasons_page() -> str:
    """A table of all reasons, then a section for each. Links from other programs use the code as the anchor."""
    texts = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    lines = [
        f"| [{code}](#{code}) | {reason.meaning} | {reason.blame.value} | {reason.action.value} |"
        for code, reason in REASONS.items()
    ]
    for code, reason in REASONS.items():
        lines += ["", *_section(reason, texts.get(code, {}))]
    return INTRODUCTION + "\n".join(lines) + "\n"


def _section(reason: Reason, text: dict[str, str]) -> Iterator[str]:
    # GitHub and mkdocs make anchors in lower case, and Grafana can only insert the code as it is.
    yield f'<a id="{reason.code}"></a>'
    yield f"## {reason.code}"
    yield ""
    blame = f" {text['blame']}." if "blame" in text else ""
    yield from _wrapped(f"{reason.meaning} Blame: {reason.blame.value}.{blame} Action: {reason.action.value}.")
    if text:
        yield ""
    for key, title in HEADINGS.items():
        if key in text:
            yield from _wrapped(f"- **{title}**: {text[key]}")


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, width=100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
