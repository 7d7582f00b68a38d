"""The docs say what the code does: generated pages are in step, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def test_generated_pages_are_in_step_with_the_code() -> None:
    for path, text in generate.pages().items():
        assert (DOCS / path).is_file(), f"docs/{path} is missing: run `make docs`"
        assert (DOCS / path).read_text(encoding="utf-8") == text, f"docs/{path} is old: run `make docs`"


def test_no_page_of_a_check_that_is_gone() -> None:
    made = {DOCS / path for path in generate.pages()}
    assert set((DOCS / "checks").glob("*.md")) <= made


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")]), ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
