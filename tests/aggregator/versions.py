"""Trees of other versions of healthd, which run beside today's with today's dependencies: `Cluster(tree=...)`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.aggregator.service import ROOT

BEFORE_SEVERAL = "9a958138ccdc73bd7a898e4f20ca36e718531102"
"""The last commit with one aggregator alone (2026-11-26): schema 2, protocol 1. `.ci/run` names it too."""
WITH_SHARDS = "421a37d409aa56ef0c27927e8a7121d1f96f6797"
"""The last commit that could divide a fleet into shards (2026-11-27): schema 6, protocol 1."""
PACKAGES = ("checks", "healthd")
MODEL = "healthd/core/model"
NEW_MEMBERS = {
    "    step_jobs: tuple[str, ...] | None = None\n": "'r1'",  # of SyncRequest
    "    retry_after_seconds: float\n    quarantine: Quarantine | None = None\n": "'r1'",  # of SyncAnswer
    "    join: Join | None = None\n": None,  # of GateRequest, which is strict
}
"""The last line of a record, and the default of the member that comes after it."""
VERSIONS = "healthd/aggregator/store/migrations/versions"


def former_tree(place: Path, commit: str = BEFORE_SEVERAL) -> Path:
    """What was committed then; skips the test where git does not have it."""
    git = ["git", "-C", str(ROOT)]
    try:
        asked = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
        known = asked.returncode == 0
    except FileNotFoundError:
        known = False
    if not known:
        pytest.skip(f"the history of git is not here: no commit {commit[:8]}; make a full clone of the repository")
    place.mkdir()
    archive = subprocess.run([*git, "archive", commit, *PACKAGES], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return place


def next_tree(place: Path, *, additive: bool) -> Path:
    """
    Today's code with one more migration, a column that may be empty, which says of itself whether it is `additive`; and
    with one more member in what nodes, hooks and aggregators say to each other.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    newest = max(int(file.stem[1:]) for file in (place / VERSIONS).glob("v*.py"))
    (place / VERSIONS / f"v{newest + 1}.py").write_text(
        f'''"""A change of a test."""

import sqlalchemy as sa
from alembic import op

revision = "{newest + 1}"
down_revision = "{newest}"
branch_labels = None
depends_on = None
additive = {additive}


def upgrade() -> None:
    op.add_column("nodes", sa.Column("rack", sa.Text))
'''
    )
    for line, default in NEW_MEMBERS.items():
        (file,) = (file for file in (place / MODEL).glob("*.py") if line in file.read_text())
        text = file.read_text()
        assert text.count(line) == 1, line
        file.write_text(text.replace(line, f"{line}    rack: str | None = {default}\n"))
    return place
