"""
Write the pages that come from the code: one page a check, their index, the catalogue of reasons, the settings, and the
table of verdicts in the page of post-mortems.

`make docs` runs it; a test compares what stands in `docs/` with what it would write.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from checks.contract import Check
from checks.discover import builtin_checks
from checks.reasons import REASONS
from docs.reason_pages import reason_pages
from healthd.cli.settings.tree import Settings
from healthd.core.config import key_of
from healthd.postmortem.verdicts import as_markdown

DOCS = Path(__file__).parent
NOTE = "<!-- Made by `make docs` from the code: change it there. -->\n\n"


def pages() -> dict[Path, str]:
    """Path below docs/ -> text."""
    checks = builtin_checks()
    made = {Path("checks") / f"{name}.md": check_page(check) for name, check in checks.items()}
    made[Path("checks/README.md")] = index_page(list(checks.values()))
    made[Path("reasons.md")] = reasons_page()
    made[Path("settings.md")] = settings_page(Settings)
    made[Path("postmortem.md")] = with_verdicts((DOCS / "postmortem.md").read_text(encoding="utf-8"))
    made.update(reason_pages())
    return made


def with_verdicts(page: str) -> str:
    """The page of post-mortems with the table by which verdicts are made."""
    before, begin, rest = page.partition("<!-- table of verdicts -->\n")
    _, end, after = rest.partition("<!-- end of the table -->\n")
    return f"{before}{begin}\n{as_markdown()}\n{end}{after}"


def check_page(check: Check) -> str:
    """A check's docstring, its facts and its parameters."""
    doc = inspect.cleandoc(check.doc)
    first, _, rest = doc.partition("\n")
    lines = [NOTE + f"# {check.name}", "", first, "", "| | |", "|---|---|"]
    lines += [
        f"| tier | {check.tier.value} ({'active' if check.active else 'passive'}) |",
        f"| runs | {WHERE[check.scope.value]} |",
        f"| every | {check.interval_seconds:g} s, where nothing forbids it |",
        f"| time limit | {check.timeout_seconds:g} s from ready |",
        "",
    ]
    if rest.strip():
        lines += ["```text", rest.strip("\n"), "```", ""]
    fields = dataclasses.fields(check.params_type) if dataclasses.is_dataclass(check.params_type) else ()
    if fields:
        lines += [f"Parameters, set in `[checks.{check.name}]`:", "", "| name | type | default |", "|---|---|---|"]
        lines += [f"| `{f.name}` | `{_type(f.type)}` | `{_default(f)}` |" for f in fields]
        lines.append("")
    for field in fields:
        record = _record(check.params_type, field)
        if record is not None:
            lines += _named_records(f"[checks.{check.name}.{field.name}.NAME]", record)
    return "\n".join(lines)


def _named_records(table: str, record: type) -> list[str]:
    """A record that is set by name: its docstring, and the text below each field."""
    meanings = _meanings(record)
    lines = [f"`{table}`: {inspect.cleandoc(record.__doc__ or '')}", "", "| key | default | meaning |", "|---|---|---|"]
    fields = dataclasses.fields(record)
    return [*lines, *(f"| `{f.name}` | {_setting(f)} | {meanings[f.name]} |" for f in fields), ""]


WHERE = {
    "node": "once for the node, without any device",
    "device": "on every device",
    "group": "as one group with a rank on every device",
}


def index_page(checks: list[Check]) -> str:
    """All checks in one table."""
    lines = [NOTE + "# The checks", "", "| check | tier | what it says |", "|---|---|---|"]
    for check in sorted(checks, key=lambda c: (c.tier.rank, c.name)):
        first = inspect.cleandoc(check.doc).split("\n")[0]
        lines.append(f"| [{check.name}]({check.name}.md) | {check.tier.value} | {first} |")
    return "\n".join([*lines, ""])


def reasons_page() -> str:
    """The catalogue of reason codes."""
    lines = [NOTE + "# Reasons", "", "| code | meaning | blame | what to do |", "|---|---|---|---|"]
    lines += [
        f"| `{reason.code}` | {reason.meaning} | {reason.blame.value} | {reason.action.value} |"
        for reason in REASONS.values()
    ]
    return "\n".join([*lines, ""])


