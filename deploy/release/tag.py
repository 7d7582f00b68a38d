"""
Compare a tag with the versions in the tree: `python -m deploy.release.tag vX.Y.Z`; exit code 1 names what differs.

It runs before anything is installed, so it reads the files and imports nothing of healthd.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Each place where a release has its version (docs/release.md, step 1).
PLACES = (
    ("healthd/__init__.py", r'^__version__ = "(.+)"$'),
    ("packages/healthd-steps/healthd_steps/__init__.py", r'^__version__ = "(.+)"$'),
    ("deploy/helm/healthd/Chart.yaml", r"^(?:version|appVersion): (.+)$"),
    ("deploy/helm/healthd-job/Chart.yaml", r"^(?:version|appVersion): (.+)$"),
    ("deploy/kubernetes/components/image/kustomization.yaml", r"^\s+newTag: (.+)$"),
    ("CHANGELOG.md", r"\A# Changelog\s+^## (.+)$"),
)


def differences(tag: str, root: Path = ROOT) -> list[str]:
    """One line for each place that has another version than the tag names, or a changelog without its date."""
    found = []
    for place, pattern in PLACES:
        versions = re.findall(pattern, (root / place).read_text(encoding="utf-8"), re.MULTILINE)
        if place == "CHANGELOG.md":
            if not versions or not re.fullmatch(rf"{re.escape(tag[1:])} \(\d{{4}}-\d\d-\d\d\)", versions[0]):
                found.append(f"{place}: its first heading must be: ## {tag[1:]} (YYYY-MM-DD)")
        elif set(versions) != {tag[1:]} or not tag.startswith("v"):
            found.append(f"{place}: version {', '.join(dict.fromkeys(versions)) or 'not found'}, the tag is {tag!r}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(differences(sys.argv[1] if len(sys.argv) > 1 else "")) or 0)
