"""
What the snapshot that gates are stepped by is made of: everything is read once, so that all of it is of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class ReadOnce(Mapping[str, T]):
    """
    A read-only mapping. A value is read when it is first needed and stays the same from then on; `read` gives None for
    an unknown key. `keys` gives the keys to iterate over.
    """

    def __init__(self, read: Callable[[str], T | None], keys: Callable[[], Sequence[str]] = tuple) -> None:
        self._read = read
        self._keys = keys
        self._known: dict[str, T | None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """As of a mapping."""
        if key not in self._known:
            self._known[key] = self._read(key)
        found = self._known[key]
        return default if found is None else found

    def __getitem__(self, key: str) -> T:
        found: T | None = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())