SETTINGS = """# Settings

One TOML file for all commands: `/etc/healthd/healthd.toml`, another by `--config` or `HEALTHD_CONFIG`. An option of the
command beats a variable, a variable beats the file, the file beats the default.

- The variable of a key is `HEALTHD_` and its whole path in capitals: `policy.max_age` is `HEALTHD_POLICY_MAX_AGE`. The
  name of the command's own section may be left out, and so may `NODE` and `PROBE`: `HEALTHD_LISTEN`,
  `HEALTHD_CPU_DEVICES`. Lists are written `a,b`, tables `a=1,b=2`.
- Durations are written `250ms`, `2s`, `10m`, `1h`, `1d`, or as a number of seconds.
- An unknown key or variable is an error that names its place and the nearest right one.
- `HEALTHD_IMDS` is no key: `off` never asks the metadata service of EC2, `on` always does; by default it is asked on EC2 alone.
  `AWS_EC2_METADATA_DISABLED` and `AWS_EC2_METADATA_SERVICE_ENDPOINT` mean what they mean to AWS' own tools.
- Settings are read when a command starts: after a change, restart the daemon or the aggregator. Files of tokens are
  read again when they change; certificates are not.
- The tables `[programs.NAME]`, `[limits.NAME]` and `[baselines.NAME]`, one for each name, are the file's alone; so is
  `[checks.NAME]`, which takes the parameters on [the page of the check](checks/README.md), and `timeout`.

`-` as a default, and "None" in a meaning: not set.
"""

# What the command line puts in where a setting has no constant for a default.
FROM_THE_HOST = {
    "node.name": "the host's name",
    "node.state_dir": "`/var/lib/healthd`; of others than root `~/.local/state/healthd`",
    "node.run_dir": "`/run/healthd`; of others than root below `$XDG_RUNTIME_DIR`, else `/tmp`",
    "aggregator.state_dir": "as `node.state_dir`",
}


def settings_page(schema: type) -> str:
    """Every section of a tree of settings: its keys, their defaults, and the docstrings below its fields."""
    lines = [NOTE + SETTINGS]
    for path, section, about in _sections(schema, ()):
        meanings = _meanings(section)
        fields = [field for field in dataclasses.fields(section) if not field.metadata.get("internal")]
        keys = [field for field in fields if _record(section, field) is None]
        lines += [f"## [{'.'.join(path)}]", "", about, ""]
        lines += ["| key | default | meaning |", "|---|---|---|"]
        for field in keys:
            dotted = ".".join((*path, key_of(field.name)))
            default = FROM_THE_HOST.get(dotted) or _setting(field)
            lines.append(f"| `{key_of(field.name)}` | {default} | {meanings[field.name]} |")
        lines.append("")
    return "\n".join(lines)


def _sections(schema: type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type, str]]:
    """All records below a record, each after the one that it is in, with what is said of it."""
    meanings = _meanings(schema)
    for field in dataclasses.fields(schema):
        inner = _record(schema, field)
        if inner is not None and not field.metadata.get("internal"):
            named = typing.get_origin(typing.get_type_hints(schema)[field.name]) is dict
            here = (*path, field.name, "NAME") if named else (*path, field.name)
            yield here, inner, inspect.cleandoc(inner.__doc__ or "") if named else meanings[field.name]
            yield from _sections(inner, here)


def _record(schema: type, field: dataclasses.Field[object]) -> type | None:
    """The record that a field holds, alone or by name; None where it is a value."""
    annotation = typing.get_type_hints(schema)[field.name]
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
            found[field.target.id] = " ".join(text.split()).replace("|", "\\|")
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
    """Write every page, and remove pages of checks that are gone."""
    made = pages()
    (DOCS / "checks").mkdir(exist_ok=True)
    for old in (DOCS / "checks").glob("*.md"):
        if old.relative_to(DOCS) not in made:
            old.unlink()
    for path, text in made.items():
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
