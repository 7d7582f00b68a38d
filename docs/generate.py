"""
Write the pages that come from code: checks, reasons, settings, and the table of verdicts in docs/postmortem.md.

`make docs` runs this module. A test compares the files in `docs/` with its output.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from checks.contract import Check
from checks.discover import builtin_checks
from docs.reason_pages import reasons_page
from healthd.cli.settings.tree import Settings
from healthd.core.config import annotation_of, key_of, record_at
from healthd.postmortem.verdicts import as_markdown

DOCS = Path(__file__).parent
NOTE = "<!-- Made by `make docs` from the code: change it there. -->\n\n"


def pages() -> dict[Path, str]:
    """Path below docs/ -> text."""
    return {
        Path("checks.md"): checks_page(list(builtin_checks().values())),
        Path("runbooks/reasons.md"): reasons_page(),
        Path("settings.md"): settings_page(Settings),
        Path("postmortem.md"): with_verdicts((DOCS / "postmortem.md").read_text(encoding="utf-8")),
    }


def with_verdicts(page: str) -> str:
    """The page on post-mortems with the current table of verdicts."""
    before, begin, rest = page.partition("<!-- table of verdicts -->\n")
    _, end, after = rest.partition("<!-- end of the table -->\n")
    return f"{before}{begin}\n{as_markdown()}\n{end}{after}"


CHECKS = """# The checks

Passive checks only read and are harmless beside a job. The others put load on devices, the network
or a store, so the daemon runs them only on an idle node. Parameters are set in `[checks.NAME]`.
"""


def checks_page(checks: list[Check]) -> str:
    """A table of all checks, then a section for each: its docstring, its facts and its parameters."""
    ordered = sorted(checks, key=lambda check: (check.tier.rank, check.name))
    lines = [NOTE + CHECKS, "| check | tier | passes if |", "|---|---|---|"]
    lines += [f"| [{one.name}](#{one.name}) | {one.tier.value} | {_summary(one)[0]} |" for one in ordered]
    for check in ordered:
        lines += ["", *_check_section(check)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _summary(check: Check) -> tuple[str, str]:
    """The first paragraph of the docstring in one line, and the rest."""
    first, _, rest = inspect.cleandoc(check.doc).partition("\n\n")
    return " ".join(first.split()), rest.strip("\n")


def _check_section(check: Check) -> list[str]:
    first, rest = _summary(check)
    lines = [f"## {check.name}", "", *wrapped(first), ""]
    lines += wrapped(
        f"Tier {check.tier.value}, {WHERE[check.scope.value]}; every {check.interval_seconds:g} s at most, "
        f"time limit {check.timeout_seconds:g} s."
    )
    lines.append("")
    if rest:
        lines += ["```text", rest, "```", ""]
    fields = dataclasses.fields(check.params_type) if dataclasses.is_dataclass(check.params_type) else ()
    if fields:
        lines += ["| parameter | type | default |", "|---|---|---|"]
        lines += [f"| `{f.name}` | `{_type(f.type)}` | `{_default(f)}` |" for f in fields]
        lines.append("")
    for field in fields:
        record = _record(check.params_type, field)
        if record is not None:
            lines += _named_records(f"[checks.{check.name}.{field.name}.NAME]", record)
    return lines[:-1]


def wrapped(text: str, *, indent: str = "") -> list[str]:
    """Lines of at most 100 columns."""
    return textwrap.wrap(text, width=100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _named_records(table: str, record: type) -> list[str]:
    """A record that is set by name: its docstring, and the text below each field."""
    about = " ".join(inspect.cleandoc(record.__doc__ or "").split())
    return [*wrapped(f"`{table}`: {about}"), "", *_keys(record, dataclasses.fields(record), ()), ""]


def _keys(
    record: type, fields: Iterable[dataclasses.Field[object]], path: tuple[str, ...], prefix: str = ""
) -> Iterator[str]:
    """A list of keys with default and meaning."""
    meanings = _meanings(record)
    for field in fields:
        default = FROM_THE_HOST.get(".".join((*path, key_of(field.name)))) or _setting(field)
        yield from wrapped(f"- `{prefix}{key_of(field.name)}` ({default}): {meanings[field.name]}", indent="  ")


WHERE = {
    "node": "once for each node",
    "device": "on every device",
    "group": "as one group with a rank on every device",
}


SETTINGS = """# Settings

All commands read one TOML file: `/etc/healthd/healthd.toml`, or the file named by `--config` or
`HEALTHD_CONFIG`. An option of the command overrides a variable, a variable overrides the file, and
the file overrides the default.

