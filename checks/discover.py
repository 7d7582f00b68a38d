"""
Finding checks: every module-level `Check` record of this package, and third-party ones by entry point.

A check is found by its type; there is nothing to register.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from checks.contract import Check

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "healthd.checks"
HOST_PACKAGES = ("checks.system", "checks.storage")
"""Where all passive checks are, and others that need no device."""
PACKAGES = (*HOST_PACKAGES, "checks.device", "checks.training", "checks.collective")


def builtin_checks(packages: Sequence[str] = PACKAGES) -> dict[str, Check]:
    """All checks of these packages by name. Raises ValueError when two have one name."""
    found: dict[str, Check] = {}
    origins: dict[str, str] = {}
    for package in packages:
        for module in _modules(package):
            for check in checks_in(module):
                if check.name in found and origins[check.name] != module.__name__:
                    raise ValueError(
                        f"check {check.name!r} is defined in both {origins[check.name]} and {module.__name__}"
                    )
                found[check.name] = check
                origins[check.name] = module.__name__
    return found


def find_builtin(name: str) -> Check | None:
    """One check by name; the passive ones are looked through first and alone, because importing little is fast."""
    return builtin_checks(HOST_PACKAGES).get(name) or builtin_checks(PACKAGES[1:]).get(name)


def checks_in(module: ModuleType) -> list[Check]:
    """The checks that are defined at module level, in their order; what is imported from elsewhere does not count."""
    return [
        value for value in vars(module).values() if isinstance(value, Check) and value.run.__module__ == module.__name__
    ]


def load_third_party(names: Sequence[str]) -> dict[str, Check]:
    """
    Checks of installed packages, by the names of their entry points in the group `healthd.checks`.

    Only what is asked for is imported. Raises ValueError for a name that matches nothing, naming the nearest, and for
    one that does not lead to a check.
    """
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = points.setdefault(point.name, point)
        if other.value != point.value and point.name in names:
            raise ValueError(
                f"two packages provide the third-party check {point.name!r}: {other.value} and {point.value}; remove "
                "one"
            )
    found: dict[str, Check] = {}
    for name in names:
        if name not in points:
            import difflib

            near = difflib.get_close_matches(name, points, n=1)
            known = ", ".join(sorted(points)) or "none is installed"
            hint = f"; did you mean {near[0]!r}?" if near else f"; choose from: {known}"
            raise ValueError(f"no third-party check {name!r} in entry points {ENTRY_POINTS!r}{hint}")
        try:
            check = points[name].load()
        except (Exception, SystemExit) as error:  # whatever a foreign package does on import, this is one clear line
            raise ValueError(
                f"third-party check {name!r} ({points[name].value}): {type(error).__name__}: {error}"
            ) from error
        if not isinstance(check, Check):
            raise ValueError(f"third-party check {name!r} ({points[name].value}) is not made with @check")
        if found.get(check.name, check) is not check:
            raise ValueError(
                f"third-party checks {name!r} ({points[name].value}): two have the name {check.name}; drop one"
            )
        found[check.name] = check
    return found


def _modules(package: str) -> Iterator[ModuleType]:
    folder = importlib.import_module(package).__path__[0]
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(".py") and entry != "__init__.py":
            yield importlib.import_module(f"{package}.{entry[:-3]}")
        elif os.path.exists(os.path.join(folder, entry, "__init__.py")):
            yield from _modules(f"{package}.{entry}")
