"""
Settings from a file, variables and arguments, by one rule for any dataclass.

Also here:

- what keys a dataclass of settings has, and of what type each is;
- TOML that somebody else wrote: a bound on its depth, because the parser and all code behind it work by recursion;
- one value of the settings, from text or from the file, as the type that its key has.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import importlib
import re
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from checks.durations import parse_duration as parse_duration
from checks.json_text import MAX_DEPTH
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, words_of

MAPPINGS = (dict, collections.abc.Mapping)
LISTS = (tuple, list)

T = TypeVar("T")

PREFIX = "HEALTHD_"
MAX_FILE_BYTES = 4 << 20
"""Of a settings file: those of large fleets have some kilobytes."""

# What Kubernetes injects for a Service named healthd: no setting of ours.
_INJECTED_BY_KUBERNETES = r"HEALTHD_(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP)(_.*)?)?)$"
# Read or set by other means: the job's environment after a preflight, the file's own name, whether the metadata service
# is asked (checks.host.identity), and where a job reports its steps.
_NO_SETTINGS = frozenset(
    f"HEALTHD_{word}" for word in ["RANK", "NNODES", "MAIN", "HOSTFILE", "CONFIG", "IMDS", "STEPS_SOCKET"]
)


def free_table(annotation: Any) -> Any:
    """A field of `Tables` that is no record, with its type."""
    return dataclasses.field(metadata={"type": annotation})


def tables_of(tables: Callable[[], Mapping[str, str]]) -> Any:
    """
    A field with the tables that a schema does not name: key -> record. `tables` says key -> `module:Class`.

    The keys of a table `NAME_*` stand in the table around it, as NAME_KEY; it is the record NAME of the field.
    """
    return dataclasses.field(default_factory=dict, metadata={"tables": tables})


def choice(default: str, choices: Callable[[], Sequence[str]]) -> Any:
    """A field of a word out of those that `choices` says when the settings are read."""
    return dataclasses.field(default=default, metadata={"choices": choices})


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
    won: dict[tuple[str, ...], Won] = {}
    text = ""
    if file is not None:
        text = _read(file)
        values = _parse(file, text)
        _take(schema, values, tree, where=lambda path: f"{file}:{_line_of(text, path)}", path=())
    for name, path, annotation in _variables(schema, environ, sections):
        value = leaf(annotation, path, environ[name], where=name, text=True)
        if path in won or _has(tree, path):
            won[path] = Won(name, ".".join(path), f"{file}:{_line_of(text, path)}", value)
        _put(tree, path, value)
    for dotted, value in arguments.items():
        if value is not None and value != ():
            path = _resolve(schema, tuple(dotted.split(".")), sections)
            annotation = _annotation(schema, path)
            _put(tree, path, leaf(annotation, path, value, where=_option(path), text=isinstance(value, str)))
    given = frozenset(tree)
    for dotted, value in (defaults or {}).items():
        _put(tree, dotted.split("."), value, weak=True)
    if issubclass(schema, Tables):
        return _tables(schema, tree, given, file, tuple(won.values()))
    return _build(schema, tree, ())


def annotation_of(schema: Any, field: dataclasses.Field[Any]) -> Any:
    """The type of a field; a field that ends in `_seconds` is a duration."""
    if (where := field.metadata.get("table")) is not None:
        record = record_at(where)
        return types.GenericAlias(dict, (str, record)) if field.metadata["named"] else record
    if "type" in field.metadata:
        return field.metadata["type"]
    if (choices := field.metadata.get("choices")) is not None:
        return typing.Literal[tuple(choices())]
    annotation = _hints(schema)[field.name]
    if field.name.endswith("_seconds") and annotation in (float, float | None):
        return Seconds | None if is_union(annotation) else Seconds
    if field.name.endswith("_seconds") and typing.get_origin(annotation) in MAPPINGS:
        return dict[typing.get_args(annotation)[0], Seconds]  # type: ignore[misc]
    return annotation


def is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


class Tables:
    """
    Base of a schema whose fields are `table` or `free_table`, or "internal" and None unless given.

    A table that was not given is built when it is first asked for, with the defaults of its fields.
    """

    def __init__(self, *, later: Mapping[str, Callable[[], Any]] = types.MappingProxyType({}), **given: Any) -> None:
        """`later` makes tables of which nothing is given, and which have defaults that are no constants."""
        names = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if unknown := given.keys() - names:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        for name, value in {**given, "_later": later}.items():
            object.__setattr__(self, name, value)

    def is_given(self, name: str) -> bool:
        """Whether the file, a variable or an option sets something in this table."""
        return name in vars(self)

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A table that is not there yet."""
            field = next((one for one in dataclasses.fields(self) if one.name == name), None)
            if field is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            later = vars(self)["_later"]
            if "tables" in field.metadata:
                value = {}
            elif name in later:
                value = later[name]()
            elif field.metadata.get("internal"):
                value = None
            else:
                annotation = annotation_of(type(self), field)
                value = annotation() if is_record(annotation) else {}
            object.__setattr__(self, name, value)
            return value


