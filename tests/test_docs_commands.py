"""What the pages tell people to type is there: commands of healthd, their options, targets of make, modules, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from healthd.cli import healthd
from tests.docs_commands_kit import lines
from tests.every import every

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
# What follows these is a program to be run: in a container, by torchrun, in a Dockerfile, by Python, in a pod.
STARTERS = {"IMAGE", "--no-python", "RUN", "-m", "--"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of these lines: what `;`, `&&`, `|`, `>` and comments separate is cut apart."""
    for line in lines(text):
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word.strip("();<>|&"):
                command.append(word.strip("[]"))
            elif command:
                yield command
                command = []


def of_healthd(text: str) -> Iterator[list[str]]:
    """What follows `healthd` where it is the program, up to a `--`, after which the command is somebody else's."""
    for words in commands(text):
        for i, word in enumerate(words):
            first = all("=" in before for before in words[:i])
            if word.rpartition("/")[2] == "healthd" and (first or words[i - 1] in STARTERS):
                rest = words[i + 1 :]
                yield rest[: rest.index("--")] if "--" in rest else rest


def unknown(words: list[str]) -> str | None:
    """What of a command line healthd does not have."""
    command: click.Command = healthd
    context = click.Context(command)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        after = command.get_command(context, words[0])
        if after is None:
            return words[0]
        command, words = after, words[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
    return next((word for word in words if word.startswith("-") and word.partition("=")[0] not in known), None)


@every("page", PAGES)
def test_commands_of_a_page_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [f"{bad!r} in healthd {' '.join(words)}" for words in of_healthd(text) if (bad := unknown(words))]
    assert wrong == []


def targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))


def missing(words: list[str]) -> Iterator[str]:
    """Targets of make, modules and files of this repository that a command names and that are not there."""
    if words[0] == "make":
        yield from (f"make {word}" for word in words[1:2] if re.fullmatch(r"[a-z-]+", word) and word not in targets())
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m" and word.startswith(("tests.", "deploy.", "docs.", "healthd.", "checks.")):
            place = ROOT / word.replace(".", "/")
            if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists()):
                yield f"python -m {word}"
        elif re.match(r"(deploy|docs|tests|checks|healthd)/", word) and not list(ROOT.glob(word)):
            yield word


@every("page", PAGES)
def test_targets_modules_and_files_that_a_page_names_are_there(page: Path) -> None:
    assert [bad for words in commands(page.read_text(encoding="utf-8")) for bad in missing(words)] == []


PAGE = """
By hand `healthd fleet sing`, or `healthd gate outcome
--loud`; not `healthd-tokens`. `make dmeo`, `make test`. `A=/b C=d healthd warn`.

```console
$ healthd check matmul; healthd chek && /opt/x/bin/healthd gate --job=x --louder \\
    --node n1 >> file    # --comment
# healthd preflight -- python train.py --epochs 3
$ torchrun --no-python healthd preflight --quickly -- x
$ docker run --pid=host IMAGE healthd nod | healthd checks -q
$ python3 -m venv /opt/healthd && python -m tests.gone && cp deploy/slurm/*.sh deploy/gone.sh /etc/healthd/
```
```toml
# healthd no command
```
"""


def test_broken_commands_are_found_wherever_they_stand() -> None:
    assert [bad for words in of_healthd(PAGE) if (bad := unknown(words))] == [
        "chek",
        "--louder",
        "--quickly",
        "nod",
        "-q",
        "sing",
        "--loud",
        "warn",
    ]
    assert [bad for words in commands(PAGE) for bad in missing(words)] == [
        "python -m tests.gone",
        "deploy/gone.sh",
        "make dmeo",
    ]


def test_commands_are_found_on_the_pages() -> None:
    found = {page: sum(1 for _ in of_healthd(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert sum(found.values()) > 200
    for name in ("operations", "install", "kubernetes", "slurm", "batch", "faq", "security", "baselines"):
        assert found[ROOT / "docs" / f"{name}.md"], f"{name}.md has no command that is looked at"
    assert found[ROOT / "README.md"] > 10
    assert found[ROOT / "docs" / "use.md"] > 30
