"""
Settings from a TOML file, `HEALTHD_...` variables and arguments, by one rule for any dataclass of settings.

An argument beats a variable beats the file beats the default. A field `max_age_seconds` is the key `max_age`, the
variable `HEALTHD_..._MAX_AGE` and the option `--max-age`; durations are written `2s`, `10m`, `1h` or as seconds.
What is not known is an error that names file and line (or the variable) and the nearest right key.
"""

from __future__ import annotations

import dataclasses
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from healthd.core.bounded import read_file
from healthd.core.config.schema import fields, is_record, key_of, leaves, nearest, records_by_name
from healthd.core.config.values import leaf
from healthd.core.errors import BadInputError, ConfigError, words_of

T = TypeVar("T")

PREFIX = "HEALTHD_"
MAX_FILE_BYTES = 4 << 20
"""Of a settings file: those of large fleets have some kilobytes."""

# What Kubernetes injects for a Service named healthd: no setting of ours.
_INJECTED_BY_KUBERNETES = re.compile(r"HEALTHD_(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP)(_.*)?)?)$")
# Read or set by other means: the job's environment after a preflight, the file's own name, whether the metadata service
# is asked (checks.host.identity), and where a job reports its steps.
_NO_SETTINGS = frozenset(
    f"HEALTHD_{word}" for word in ["RANK", "NNODES", "MAIN", "HOSTFILE", "CONFIG", "IMDS", "STEPS_SOCKET"]
)


def load(
    schema: type[T],
    *,
    file: Path | None,
    environ: Mapping[str, str],
    arguments: Mapping[str, Any],
    sections: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """
    An instance of `schema`, a tree of dataclasses.

    `arguments` maps dotted keys (`node.listen`) to values; None means not given. In variables and arguments the names
    of `sections` may be left out (`HEALTHD_LISTEN`, `listen`): they are what the command at hand is about, the first
    that has the key is meant. `defaults` are dotted keys too, for what no constant can be. Raises ConfigError with one
    line.
    """
    tree: dict[str, Any] = {}
    for dotted, value in (defaults or {}).items():
        _put(tree, dotted.split("."), value)
    if file is not None:
        text = _read(file)
        values = _parse(file, text)
        _take(schema, values, tree, where=lambda path: f"{file}:{_line_of(text, path)}", path=())
    for name, path, annotation in _variables(schema, environ, sections):
        _put(tree, path, leaf(annotation, path, environ[name], where=name, text=True))
    for dotted, value in arguments.items():
        if value is not None and value != ():
            path = _resolve(schema, tuple(dotted.split(".")), sections)
            annotation = _annotation(schema, path)
            _put(tree, path, leaf(annotation, path, value, where=_option(path), text=isinstance(value, str)))
    return _build(schema, tree, ())


# --- the file -------------------------------------------------------------------------------------------------------


def _read(file: Path) -> str:
    try:
        if stat.S_ISFIFO(file.stat().st_mode):
            raise BadInputError("it is a pipe, and settings are read more than once")
        return read_file(file, MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; name another with --config") from None
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {words_of(error)}") from None


def _parse(file: Path, text: str) -> dict[str, Any]:
    import tomllib  # most commands have no file to parse

    from healthd.core.config.toml_text import parse_toml

    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"(.*?) \(at line (\d+), column \d+\)$", str(error))
        line, reason = (match[2], match[1]) if match else (str(text.count("\n") + 1), str(error))
        raise ConfigError(f"{file}:{line}: not TOML: {reason}") from None


def _line_of(text: str, path: Sequence[str]) -> int:
    """The line where a key is set: tables and keys as they are usually written; the table's line as a fallback."""
    table: tuple[str, ...] = ()
    best = 1
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if header := re.fullmatch(r"\[{1,2}\s*([^\]]+?)\s*\]{1,2}\s*(#.*)?", stripped):
            table = _dotted(header[1])
            here = table
        elif key := re.match(r"""((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=""", stripped):
            here = table + _dotted(key[1])
        else:
            continue
        if here == tuple(path):
            return number
        if here == tuple(path)[: len(here)]:
            best = number
    return best


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip("\"' ") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.\s]+', text))


