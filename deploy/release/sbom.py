"""
Write the parts of a release: `python -m deploy.release.sbom VERSION > healthd-VERSION.cdx.json`.

CycloneDX 1.6, the form that scanners read. The parts are what healthd requires and what that requires in turn, with all
extras, in the versions that are installed here: those of requirements.txt, which the tests ran with.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent


def required() -> list[Requirement]:
    """What pyproject.toml names, extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in (*project["dependencies"], *extras)]


def name_of(text: str) -> str:
    """A name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", text).lower()


def parts() -> dict[str, tuple[str, str | None, tuple[str, ...]]]:
    """By name: the version, the licence as the part says it, and what it requires here."""
    found: dict[str, tuple[str, str | None, tuple[str, ...]]] = {}
    wanted = [(name_of(one.name), frozenset(one.extras)) for one in required()]
    seen = set()
    while wanted:
        one = wanted.pop()
        if one in seen:
            continue
        seen.add(one)
        name, extras = one
        try:
            there = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed: pip install -r requirements.txt") from None
        below = list(_below(there.requires or (), extras))
        licence = there.metadata.get("License-Expression") or there.metadata.get("License")
        names = {name_of(requirement.name) for requirement in below} | set(found.get(name, ("", None, ()))[2])
        found[name] = (there.version, licence, tuple(sorted(names)))
        wanted += [(name_of(requirement.name), frozenset(requirement.extras)) for requirement in below]
    return found


def _below(lines: Any, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def bill(version: str) -> dict[str, Any]:
    """The document."""
    found = parts()

    def reference(name: str) -> str:
        return f"pkg:pypi/{name}@{found[name][0]}"

    own = f"pkg:pypi/healthd@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "healthd",
                "version": version,
                "purl": own,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": reference(name),
                "name": name,
                "version": number,
                "purl": reference(name),
                # A whole text is no name; scanners look it up by the purl.
                **({"licenses": [{"license": {"name": licence}}]} if licence and len(licence) < 80 else {}),
            }
            for name, (number, licence, _) in sorted(found.items())
        ],
        "dependencies": [
            {"ref": own, "dependsOn": sorted({reference(name_of(one.name)) for one in required()})},
            *(
                {"ref": reference(n), "dependsOn": [reference(b) for b in below]}
                for n, (_, _, below) in sorted(found.items())
            ),
        ],
    }


if __name__ == "__main__":
    json.dump(bill(sys.argv[1]), sys.stdout, indent=1)
    sys.stdout.write("\n")
