"""Who may know whom: imports go one way only."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthd.integrations import INTEGRATIONS
from tests.every import every

ROOT = Path(__file__).parent.parent
FOREIGN = {"torch", "torch_xla", "torch_neuronx", "numpy"}

# Room -> the rooms that it may import. `healthd` alone is the package's own `__init__`, with its version.
ROOMS = {
    "healthd": {"bundled_checks"},
    "healthd.bundled_checks": set[str](),
    "healthd.__main__": {"cli", "runner"},
    "healthd.core": set[str](),
    "healthd.localize": {"core"},
    "healthd.baselines": {"core"},
    "healthd.runner": {"core", "localize"},
    "healthd.clients": {"core"},
    "healthd.integrations": {"core", "clients", "node", "aggregator", "hooks", "cli"},
    "healthd.node": {"core", "runner", "integrations"},
    "healthd.aggregator": {"integrations", "core", "localize", "baselines", "postmortem"},
    "healthd.hooks": {"core", "aggregator", "node", "runner", "integrations"},
    "healthd.postmortem": {"core"},
    "healthd.cli": {
        "integrations",
        "core",
        "baselines",
        "runner",
        "node",
        "aggregator",
        "hooks",
        "postmortem",
    },
}

# The same inside the aggregator. A file beside the rooms is a room of its own. `records` stands for the records of all
# rooms (their modules `records` and `*_records`): who may see them sees no logic.
AGGREGATOR = {
    "policy": set[str](),
    "backlog": set[str](),
    "settings": {"identity"},
    "metrics": {"records", "fleet", "jobs"},
    "identity": set[str](),
    "fleet": {"store", "backlog"},
    "validation": {"records", "policy"},
    "gate": {"records", "policy", "validation"},
    "quarantine": {"records", "policy", "fleet"},
    "drain": {"records", "engine", "fleet", "quarantine"},
    "jobs": {"records", "settings", "engine", "store", "validation"},
    "screening": {"records", "policy", "fleet", "validation", "store", "engine"},
    "store": {"records"},
    "engine": {"records", "policy", "backlog", "gate", "validation", "quarantine", "fleet", "jobs", "store"},
    "api": {
        "backlog",
        "records",
        "policy",
        "settings",
        "metrics",
        "identity",
        "fleet",
        "gate",
        "quarantine",
        "jobs",
        "drain",
        "screening",
        "store",
        "engine",
    },
    "page": {"records", "policy", "identity", "fleet", "quarantine", "store", "engine", "api"},
    "application": {"engine", "api", "page"},
    "forwarding": {"settings", "metrics", "identity", "api"},
    "leadership": {
        "forwarding",
        "records",
        "policy",
        "settings",
        "metrics",
        "identity",
        "fleet",
        "quarantine",
        "jobs",
        "drain",
        "screening",
        "store",
        "engine",
        "api",
        "application",
    },
    "process": {
        "policy",
        "settings",
        "identity",
        "screening",
        "drain",
        "store",
        "forwarding",
        "leadership",
        "metrics",
    },
}

# Rooms that compute and do nothing else, and what may therefore never be imported there.
PURE = (
    "policy",
    "gate",
    "validation",
    "quarantine",
    "jobs.calibration",
    "screening.risk",
    "screening.plan",
    "screening.look",
)
IMPURE = {"asyncio", "threading", "socket", "subprocess", "sqlalchemy", "httpx", "starlette", "fastapi", "time"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "migrations.versions" not in name:
            yield name, path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def import_statements(path: Path, *, top_level_only: bool = False) -> tuple[ast.Import | ast.ImportFrom, ...]:
    body = tree_of(path).body
    return tuple(
        node
        for node in (body if top_level_only else statements(body))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )


def statements(body: list[Any]) -> Iterator[ast.AST]:
    """All statements, and none of their expressions, which are most of a tree."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            if isinstance(inner := getattr(node, part, None), list):
                yield from statements(inner)


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """The modules that a file imports; of `from package import name`, the module `package.name` where there is one."""
    for node in import_statements(path, top_level_only=top_level_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


@functools.cache
def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def room_of(module: str, depth: int = 2) -> str:
    return ".".join(module.split(".")[:depth])


def last(room: str) -> str:
    return room.rpartition(".")[2]


@every(("name", "path"), list(modules("checks")))
def test_checks_import_the_standard_library_alone_and_never_healthd(name: str, path: Path) -> None:
    for module in imports(path):
        assert module.split(".")[0] != "healthd", f"{name} imports {module}"
    for module in imports(path, top_level_only=True):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names or top in ("checks", "__future__"), f"{name} imports {module} at its top"


@every(("name", "path"), list(modules("healthd")))
def test_the_service_never_imports_torch_and_rooms_keep_their_order(name: str, path: Path) -> None:
    room = room_of(name)
    assert room in ROOMS, f"{room} is not a room of ROOMS"
    for module in imports(path):
        assert module.split(".")[0] not in FOREIGN, f"{name} imports {module}"
    for module in imports(path):
        if module.startswith("healthd.") and room_of(module) != room:
            assert last(room_of(module)) in ROOMS[room], f"{name} imports {module}"


@every(("name", "path"), list(modules("healthd/aggregator")))
def test_rooms_of_the_aggregator_keep_their_walls(name: str, path: Path) -> None:
    room = last(room_of(name, 3))
    if room == "aggregator":
        return
    assert room in AGGREGATOR, f"{name}: {room} is not a room of AGGREGATOR"
    for module in imports(path):
        if room in PURE or name.removeprefix("healthd.aggregator.") in PURE or is_records(name):
            assert module.split(".")[0] not in IMPURE, f"{name} is pure and imports {module}"
        if not module.startswith("healthd.aggregator."):
            continue
        if is_records(name):
            assert is_records(module), f"{name} has records and imports {module}"
        if last(room_of(module, 3)) != room:
            allowed = AGGREGATOR[room]
            seen = "records" if is_records(module) and "records" in allowed else last(room_of(module, 3))
            assert seen in allowed, f"{name} imports {module}"


def is_records(module: str) -> bool:
    """Frozen data of a room without logic."""
    return last(module) == "records" or last(module).endswith("_records")


def room_at(module: str) -> str:
    """The room of a module: one level deeper in the aggregator and the integrations; `checks` is one room."""
    parts = module.split(".")
    deep = len(parts) > 1 and parts[:2] in (["healthd", "aggregator"], ["healthd", "integrations"])
    return ".".join(parts[: 1 if parts[0] == "checks" else 3 if deep else 2])


@functools.cache
def face(room: str) -> set[str] | None:
    """What `__init__` of a room hands on: names, and modules by their path inside of it; None of a room of one file."""
    package = ROOT / Path(*room.split(".")) / "__init__.py"
    if not package.exists() or room == "healthd":
        return None
    for node in tree_of(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def taken_from_other_rooms(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """Each (room, what a module takes of it): a name that the room hands on, or the path of a module inside of it."""
    for node in import_statements(path):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] not in PACKAGES:
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            module = inner if is_module(inner) else node.module
            room = room_at(module)
            if room not in (room_at(name), module):
                yield room, module.removeprefix(f"{room}.")
            elif room != room_at(name):
                yield room, alias.name


LEAVES = "healthd.integrations"


def test_integrations_are_leaves_with_a_line_and_two_folders_each() -> None:
    names = [one.name for one in INTEGRATIONS]
    for where in ("healthd", "tests"):
        found = {path.parent.name for path in (ROOT / where / "integrations").glob("*/*.py")}
        assert found == set(names), where
    assert names == sorted(names), "the list is in the order of the names"
    own = {name: (f"{LEAVES}.{name}", f"tests.integrations.{name}") for name in names}
    for name, path in [*EVERY_MODULE, *modules("tests")]:
        text = path.read_text(encoding="utf-8")
        if LEAVES not in text or name == LEAVES:
            continue
        for module in imports(path):
            leaf = module.removeprefix(f"{LEAVES}.").split(".")[0]
            if leaf in own:
                assert name.startswith(own[leaf]), f"{name} imports {module}, which is a leaf"


PACKAGES = ("healthd", "checks")
EVERY_MODULE = [pair for package in PACKAGES for pair in modules(package)]


@every(("name", "path"), EVERY_MODULE)
def test_rooms_are_entered_by_their_faces_alone(name: str, path: Path) -> None:
    for room, taken in taken_from_other_rooms(name, path):
        handed_on = face(room)
        assert handed_on is None or taken in handed_on, f"{name} takes {taken} of {room}, which does not hand it on"


def test_a_face_hands_on_nothing_that_no_other_room_takes() -> None:
    taken: dict[str, set[str]] = {}
    for name, path in EVERY_MODULE:
        for room, what in taken_from_other_rooms(name, path):
            taken.setdefault(room, set()).add(what)
    for room in {room_at(name) for name, _ in EVERY_MODULE}:
        spare = (face(room) or set()) - taken.get(room, set()) - FOR_LEAVES.get(room, set())
        assert not spare, f"{room} hands on {sorted(spare)}, which no other room takes"


# What integrations may use, whether or not one of them does.
FOR_LEAVES = {
    "healthd.aggregator.drain": {"plan", "settings", "targets"},
    "healthd.cli": {
        "fleet.line",
        "hooks.readiness",
        "services",
        "settings.gate",
        "settings.options",
        "settings.tree",
        "support.doctor",
        "terminal.output",
        "terminal.render",
    },
    "healthd.clients": {"kubernetes"},
    "healthd.hooks": {"stopping"},
    "healthd.node": {
        "clock",
        "http.health",
        "occupancy.model",
        "occupancy.watching",
        "protobuf",
        "services",
        "settings",
        "state.store",
    },
}


def test_modules_import_each_other_in_no_cycle() -> None:
    """Not even inside functions. Names that only types need do not count."""
    known = {name for name, _ in EVERY_MODULE}
    after = {name: {one for one in imports_to_run(path) if one in known and one != name} for name, path in EVERY_MODULE}
    done: set[str] = set()
    while ready := {name for name, needed in after.items() if name not in done and needed <= done}:
        done |= ready
    left = known - done  # those in cycles, and whoever imports them
    while loose := {name for name in left if not any(name in after[other] for other in left)}:
        left -= loose
    assert not left, f"cycles of imports among {sorted(left)}"


def imports_to_run(path: Path) -> Iterator[str]:
    """As `imports`, without those below `if TYPE_CHECKING`."""
    of_types = {
        inner
        for node in statements(tree_of(path).body)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in statements(node.body)
    }
    for node in import_statements(path):
        if node in of_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


OF_A_TEST = re.compile(r"(?m)^\s*(?:from|import)\s(?:[^\n(]*|[^\n(]*\([^)]*)\btest_")


def test_tests_share_what_they_are_made_with_by_kits_and_never_by_another_module_of_tests() -> None:
    for name, path in modules("tests"):
        if not OF_A_TEST.search(path.read_text(encoding="utf-8")):  # parsing all of them takes seconds
            continue
        for module in imports(path):
            assert not last(module).startswith("test_"), f"{name} imports {module}: move what it needs to a kit"


def test_every_room_of_the_tables_is_there() -> None:
    for room in [*ROOMS, *(f"healthd.aggregator.{name}" for name in AGGREGATOR)]:
        assert is_module(room), room
