"""The runbooks: a text for every reason, commands that exist, links of the pages beside them that lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from checks.reasons import REASONS
from healthd.cli import healthd
from tests.watch.stand import GRAFANA, PROMETHEUS, RUNBOOKS

TEXTS = tomllib.loads((RUNBOOKS / "reasons.toml").read_text(encoding="utf-8"))
PAGES = [*sorted(RUNBOOKS.rglob("*.md")), PROMETHEUS / "README.md"]


def test_every_reason_has_a_text_and_no_text_is_left_over() -> None:
    assert set(TEXTS) == set(REASONS), "write it in docs/runbooks/reasons.toml, then `make docs`"


@pytest.mark.parametrize("code", sorted(TEXTS))
def test_text_of_a_reason_is_short_and_whole(code: str) -> None:
    text = TEXTS[code]
    assert text.keys() == {"look", "do", "other"}
    for sentence in text.values():
        assert 5 < len(sentence) < 400
        assert sentence.rstrip("`").endswith((".", "?"))


def commands(page: Path) -> Iterator[list[str]]:
    """Every `healthd ...` of a page, in prose and in blocks."""
    text = page.read_text(encoding="utf-8")
    for found in re.findall(r"(?m)`(healthd [^`]+)`|^\$ (healthd .*)$", text):
        line = (found[0] or found[1]).split(" >> ")[0]
        yield shlex.split(line)[1:]


def unknown(words: list[str]) -> str | None:
    """What of a command line healthd does not have."""
    command: click.Command = healthd
    context = click.Context(command)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        after = command.get_command(context, words[0])
        if after is None:
            return words[0]
        command, words = after, words[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    return next((word for word in words if word.startswith("--") and word not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(path.parent.parent)))
def test_commands_in_a_page_exist(page: Path) -> None:
    for words in commands(page):
        assert unknown(list(words)) is None, f"healthd {' '.join(words)}"


def test_commands_are_found() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 60
    assert unknown(["fleet", "sing"]) == "sing"
    assert unknown(["gate", "--louder"]) == "--louder"


@pytest.mark.parametrize("page", [PROMETHEUS / "README.md", GRAFANA / "README.md"], ids=lambda path: path.parent.name)
def test_links_and_files_of_a_page_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`([a-z_-]+(?:\.test)?\.(?:yml|json|py))`", text):
        assert (page.parent / name).is_file(), name
