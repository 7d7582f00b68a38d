"""
Collect what the documentation site is made of: `python -m docs.site FOLDER`; `make site` then has mkdocs build it.

The site's tree is the repository's, so that links between pages are the same here and there. README.md is its start.
What is not a page (manifests, scripts) is copied beside the pages that link to it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from healthd import __version__
from healthd.aggregator.application import Application

ROOT = Path(__file__).parent.parent
WHOLE = ("docs", "deploy")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
NOT_SHOWN = shutil.ignore_patterns("__pycache__", "*.pyc", "generate.py", "site.py", "man.py", "reason_pages.py")

REFERENCE = """# API reference

As a file: [openapi.json](openapi.json). How it is meant to be used: [HTTP API](api.md).
"""


def collect(folder: Path) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in WHOLE:
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_SHOWN)
    for name in PAGES:
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "README.md", folder / "index.md")
    described = Application(preflight=False).openapi()
    (folder / "docs/openapi.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    (folder / "docs/api-reference.md").write_text(reference(described), encoding="utf-8")
    (folder / "version.txt").write_text(version(ROOT) + "\n", encoding="utf-8")
    for page in folder.rglob("*.md"):
        page.write_text("".join(_linked(page, folder)), encoding="utf-8")


def reference(described: Mapping[str, Any]) -> str:
    """Every operation of the API in a section, by subject; schemas are in the file alone."""
    parts = [REFERENCE]
    operations = [
        (one["tags"], _operation(method.upper(), path, one))
        for path, methods in described["paths"].items()
        for method, one in methods.items()
    ]
    for tag in described["tags"]:
        found = [text for tags, text in operations if tags == [tag["name"]]]
        parts += [f"## {tag['name'].capitalize()}\n\n{tag['description']}\n", *found] if found else []
    return "\n".join(parts)


def _operation(method: str, path: str, one: Mapping[str, Any]) -> str:
    lines = [f"### `{method} {path}`\n", f"{one['summary']}\n"]
    if "description" in one:
        lines.append(f"{one['description']}\n")
    for parameter in one.get("parameters", ()):
        needed = ", required" if parameter["required"] else ""
        about = f": {parameter['description']}" if "description" in parameter else ""
        lines.append(f"- `{parameter['name']}` ({parameter['in']}{needed}){about}")
    return "\n".join(lines) + "\n"


def version(tree: Path) -> str:
    """`healthd 0.1.0, commit 1a2b3c4d5e6f`, and whether the tree was changed since; the version alone without git."""
    git = ("git", "-C", str(tree), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, changed")
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return f"healthd {__version__}" + (f", commit {commit}" if commit else "")


def _linked(page: Path, folder: Path) -> Iterator[str]:
    """The text with links that a site can follow: to a folder's page or list of files, and to the start."""
    text = page.read_text(encoding="utf-8")
    done = 0
    for link in re.finditer(r"(?<=\]\()([^)#\s]+)(?=[#)])", text):
        target = link[1]
        there = (page.parent / target).resolve()
        yield text[done : link.start()]
        done = link.end()
        if "://" not in target and there == (folder / "README.md").resolve():
            yield target.removesuffix("README.md") + "index.md"
        elif "://" not in target and there.is_dir():
            yield f"{target.rstrip('/')}/{_page_of(there)}"
        else:
            yield target
    yield text[done:]


def _page_of(folder: Path) -> str:
    """The page of a folder; one that lists its files where it has none."""
    if (folder / "README.md").exists():
        return "README.md"
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".md")
    names = (file.relative_to(folder).as_posix() for file in files)
    (folder / "index.md").write_text(
        f"# {folder.name}\n\n" + "".join(f"- [{n}]({n})\n" for n in names), encoding="utf-8"
    )
    return "index.md"


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
