"""
Compilation in a worker: whether its graphs are compiled, and compiling them once.

Only for accelerators that compile, and where a cache of healthd's own is configured; otherwise there is nothing to do.
See `checks.accelerators.neuron.cache` for the cache itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.accelerators.neuron.cache import ColdCacheError, CompileCache, entry_of, make_key
from checks.profiling.programs import programs_in, programs_of, remember

REMEDY = "run 'healthd warm' on this node, or share compile_cache of [probe] with nodes like it"
# A single node cannot compile the graphs of ranks of several nodes.
REMEDY_BETWEEN_NODES = (
    "let the probes compile (on_cold_cache of [probe]), share compile_cache with a node that has been in such a group, "
    "or let nccom-test carry collectives between nodes (nccom_launch of [policy])"
)


@dataclass(frozen=True)
class Graphs:
    """The graphs of one check as it will be run. `ranks` is None except for collectives."""

    check: str
    tier: str
    params: Mapping[str, Any]
    ranks: int | None

    @property
    def entry(self) -> str:
        """Its name in the manifest."""
        return entry_of(self.check, self.tier, self.params, self.ranks)


class Compiling:
    """
    The compilation of one worker. `setup_compile` is the member `compile` of its setup: None, or {root, graphs, cold,
    retry}.

    `cold` says what to do where something is not compiled: `unknown` (report it) or `compile`.
    """

    def __init__(self, setup_compile: Mapping[str, Any] | None, setup: Mapping[str, Any]) -> None:
        self._compiles = bool(setup_compile) and setup_compile is not None and setup_compile["cold"] == "compile"
        self._retry = bool(setup_compile and setup_compile["retry"])
        self._cache: CompileCache | None = None
        self._own_ranks = len(((setup.get("options") or {}).get("group") or {}).get("targets") or ())
        self._before: frozenset[str] = frozenset()
        self.graphs: tuple[Graphs, ...] = ()
        if setup_compile:
            self.graphs = tuple(Graphs(**graphs) for graphs in setup_compile["graphs"])
            self._cache = cache_of(Path(setup_compile["root"]), setup["inventory"], setup["target"], setup["options"])

    def options(self) -> dict[str, Any]:
        """The options of `bind` in addition to those of the operator."""
        if self._cache is None:
            return {}
        return {"compile_folder": str(self._cache.folder), "retry_failed": self._retry}

    def cold(self) -> list[str]:
        """
        The entries that must be compiled first. Raises ColdCacheError where compiling is not allowed and nothing can
        run.

        Ranks run together or not at all; other checks that are compiled can run (see `require`).
        """
        if self._cache is None:
            return []
        missing = self._cache.missing([graphs.entry for graphs in self.graphs])
        if not self._compiles and any(graphs.ranks is None and graphs.entry not in missing for graphs in self.graphs):
            return []
        if missing and not self._compiles:
            names = ", ".join(dict.fromkeys(entry.partition("/")[0] for entry in missing))
            ranks = max((graphs.ranks or 0 for graphs in self.graphs), default=0)
            if self._own_ranks and ranks > self._own_ranks:
                raise ColdCacheError(f"nothing is compiled here for {names} of {ranks} ranks; {REMEDY_BETWEEN_NODES}")
            raise ColdCacheError(f"nothing is compiled here for {names}; {REMEDY}")
        return missing

    def require(self, check: str) -> None:
        """Raise ColdCacheError where a check's graphs are not compiled and compiling is not allowed."""
        wanted = [graphs.entry for graphs in self.graphs if graphs.check == check]
        if self._cache is not None and not self._compiles and self._cache.missing(wanted):
            raise ColdCacheError(f"nothing is compiled here for {check}; {REMEDY}")

    @contextmanager
    def alone(self) -> Iterator[list[str]]:
        """Be the only process that compiles; yields what was removed of earlier failures, in words."""
        if self._cache is None:
            yield []
            return
        with self._cache.compiling():
            yield self._cache.clear_stale() if self._retry else []

    def is_compiled(self, graphs: Graphs) -> bool:
        """Whether the graphs of a check are compiled; always true without a cache."""
        return self._cache is None or not self._cache.missing([graphs.entry])

    def is_due(self, graphs: Graphs) -> bool:
        """Whether this worker compiles a check ahead for all others; ranks compile together, when they run."""
        return self._compiles and graphs.ranks is None and not self.is_compiled(graphs)

    def started(self, check: str) -> None:
        """A check starts that may compile: what is there from now on is its own."""
        if self._cache is not None and self._compiles and any(graphs.check == check for graphs in self.graphs):
            self._before = programs_in(self._cache.folder)

    def programs(self, check: str) -> list[str]:
        """The compiled programs of a check, the largest first; empty where none are known."""
        if self._cache is None:
            return []
        entries = [graphs.entry for graphs in self.graphs if graphs.check == check and graphs.ranks is None]
        return [str(path) for entry in entries for path in programs_of(self._cache.folder, entry)]

    def ended(self, check: str, seconds: float) -> None:
        """A check has run to its end on this device, so its graphs are compiled."""
        for graphs in self.graphs:
            if graphs.check == check and self._cache is not None and self._compiles and not self.is_compiled(graphs):
                self._cache.record(graphs.entry, seconds)
                remember(self._cache.folder, graphs.entry, programs_in(self._cache.folder) - self._before)


def cache_of(root: Path, inventory: Mapping[str, Any], target: str | None, options: Mapping[str, Any]) -> CompileCache:
    """The cache of a worker's device, by what this interpreter has installed. Imports no torch."""
    from checks.accelerators.neuron.packages import read_versions

    flags: tuple[str, ...] = ()
    lnc = None
    if inventory.get("accelerator") == "neuron":
        from checks.accelerators.neuron.environment import flags_of, lnc_of

        flags, lnc = flags_of(options), lnc_of(inventory, options)
    return CompileCache(root, make_key(inventory, target, flags, lnc, read_versions()))
