"""Messages are plain English: words and phrases that the project has dropped do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DROPPED = re.compile(
    r"\b(nobody|somebody|anew|told|heard|whoever|another one|in force|not well|by the word|said (?:so|that|to)|has said"
    r"|(?:is|are) none|(?<!there )(?:is|are) no (?!longer))\b"
)
"""Each was in dozens of sentences that people had to read twice."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings of three words or more with their lines; docstrings are not messages."""
    docs = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if id(node) not in docs and len(re.findall(r"[A-Za-z']{2,}", text)) > 2:
            yield node.lineno, text


def test_messages_have_none_of_the_words_that_were_dropped() -> None:
    files = [path for package in ("healthd", "checks") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text!r}"
        for path in files
        for line, text in texts(ast.parse(path.read_text()))
        if (match := DROPPED.search(text))
    ]
    assert found == []
