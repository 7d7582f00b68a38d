"""
Which packages the wheel has, and its description; all else is in pyproject.toml.

`checks` is installed inside of `healthd` (see healthd/bundled_checks.py): an environment that healthd shares with a job
may have a package `checks` of its own.

REPOSITORY_URL, which a release sets, is where the links of README lead: beside a package there are no other files.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")
README = Path(__file__).parent / "README.md"


def description() -> str:
    """README, with links that work wherever it is shown; as it is where nobody said where the repository is."""
    text = README.read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{REPOSITORY}/raw/main/", text)
    return re.sub(r"((?<!!)\[(?:[^\]!]|!(?!\[))*\]\()(?!https?:|#)", rf"\g<1>{REPOSITORY}/blob/main/", text)


setup(
    packages=[
        *find_packages(include=["healthd", "healthd.*"]),
        *(f"healthd.bundled.{name}" for name in find_packages(include=["checks", "checks.*"])),
    ],
    package_dir={"healthd.bundled.checks": "checks"},
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/main/README.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    if REPOSITORY
    else {},
)
