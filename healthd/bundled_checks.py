"""
Where `import checks` leads to in a process of healthd: to healthd's own package, whatever else has that name.

The repository has `checks` beside `healthd`, and the wheel has it inside of it (`healthd/bundled/checks`), so that
installing healthd puts no top-level package `checks` into an environment. A job's own package of that name is neither
overwritten nor imported by mistake. Workers load `checks` by its path and need none of this.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAME = "checks"
HERE = Path(__file__).resolve().parent


class Finder:
    """Finds the package in a folder; its modules are then found as those of any package."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package, for its name alone."""
        if fullname != NAME:
            return None
        return importlib.util.spec_from_file_location(
            NAME, self._folder / "__init__.py", submodule_search_locations=[str(self._folder)]
        )


def install() -> None:
    """Let `import checks` find ours from now on. ImportError where another package of that name is imported already."""
    bundled = HERE / "bundled" / NAME
    folder = bundled if bundled.is_dir() else HERE.parent / NAME
    other = sys.modules.get(NAME)
    if other is not None and [Path(place).resolve() for place in other.__path__ or ()] != [folder]:
        raise ImportError(
            f"another package {NAME!r} is imported in this process ({other.__file__}): healthd is a program, "
            "run it as a process of its own"
        )
    sys.meta_path.insert(0, Finder(folder))
