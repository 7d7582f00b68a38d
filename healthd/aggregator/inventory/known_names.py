"""
By what other names the nodes are known: a scheduler may call a node otherwise than its daemon does.

A node is known by the aliases of its settings, its instance id and its host's name, as it says itself. A name with a
domain and one without mean the same node where nothing speaks against it; two names with different domains never do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from healthd.core.node_name import alike, short

MOST_NEAR = 3


class Names:
    """Who is known by which name. Own names come first: they belong to a key, and the others are only said."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, ...]] = {}
        self._by_name: dict[str, set[str]] = {}
        self._by_short: dict[str, set[str]] = {}

    def put(self, node: str, names: Iterable[str] = ()) -> None:
        """A node and all its other names from now on."""
        after = (node, *names)
        if self._of.get(node) == after:
            return
        self.drop(node)
        self._of[node] = after
        for name in after:
            self._by_name.setdefault(name, set()).add(node)
            self._by_short.setdefault(short(name), set()).add(node)

    def drop(self, node: str) -> None:
        """A node that is gone."""
        for name in self._of.pop(node, ()):
            for index, key in ((self._by_name, name), (self._by_short, short(name))):
                if node in index.get(key, ()):
                    index[key].discard(node)
                    if not index[key]:
                        del index[key]

    def called(self, name: str) -> tuple[str, ...]:
        """The nodes that are known by this name, sorted; the name's owner alone where a node is called so itself."""
        if name in self._of:
            return (name,)
        found = self._by_name.get(name) or {
            node for node in self._by_short.get(short(name), ()) if any(alike(name, one) for one in self._of[node])
        }
        return tuple(sorted(node for node in found if not self._elsewhere(node, name)))

    def _elsewhere(self, node: str, name: str) -> bool:
        """Whether the node's own words place it in another domain than the name does."""
        names = self._of[node]
        return name not in names and "." in name and any("." in one and short(one) == short(name) for one in names)

    def near(self, name: str) -> str:
        """The end of a sentence on a name that no node has: `; did you mean ...?`, or nothing."""
        known = self.called(name)
        if known:
            return f"; {' and '.join(known)} {'is' if len(known) == 1 else 'are'} also known as {name!r}"
        near = difflib.get_close_matches(name, self._of, n=MOST_NEAR)
        return f"; did you mean {' or '.join(near)}?" if near else ""