- The variable of a key is `HEALTHD_` and the whole path in capitals: `policy.max_age` is
  `HEALTHD_POLICY_MAX_AGE`. The name of the command's own section may be left out, and so may `NODE`
  and `PROBE`: `HEALTHD_LISTEN`, `HEALTHD_CPU_DEVICES`. Lists are written `a,b`, tables `a=1,b=2`.
- Durations are written `250ms`, `2s`, `10m`, `1h`, `1d`, or as a number of seconds.
- An unknown key or variable is an error that names its place and the nearest known one.
- `HEALTHD_IMDS` is only a variable. `off` never queries the EC2 metadata service, `on` always does;
  by default healthd queries it only on EC2. `AWS_EC2_METADATA_DISABLED` and
  `AWS_EC2_METADATA_SERVICE_ENDPOINT` work as in AWS's own tools.
- Settings are read when a command starts. After a change, restart the daemon or the aggregator.
  Token and certificate files are read again when they change.
- The tables `[programs.NAME]`, `[limits.NAME]` and `[baselines.NAME]` can only be set in the file.
  So can `[checks.NAME]`, which takes `timeout` and [the parameters of the check](checks.md).

Each key is followed by its default; `-` means not set.
"""

# Defaults that depend on the host.
FROM_THE_HOST = {
    "node.name": "the host's name",
    "node.state_dir": "`/var/lib/healthd` for root, else `~/.local/state/healthd`",
    "node.run_dir": "`/run/healthd` for root, else below `$XDG_RUNTIME_DIR` or `/tmp`",
    "aggregator.state_dir": "as `node.state_dir`",
}


HIDDEN = {"internal", "tables"}
"""Marks of fields that are not keys themselves."""


def settings_page(schema: type) -> str:
    """Every section of a tree of settings: its keys, their defaults, and the docstrings below its fields."""
    lines = [NOTE + SETTINGS]
    for path, section, about in _sections(schema, ()):
        fields = [field for field in dataclasses.fields(section) if not HIDDEN & field.metadata.keys()]
        keys = [field for field in fields if _record(section, field) is None]
        lines += [f"## [{'.'.join(path)}]", "", *wrapped(" ".join(about.split())), "", *_keys(section, keys, path)]
        for key, record in _tables(section):
            if key.endswith("_*"):  # its keys stand here
                lines += _keys(record, dataclasses.fields(record), path, prefix=key.removesuffix("*"))
        lines.append("")
    return "\n".join(lines)


def _sections(schema: type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type, str]]:
    """All records below a record, each after the one that it is in, with what is said of it."""
    meanings = _meanings(schema)
    for field in dataclasses.fields(schema):
        if field.metadata.get("internal"):
            continue
        if "tables" in field.metadata:
            for key, record in _tables(schema):
                if not key.endswith("_*"):
                    yield (*path, key), record, inspect.cleandoc(record.__doc__ or "")
                    yield from _sections(record, (*path, key))
            continue
        inner = _record(schema, field)
        if inner is not None:
            named = typing.get_origin(annotation_of(schema, field)) is dict
            here = (*path, field.name, "NAME") if named else (*path, field.name)
            yield here, inner, inspect.cleandoc(inner.__doc__ or "") if named else meanings[field.name]
            yield from _sections(inner, here)


def _tables(schema: type) -> Iterator[tuple[str, type]]:
    """Key and record of each table of an integration below a record."""
    for field in dataclasses.fields(schema):
        if (tables := field.metadata.get("tables")) is not None:
            for key, where in tables().items():
                yield key, record_at(where)


def _record(schema: type, field: dataclasses.Field[object]) -> type | None:
    """The record that a field holds, alone or by name; None where it is a value."""
    annotation = annotation_of(schema, field)
    candidates = (annotation, *typing.get_args(annotation)[1:2])
    return next((one for one in candidates if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


def _meanings(schema: type) -> dict[str, str]:
    """Field name -> the text below the field, in one line that a table can hold; also of the records it builds on."""
    found: dict[str, str] = {}
    for base in schema.__bases__:
        if dataclasses.is_dataclass(base):
            found |= _meanings(base)
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            found[field.target.id] = " ".join(text.split())
    return found


def _setting(field: dataclasses.Field[object]) -> str:
    """The default of a key, as one would write it into the file."""
    value = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is dataclasses.MISSING:
        return "must be set"
    if value is None:
        return "-"
    if field.name.endswith("_seconds") and isinstance(value, float):
        return f"`{_duration(value)}`"
    return f"`{_toml(value)}`"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f'"{seconds / length:g}{unit}"'
    return f'"{seconds:g}s"'


def _toml(value: object) -> str:
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml(key).strip(chr(34))} = {_toml(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int) else f'"{value}"'


def _type(annotation: object) -> str:
    return (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))).replace(
        "|", "or"
    )


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "none: must be set"


def main() -> None:
    """Write every page."""
    for path, text in pages().items():
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
