"""
Write a man page for each command: `python -m docs.man FOLDER`, which `make man` does into build/man.

They are made of what `--help` says, so that there is one text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from healthd import __version__
from healthd.cli import exit_codes, healthd

SECTION = 1


def commands(command: click.Command = healthd, path: tuple[str, ...] = ("healthd",)) -> Iterator[tuple[str, ...]]:
    """The paths of all commands, groups before what is in them."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from commands(found, (*path, name))


def man_page(path: tuple[str, ...]) -> str:
    """The page of a command in roff."""
    command: click.Command = healthd
    context = click.Context(healthd, info_name="healthd")
    for name in path[1:]:
        assert isinstance(command, click.Group)
        found = command.get_command(context, name)
        assert found is not None
        context = click.Context(found, info_name=name, parent=context)
        command = found
    title = "-".join(path)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{title.upper()}" "{SECTION}" "" "healthd {__version__}" "healthd manual"',
        ".SH NAME",
        f"{_text(title)} \\- {_text(command.get_short_help_str(limit=100).rstrip('.'))}",
        ".SH SYNOPSIS",
        f"\\fB{_text(' '.join(path))}\\fR {_text(usage)}",
        ".SH DESCRIPTION",
        *_paragraphs(command.help or command.get_short_help_str(limit=400)),
    ]
    if examples := getattr(command, "examples", ()):
        lines += [".SH EXAMPLES", *(words for line in examples for words in (".PP", _text(line)))]
    lines.append(".SH OPTIONS")
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None:
            lines += [".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1])]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name in command.list_commands(context):
            one = command.get_command(context, name)
            if one is not None and not one.hidden:
                lines += [
                    ".TP",
                    f"\\fB{_text('-'.join((*path, name)))}\\fR(1)",
                    _text(one.get_short_help_str(limit=100)),
                ]
    if len(path) > 1:
        usage_code, known, _ = exit_codes(path[1:])
        lines += [
            ".SH EXIT STATUS",
            f"{usage_code} for a mistake in the options or settings, {known} for any other error.",
        ]
    lines += [".SH FILES", "/etc/healthd/healthd.toml", ".SH SEE ALSO", ", ".join(_near(path))]
    return "\n".join(lines) + "\n"


def _near(path: tuple[str, ...]) -> Iterator[str]:
    """The page of the group that a command is in; of the whole, its commands are listed already."""
    above = path[:-1] or path
    yield f"\\fB{_text('-'.join(above))}\\fR(1)"


def _paragraphs(text: str) -> Iterator[str]:
    for i, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if i:
            yield ".PP"
        yield _text(" ".join(paragraph.replace("\b", "").split()))


def _text(words: str) -> str:
    """Words as roff takes them: no line begins with its control characters, and a dash is a dash."""
    plain = words.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def write(folder: Path) -> list[Path]:
    """Write all pages; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for path in commands():
        file = folder / f"{'-'.join(path)}.{SECTION}"
        file.write_text(man_page(path), encoding="utf-8")
        found.append(file)
    return found


if __name__ == "__main__":
    print(f"{len(write(Path(sys.argv[1])))} man pages in {sys.argv[1]}")  # noqa: T201
