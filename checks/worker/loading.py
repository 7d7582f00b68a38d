"""
Loads the checks of a worker by name: built-in ones, an operator's files, entry points and programs.

What cannot be loaded is one line that names the file, the entry point or the program.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from checks.contract import Check, Program, Tier

_of_the_host: dict[str, Check] = {}
_loaded: dict[int, dict[str, Check]] = {}


def load_check(name: str, setup: Mapping[str, Any]) -> Check:
    """
    One check by name. Raises LookupError for an unknown name, ValueError for what cannot be loaded.

    Built-in checks come first, those of the host before those of devices: few imports keep a passive round short.
    """
    from checks.discover import find_builtin

    found = load_host().get(name) or find_builtin(name) or load_all(setup).get(name)
    if found is None:
        raise LookupError(f"no such check: {name}")
    return found


def load_host() -> dict[str, Check]:
    """The built-in checks of the host, imported once."""
    from checks.discover import HOST_PACKAGES, builtin_checks

    if not _of_the_host:
        _of_the_host.update(builtin_checks(HOST_PACKAGES))
    return _of_the_host


def load_all(setup: Mapping[str, Any]) -> dict[str, Check]:
    """Every configured check. Two checks of one name are an error, whatever their origins."""
    if id(setup) in _loaded:
        return _loaded[id(setup)]
    from checks.discover import builtin_checks

    found = builtin_checks()

    def add(check: Check, origin: str) -> None:
        if check.name in found:
            raise ValueError(
                f"two checks have the name {check.name}: {found[check.name].origin} and {origin}; rename one"
            )
        found[check.name] = dataclasses.replace(check, origin=origin)

    for path in setup["extra_files"]:
        for check in load_file(path):
            add(check, path)
    if setup["third_party"]:
        from checks.discover import load_third_party

        for check in load_third_party(setup["third_party"]).values():
            add(check, "entry point")
    for name, plain in setup["programs"].items():
        from checks.programs import make_program_check

        program = Program(**{**plain, "command": tuple(plain["command"]), "tier": Tier(plain["tier"])})
        add(make_program_check(name, program), "".join(program.command[:1]))
    _loaded[id(setup)] = found
    return found


def declare(check: Check) -> dict[str, Any]:
    """Plain values of what a check declares, as the runner reads them."""
    return {**dataclasses.asdict(check.info()), "doc": check.doc[:8000]}


def load_file(path: str) -> list[Check]:
    """The checks in one file of an operator, found by type, as the built-in ones are."""
    from importlib.util import module_from_spec, spec_from_file_location

    from checks.discover import checks_in

    if not path.endswith(".py") or not os.path.isfile(path):
        raise ValueError(f"{path}: cannot be read; list a directory of check files in directories of [probe]")
    name = "healthd_check_" + os.path.basename(path)[:-3]
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is not a Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    found = checks_in(module)
    if not found:
        raise ValueError(f"{path}: has no check; decorate a generator function with @check")
    return found
