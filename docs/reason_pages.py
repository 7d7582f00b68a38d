"""One page for each reason, of the catalogue and of docs/runbooks/reasons.toml; `docs.generate` writes them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from checks.reasons import REASONS, Reason

TEXTS = Path(__file__).parent / "runbooks/reasons.toml"
FOLDER = Path("runbooks/reasons")
NOTE = "<!-- Made by `make docs` from checks/reasons.py and docs/runbooks/reasons.toml: change it there. -->\n\n"

HEADINGS = {"look": "Look closer", "do": "What to do", "other": "When it is something else"}
BLAME = {
    "node": "the node: it is unhealthy, and no gate admits it",
    "path": "what lies between nodes: no node is marked",
    "check": "our own check: nothing is known, so no gate admits the node",
    "control": "the aggregator, the request, or the way to them",
}
ACTION = {
    "none": "nothing",
    "retry": "try again",
    "reset_device": "reset the device",
    "reboot": "reboot the node",
    "replace": "replace the device or the node",
    "inspect": "look at it",
}


def reason_pages() -> dict[Path, str]:
    """Path below docs/ -> text, the index among them. A reason without a text of its own has the catalogue's words."""
    texts = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    made = {FOLDER / f"{code}.md": _page(reason, texts.get(code, {})) for code, reason in REASONS.items()}
    lines = [NOTE + "# What each reason means and what to do", "", "| reason | meaning | blame |", "|---|---|---|"]
    lines += [f"| [{code}]({code}.md) | {r.meaning} | {r.blame.value} |" for code, r in REASONS.items()]
    made[FOLDER / "README.md"] = "\n".join([*lines, ""])
    return made


def _page(reason: Reason, text: dict[str, str]) -> str:
    lines = [
        NOTE + f"# {reason.code}",
        reason.meaning,
        f"Blamed, unless said otherwise: {text.get('blame', BLAME[reason.blame.value])}. In short: {ACTION[reason.action.value]}.",
    ]
    for key, title in HEADINGS.items():
        if key in text:
            lines += [f"## {title}", text[key]]
    return "\n\n".join(lines) + "\n"
