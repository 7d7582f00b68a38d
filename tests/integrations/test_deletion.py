"""Without its line and its two folders an integration is gone, and everything else works."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.integrations import INTEGRATIONS
from tests.profile import THOROUGH

ROOT = Path(__file__).parents[2]
KEPT = ("healthd", "checks", "packages", "tests", "docs", "deploy", "pyproject.toml", "mkdocs.yml")
LIST = "healthd/integrations/__init__.py"

# Every module of the service is imported, and the settings of every command are read.
EVERYTHING = """
import importlib, pathlib
for path in sorted(pathlib.Path("healthd").rglob("*.py")):
    if "migrations" not in path.parts and path.name != "__main__.py":
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
from healthd.cli.settings.tree import Settings
from healthd.core.config import leaves
print(len(list(leaves(Settings))))
"""


def chosen() -> list[str]:
    """All by night, else two by the commit."""
    names = [one.name for one in INTEGRATIONS]
    if THOROUGH:
        return names
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    first = int(git.stdout.strip() or "0", 16) % len(names)
    return sorted({names[first], names[(first + 1) % len(names)]})


def without(name: str, copy: Path) -> None:
    """A copy of the tree without an integration."""
    for kept in KEPT:
        if (ROOT / kept).is_dir():
            shutil.copytree(ROOT / kept, copy / kept, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / kept, copy / kept)
    for where in ("healthd", "tests"):
        shutil.rmtree(copy / where / "integrations" / name)
    text = (copy / LIST).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    (found,) = (
        call
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "Integration"
        and any(one.arg == "name" and ast.literal_eval(one.value) == name for one in call.keywords)
    )
    del lines[found.lineno - 1 : found.end_lineno]
    (copy / LIST).write_text("".join(lines), encoding="utf-8")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", chosen())
def test_everything_else_works_without_an_integration(name: str, tmp_path: Path) -> None:
    without(name, tmp_path)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HEALTHD_", "PYTEST_"))}
    environ |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    commands = [
        [sys.executable, "-c", EVERYTHING],
        [*pytest_, "tests/test_layers.py", "tests/core/test_config.py"],
        *([[*pytest_, "--collect-only"]] if THOROUGH else []),
    ]
    for command in commands:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
