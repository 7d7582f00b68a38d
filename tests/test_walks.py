"""docs/architecture.md names the files that three walks really enter, and no more of them than are allowed."""

from __future__ import annotations

import pytest

from tests.profile import some
from tests.walks import PAGE, WALKS, block, files_of, written


@pytest.mark.parametrize("walk", some(list(WALKS), 3))
def test_page_names_the_files_that_a_walk_enters(walk: str) -> None:
    files = files_of(walk)
    found = block(walk).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == written(walk, files), "docs/architecture.md is old: run `make docs`"
    assert len(files) <= WALKS[walk].most_files