def nearest(key: str, known: Mapping[str, Any]) -> str:
    """The end of an error: `; did you mean 'x'?`, or what is known."""
    import difflib

    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known)[:12])}"


def leaves(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key that a variable or an option can set, with its type; tables of named records are the file's alone."""
    for key, (_, annotation) in fields(schema).items():
        yield from _leaves_of(annotation, (*path, key))


def fields(schema: Any) -> _Keys:
    """Key -> (field name, type) of a dataclass of settings."""
    return _Keys(schema)


def key_of(field_name: str) -> str:
    """The key of a field: its name without the unit that durations carry."""
    return field_name.removesuffix("_seconds")


def record_at(where: str) -> Any:
    """The record that `module:Class` names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def records_by_name(annotation: Any) -> Any:
    """X of a table of named records `dict[str, X]`, else None."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in MAPPINGS and len(arguments) == 2 and is_record(arguments[1]):
        return arguments[1]
    return None


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. TOMLDecodeError, a ValueError, also for what is nested deeper than MAX_DEPTH."""
    import tomllib  # most commands have no file to parse

    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(f"nested more than {MAX_DEPTH} deep") from None
    level: list[object] = [found]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return found
    raise tomllib.TOMLDecodeError(f"nested more than {MAX_DEPTH} deep")  # dotted keys: the parser needs no stack


def leaf(annotation: Any, path: Sequence[str], value: Any, *, where: str, text: bool) -> Any:
    """One value, converted; `text` says that it came as text and may need splitting."""
    options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    wanted = next(option for option in options if option is not type(None))
    empty = text and wanted is Path and value == ""  # HEALTHD_CA_FILE= of a manifest whose value was left empty
    if (value is None or empty) and type(None) in options:
        return None
    try:
        value = _parts(wanted, value) if text else value
        return _value(wanted, value, text=text)
    except ValueError as error:
        choices = _choices(typing.get_args(wanted)[0] if typing.get_origin(wanted) in LISTS else wanted)
        wrong = next((one for one in value if one not in choices), value) if isinstance(value, (list, tuple)) else value
        said = f"{wrong!r}: choose one of: {', '.join(choices)}" if choices else error
        raise ConfigError(f"{where}: {'.'.join(path)}: {said}") from None


class Seconds(float):
    """Marks a duration while its type is read."""


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


@dataclasses.dataclass(frozen=True)
class Won:
    """A variable that was taken in the place of a key of the file."""

    variable: str
    key: str
    where: str
    """`file:line` of the key."""
    value: Any


def locate(file: Path, path: Sequence[str]) -> str:
    """`file:line` of a key, for errors that are found after loading."""
    try:
        return f"{file}:{_line_of(file.read_text(encoding='utf-8'), path)}"
    except (OSError, UnicodeDecodeError):
        return str(file)


def table(where: str, *, named: bool = False) -> Any:
    """
    A field of `Tables`: a record, `module:Class`, or with `named` any number of them by name.

    Its module is imported only for a command that uses the table, or where the file or a variable sets something in it.
    """
    return dataclasses.field(metadata={"table": where, "named": named})


class _Keys(Mapping[str, tuple[str, Any]]):
    """Key -> (field name, type); a type is imported when it is asked for."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._fields: dict[str, dataclasses.Field[Any]] = {}
        self._more: dict[str, tuple[str, str]] = {}
        self._flat: dict[str, tuple[str, str, str]] = {}
        for one in dataclasses.fields(schema):
            if (tables := one.metadata.get("tables")) is not None:
                for key, where in tables().items():
                    if (name := key.removesuffix("_*")) == key:
                        self._more[key] = (one.name, where)
                    else:
                        self._flat |= {f"{name}_{inner}": (name, inner, where) for inner in fields(record_at(where))}
            elif not one.metadata.get("internal"):
                self._fields[key_of(one.name)] = one

    def __getitem__(self, key: str) -> tuple[str, Any]:
        if key in self._more:
            name, where = self._more[key]
            return name, record_at(where)
        if key in self._flat:
            _, inner, where = self._flat[key]
            return key, fields(record_at(where))[inner][1]
        return self._fields[key].name, annotation_of(self._schema, self._fields[key])

    def __contains__(self, key: object) -> bool:
        return key in self._fields or key in self._more or key in self._flat

    def __iter__(self) -> Iterator[str]:
        yield from self._fields
        yield from self._more
        yield from self._flat

    def __len__(self) -> int:
        return len(self._fields) + len(self._more) + len(self._flat)

    def others(self, tree: Mapping[str, Any]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
        """The tables of `tables_of` that a tree sets something in: name -> record and what is set."""
        found: dict[str, tuple[Any, Mapping[str, Any]]] = {
            key: (record_at(where), tree[key]) for key, (_, where) in self._more.items() if key in tree
        }
        for key, (name, inner, where) in self._flat.items():
            if key in tree:
                before = found[name][1] if name in found else {}
                found[name] = (record_at(where), {**before, inner: tree[key]})
        return found

    def is_table(self, key: str) -> bool:
        """Whether it is one of `table`, which no single value can set."""
        return key in self._fields and "table" in self._fields[key].metadata


@functools.cache
def _hints(schema: Any) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def _leaves_of(annotation: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if is_record(annotation):
        yield from leaves(annotation, path)
    elif records_by_name(annotation) is None:
        yield path, annotation


def _members(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _parts(wanted: Any, text: str) -> Any:
    """Text as the list or the table that it stands for; all else as it is."""
    origin = typing.get_origin(wanted)
    if origin in LISTS:
        return [part.strip() for part in text.split(",") if part.strip()]
    return _pairs(text) if origin in MAPPINGS else text


def _value(wanted: Any, value: Any, *, text: bool) -> Any:
    """A value by the kind of its type; ValueError says what is wrong with it."""
    origin = typing.get_origin(wanted)
    if isinstance(wanted, type) and issubclass(wanted, Seconds):
        return parse_duration(value)
    if origin in LISTS and isinstance(value, str):
        raise ValueError(f"must be a list, not {value!r}")
    if origin in MAPPINGS:
        return _mapping(wanted, value, strict=not text)
    if wanted is Path:
        return _path(wanted, value)
    if wanted is bool and text:
        return _boolean(value)
    return _converted(value, wanted, strict=not text)


def _mapping(wanted: Any, value: Any, *, strict: bool) -> Any:
    """A table of values by name, which may be durations."""
    kind, inner = typing.get_args(wanted)
    if isinstance(value, dict) and inner is Seconds:
        value = {key: parse_duration(item) for key, item in value.items()}
        wanted = dict[kind, float]  # type: ignore[valid-type]
    return _converted(value, wanted, strict=strict)


def _pairs(text: str) -> dict[str, str]:
    """Of `name=value,name=value`."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not separator for _, separator, _ in pairs):
        raise ValueError(f"{text!r} must have the form name=value,name=value")
    found = {key.strip(): item.strip() for key, _, item in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"{text!r} has a name twice")
    return found


def _choices(wanted: Any) -> tuple[str, ...]:
    """What there is to choose from, for a type of few values; else nothing."""
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return tuple(str(item.value) for item in wanted)
    if typing.get_origin(wanted) is typing.Literal:
        return tuple(map(str, typing.get_args(wanted)))
    return ()


def _path(wanted: type[Any], value: Any) -> Path:
    """A path from text, also inside lists: the converter does not know them."""
    if wanted is not Path:
        raise NotImplementedError(f"settings have no {wanted}")
    if value == "":  # else it would be the working directory
        raise ValueError("must not be empty")
    path = Path(value if isinstance(value, (str, Path)) else _converted(value, str, strict=True))
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r}: unknown user; use an absolute path") from None


def _converted(value: Any, wanted: Any, *, strict: bool) -> Any:
    """A value as that type; ValueError says what is wrong with it."""
    if wanted is str and isinstance(value, str):
        return value
    import msgspec  # here, since a passive round without a settings file converts nothing and is to be quick

    try:
        return msgspec.convert(value, wanted, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} must be true or false")
    return words[text.lower()]


def _read(file: Path) -> str:
    try:
        if stat.S_ISFIFO(file.stat().st_mode):
            raise BadInputError("it is a pipe, but settings are read more than once")
        return read_file(file, MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; name another with --config") from None
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {words_of(error)}") from None


def _parse(file: Path, text: str) -> dict[str, Any]:
    import tomllib  # most commands have no file to parse

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


def _variables(
    schema: Any, environ: Mapping[str, str], sections: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    found: list[tuple[bool, str, tuple[str, ...], Any]] = []
    for name in environ:
        if not name.startswith(PREFIX) or name in _NO_SETTINGS or re.match(_INJECTED_BY_KUBERNETES, name):
            continue
        word = name.removeprefix(PREFIX)
        if (one := _full_name(schema, word)) is not None:
            found.append((True, name, *one))
        elif (one := _short_name(schema, word, sections)) is not None:
            found.append((False, name, *one))
        # The short form of another command's setting is that command's business.
        elif _short_name(schema, word, tuple(fields(schema))) is None:
            every = [path for path, _ in leaves(schema)]
            known = {
                PREFIX + "_".join(path[start:]).upper(): path for start in (0, 1) for path in every if path[start:]
            }
            raise ConfigError(f"environment: unknown variable {name!r}{nearest(name, known)}")
    # A full name that is set beats its short form, so short forms come first.
    for _, name, path, annotation in sorted(found, key=lambda item: item[:2]):
        yield name, path, annotation


def _full_name(schema: Any, word: str) -> tuple[tuple[str, ...], Any] | None:
    """The key that a variable names by its whole path; only the tables whose names it begins with are imported."""
    known = fields(schema)
    for key in known:
        if word != key.upper() and not word.startswith(f"{key.upper()}_"):
            continue
        if word == key.upper() and known.is_table(key):
            continue
        for path, annotation in _leaves_of(known[key][1], (key,)):
            if "_".join(path).upper() == word:
                return path, annotation
    return None


def _short_name(schema: Any, word: str, sections: Sequence[str]) -> tuple[tuple[str, ...], Any] | None:
    """The key that a variable names without the section: of the first section that has it."""
    known = fields(schema)
    for section in sections:
        for path, annotation in _leaves_of(known[section][1], (section,)) if section in known else ():
            if "_".join(path[1:]).upper() == word:
                return path, annotation
    return None


def _resolve(schema: Any, path: tuple[str, ...], sections: Sequence[str]) -> tuple[str, ...]:
    """The full path of one that may leave out its section. ConfigError where no section has it."""
    for section in ("", *sections):
        full = (section, *path) if section else path
        keys = fields(schema)
        for key in full[:-1]:
            if key not in keys or not is_record(keys[key][1]):
                break
            keys = fields(keys[key][1])
        else:
            if full[-1] in keys and not keys.is_table(full[-1]) and not is_record(keys[full[-1]][1]):
                return full
    raise ConfigError(f"{_option(path)} does not apply to this command; leave it out")


def _annotation(schema: Any, path: tuple[str, ...]) -> Any:
    annotation: Any = schema
    for key in path:
        annotation = fields(annotation)[key][1]
    return annotation


def _option(path: Sequence[str]) -> str:
    return "--" + {"labels": "label", "faults": "fault"}.get(path[-1], path[-1]).replace("_", "-")


def _has(tree: Mapping[str, Any], path: Sequence[str]) -> bool:
    for key in path[:-1]:
        tree = tree.get(key, {})
    return path[-1] in tree


def _put(tree: dict[str, Any], path: Sequence[str], value: Any, *, weak: bool = False) -> None:
    """`weak`: only where nothing is yet."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    if not (weak and path[-1] in tree):
        tree[path[-1]] = value


def _tables(
    schema: type[T], tree: Mapping[str, Any], given: frozenset[str], file: Path | None, won: tuple[Won, ...]
) -> T:
    """The tables that are `given` are built, and checked, at once; the others when they are asked for."""
    now: dict[str, Any] = {}
    later: dict[str, Callable[[], Any]] = {}
    others = fields(schema).others(tree)
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        if "tables" in field.metadata:
            now[field.name] = {name: _build(record, inner, (name,)) for name, (record, inner) in others.items()}
    for key, value in tree.items():
        if key in others:
            continue
        make = functools.partial(_field, schema, key, value, ())
        if key in given:
            now[key] = make()
        else:
            later[key] = make
    made: Callable[..., T] = schema
    return made(**now, later=later, file=file, won=won)


def _build(schema: type[T], tree: Mapping[str, Any], path: tuple[str, ...]) -> T:
    keys = fields(schema)
    values: dict[str, Any] = {}
    others = keys.others(tree)
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        key = key_of(field.name)
        if "tables" in field.metadata:
            made = {name: _build(record, inner, (*path, name)) for name, (record, inner) in others.items()}
            values[field.name] = made
        elif key in tree and key in keys:
            values[field.name] = _field(schema, key, tree[key], path)
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


def _field(schema: Any, key: str, value: Any, path: tuple[str, ...]) -> Any:
    """What a field holds: a record, records by name, or the value itself."""
    annotation = fields(schema)[key][1]
    if is_record(annotation):
        return _build(annotation, value, (*path, key))
    if (inner := records_by_name(annotation)) is not None:
        return {item: _build(inner, members, (*path, key, item)) for item, members in value.items()}
    return value