def _take(schema: Any, values: Mapping[str, Any], tree: dict[str, Any], *, where: Any, path: tuple[str, ...]) -> None:
    """Move what the file says into the tree, checking every key."""
    known = fields(schema)
    for key, value in values.items():
        here = (*path, key)
        if key not in known:
            raise ConfigError(f"{where(here)}: unknown key {'.'.join(here)!r}{nearest(key, known)}")
        annotation = known[key][1]
        if is_record(annotation) and isinstance(value, dict):
            _take(annotation, value, tree.setdefault(key, {}), where=where, path=here)
        elif (inner := records_by_name(annotation)) is not None and isinstance(value, dict):
            for name, members in value.items():
                if not isinstance(members, dict):
                    raise ConfigError(f"{where((*here, name))}: {'.'.join((*here, name))!r} must be a table")
                _take(inner, members, tree.setdefault(key, {}).setdefault(name, {}), where=where, path=(*here, name))
        else:
            tree[key] = leaf(annotation, here, value, where=where(here), text=False)


# --- variables and arguments ----------------------------------------------------------------------------------------


def _variables(
    schema: Any, environ: Mapping[str, str], sections: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    every = list(leaves(schema))
    known = {PREFIX + "_".join(path).upper(): (path, annotation) for path, annotation in every}
    short = {PREFIX + "_".join(path[1:]).upper(): (path, annotation) for path, annotation in every if len(path) > 1}
    here = {
        PREFIX + "_".join(path[1:]).upper(): (path, annotation)
        for section in reversed(sections)
        for path, annotation in every
        if path[0] == section
    }
    # A full name that is set beats its short form, so short forms come first.
    for name in sorted(environ, key=lambda name: (name in known, name)):
        if not name.startswith(PREFIX) or name in _NO_SETTINGS or _INJECTED_BY_KUBERNETES.match(name):
            continue
        if name in known or name in here:
            path, annotation = known.get(name) or here[name]
            yield name, path, annotation
        elif name not in short:  # the short form of another command's setting is that command's business
            raise ConfigError(f"environment: unknown variable {name!r}{nearest(name, {**known, **short})}")


def _resolve(schema: Any, path: tuple[str, ...], sections: Sequence[str]) -> tuple[str, ...]:
    """The full path of one that may leave out its section."""
    known = fields(schema)
    for section in ("", *sections):
        full = (section, *path) if section else path
        keys: Any = known
        for depth, key in enumerate(full):
            if key not in keys:
                break
            if depth == len(full) - 1 and not is_record(keys[key][1]):
                return full
            keys = fields(keys[key][1]) if is_record(keys[key][1]) else {}
    return path


def locate(file: Path, path: Sequence[str]) -> str:
    """`file:line` of a key, for errors that are found after loading."""
    try:
        return f"{file}:{_line_of(file.read_text(encoding='utf-8'), path)}"
    except (OSError, UnicodeDecodeError):
        return str(file)


def _annotation(schema: Any, path: tuple[str, ...]) -> Any:
    annotation: Any = schema
    for key in path:
        annotation = fields(annotation)[key][1]
    return annotation


def _option(path: Sequence[str]) -> str:
    return "--" + {"labels": "label", "faults": "fault"}.get(path[-1], path[-1]).replace("_", "-")


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _build(schema: type[T], tree: Mapping[str, Any], path: tuple[str, ...]) -> T:
    values: dict[str, Any] = {}
    for key, (name, annotation) in fields(schema).items():
        if key not in tree:
            continue
        if is_record(annotation):
            values[name] = _build(annotation, tree[key], (*path, key))
        elif (inner := records_by_name(annotation)) is not None:
            values[name] = {item: _build(inner, members, (*path, key, item)) for item, members in tree[key].items()}
        else:
            values[name] = tree[key]
    missing = [
        key_of(field.name)
        for field in dataclasses.fields(schema)  # type: ignore[arg-type]
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"configuration: {'.'.join((*path, missing[0]))!r} must be set")
    try:
        return schema(**values)
    except ValueError as error:
        raise ConfigError(f"configuration: {'.'.join(path) or 'settings'}: {error}") from None
