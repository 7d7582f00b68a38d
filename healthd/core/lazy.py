"""Names of a package that are loaded when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Sequence


def names_of(package: str, names: Collection[str], modules: Sequence[str]) -> Callable[[str], object]:
    """
    The `__getattr__` of a package: one of its `names`, out of the first of its `modules` that has it.

    A module is imported only when those before it do not have the name, so those that are always needed come first.
    """

    def load(name: str) -> object:
        if name in names:
            for module in modules:
                found = vars(importlib.import_module(f"{package}.{module}"))
                if name in found:
                    setattr(sys.modules[package], name, found[name])
                    return found[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
