"""Who may know whom: imports go one way only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOREIGN = {"torch", "torch_xla", "torch_neuronx", "numpy"}

# Room -> rooms of healthd that it may import. What is not named here may be imported by all: model, errors, wire ...
COMMON = {
    "healthd.core.model",
    "healthd.core.errors",
    "healthd.core.lazy",
    "healthd.core.wire",
    "healthd.core.config",
    "healthd.core.evidence",
    "healthd.core.http.server",
    "healthd.core.http.connection",
    "healthd.core.toml_text",
    "healthd.core.http.addresses",
    "healthd.localize",
    "healthd.core.launch_permission",
    "healthd.core.platforms.slurm",
    "healthd.core.platforms.kubernetes",
    "healthd.node.nccom.rsh",
    "healthd.baselines",
    "healthd.core.node_name",
    "healthd.core.http.exposition",
    "healthd.core.admission",
    "healthd.core.file_trust",
    "healthd.core.programs",
    "healthd.core.redaction",
    "healthd.core.tasks",
    "healthd.core.threads",
    "healthd",
}
ROOMS = {
    "healthd.__main__": {"healthd.cli"},
    "healthd.runner": set[str](),
    "healthd.node": {"healthd.runner"},
    "healthd.aggregator": set[str](),
    "healthd.hooks.launchers": set[str](),
    "healthd.record": set[str](),
    "healthd.core.http.aggregator_client": set[str](),
    "healthd.hooks.preflight": {
        "healthd.core.http.aggregator_client",
        "healthd.node",
        "healthd.aggregator",
        "healthd.runner",
        "healthd.hooks.launchers",
    },
    "healthd.cli": {
        "healthd.core.http.aggregator_client",
        "healthd.node",
        "healthd.aggregator",
        "healthd.runner",
        "healthd.hooks.launchers",
        "healthd.hooks.preflight",
        "healthd.record",
    },
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "migrations.versions" not in name:
            yield name, path


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize(("name", "path"), list(modules("checks")), ids=lambda value: str(value))
def test_checks_import_the_standard_library_alone_and_never_healthd(name: str, path: Path) -> None:
    for module in imports(path):
        assert module.split(".")[0] != "healthd", f"{name} imports {module}"
    for module in imports(path, top_level_only=True):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names or top in ("checks", "__future__"), f"{name} imports {module} at its top"


@pytest.mark.parametrize(("name", "path"), list(modules("healthd")), ids=lambda value: str(value))
def test_the_service_never_imports_torch_and_rooms_keep_their_order(name: str, path: Path) -> None:
    room = room_of(name)
    for module in imports(path):
        assert module.split(".")[0] not in FOREIGN, f"{name} imports {module}"
        if not module.startswith("healthd.") or room_of(module) in COMMON or room_of(module) == room:
            continue
        if (
            not (ROOT / Path(*room_of(module).split("."))).with_suffix("").exists()
            and not (ROOT / Path(*room_of(module).split("."))).with_suffix(".py").exists()
        ):
            continue  # a name out of a module of the top level
        assert room in ROOMS, f"{name} imports {module}: {room} may import no other room"
        assert room_of(module) in ROOMS[room], f"{name} imports {module}"
