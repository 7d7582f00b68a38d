"""
Write the pages that come from the code: one page a check, their index, and the catalogue of reasons.

`make docs` runs it; a test compares what stands in `docs/` with what it would write.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from checks.contract import Check
from checks.discover import builtin_checks
from checks.reasons import REASONS
from docs.reason_pages import reason_pages

DOCS = Path(__file__).parent
NOTE = "<!-- Made by `make docs` from the code: change it there. -->\n\n"


def pages() -> dict[Path, str]:
    """Path below docs/ -> text."""
    checks = builtin_checks()
    made = {Path("checks") / f"{name}.md": check_page(check) for name, check in checks.items()}
    made[Path("checks/README.md")] = index_page(list(checks.values()))
    made[Path("reasons.md")] = reasons_page()
    made.update(reason_pages())
    return made


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
    return "\n".join(lines)


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
