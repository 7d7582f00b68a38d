"""The runbooks: a text for every reason, and pages beside the rules that name files which are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from checks.reasons import REASONS
from tests.every import every
from tests.watch.stand import GRAFANA, PROMETHEUS, RUNBOOKS

TEXTS = tomllib.loads((RUNBOOKS / "reasons.toml").read_text(encoding="utf-8"))


def test_every_reason_has_a_text_and_no_text_is_left_over() -> None:
    assert set(TEXTS) == set(REASONS), "write it in docs/runbooks/reasons.toml, then `make docs`"


@every("code", sorted(TEXTS))
def test_text_of_a_reason_is_short_and_whole(code: str) -> None:
    text = TEXTS[code]
    assert text.keys() - {"blame"} == {"look", "do", "other"}
    assert not text.get("blame", "").endswith("."), "the page goes on behind it"
    for sentence in (text["look"], text["do"], text["other"]):
        assert 5 < len(sentence) < 400
        assert sentence.rstrip("`").endswith((".", "?"))


@pytest.mark.parametrize("page", [PROMETHEUS / "README.md", GRAFANA / "README.md"], ids=lambda path: path.parent.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_-]+(?:\.test)?\.(?:yml|json|py))`", text):
        assert (page.parent / name).is_file(), name
