"""The docs say what the code does: generated pages are in step, links lead somewhere, checks say what is unverified."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from checks.contract import Check
from checks.discover import builtin_checks
from tests.every import every

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])

spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def test_generated_pages_are_in_step_with_the_code() -> None:
    for path, text in generate.pages().items():
        assert (DOCS / path).is_file(), f"docs/{path} is missing: run `make docs`"
        assert (DOCS / path).read_text(encoding="utf-8") == text, f"docs/{path} is old: run `make docs`"


@every("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


def dead_links(page: Path) -> Iterator[str]:
    """Links to files that are not there, and to headings that the file does not have."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        there = page.parent / target if target else page
        if not there.exists():
            yield f"{target} is not there"
        elif anchor and anchor not in anchors(there):
            yield f"{target or 'the page'} has no heading #{anchor}"


def test_nothing_tells_people_to_install_what_is_not_published_or_torch_into_the_service() -> None:
    """No release is published, and the default build of torch is 5 GB of CUDA."""
    code = [path for room in ("healthd", "checks", "deploy") for path in (ROOT / room).rglob("*.py")]
    told = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*PAGES, *code]
        if path.name != "CHANGELOG.md"
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"install '?healthd(\[|'|$| )|\[torch\]|install torch(?! --index-url)", line)
    }
    assert told == set()


def prose(page: Path) -> str:
    """A page without its blocks of code, where # is a comment and ]( no link."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub makes of the headings of a page, and the explicit anchors."""
    found: list[str] = re.findall(r'<a id="([^"]+)"></a>', prose(page))
    for heading in re.findall(r"(?m)^#+ +(.*?) *#*$", prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        found.append(f"{slug}-{again}" if again else slug)
    return frozenset(found)


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text(
        "# Other\n\n## 7. Bad nodes: `out` of the way\n\n## Twice\n\n## Twice\n\n```console\n# no heading\n```\n"
    )
    page.write_text(
        "# The page\n[a](other.md) [b](gone.md#x) [c](other.md#7-bad-nodes-out-of-the-way) [d](other.md#twice-1)\n"
        "[e](other.md#no-heading) [f](#the-page) [g](#elsewhere) [h](https://example.com/x#y)\n```text\n[i](gone.md)\n```\n"
    )
    assert list(dead_links(page)) == [
        "gone.md is not there",
        "other.md has no heading #no-heading",
        "the page has no heading #elsewhere",
    ]


# What a check reads that not every Linux host has.
DEVICES = re.compile(r"(?<!/)\bdevice|accelerator|NVML|nccom-test|/dev/(kmsg|neuron)|neuron|\b(EFA|efa)\b")


@every("check", builtin_checks().values())
def test_check_of_devices_says_on_which_it_was_not_verified(check: Check) -> None:
    assert unverified(inspect.cleandoc(check.doc)) != "", "its docstring wants a line 'Unverified: ...'"


def unverified(doc: str) -> str | None:
    """What a docstring says of it; None where the check reads what every host has."""
    said = re.search(r"Unverified(?: on hardware)?: (.+)", doc)
    reads = re.search(r"(?ms)^Reads: .*?^Judges:", doc)
    return said[1] if said else "" if reads is None or DEVICES.search(reads[0]) else None


def test_check_that_reads_a_device_and_says_nothing_is_found() -> None:
    assert unverified("It is.\n\nReads:   the device.\nJudges:  nothing.") == ""
    assert unverified("It is.\n\nReads:   /sys/devices/system/cpu.\nJudges:  devices.") is None
    assert unverified("It is.\n\nReads:   NVML.\nJudges:  x.\nUnverified: GPUs.") == "GPUs."


def test_every_row_of_what_was_verified_has_its_date() -> None:
    rows = re.findall(r"(?m)^\| (?!\||-)(.+) \|$", (DOCS / "verified.md").read_text(encoding="utf-8"))
    assert len(rows) > 15
    for row in rows:
        assert re.search(r"20\d\d-\d\d-\d\d", row.split(" | ")[1]), row


def test_the_walks_of_the_architecture_lead_through_files_that_exist() -> None:
    walks = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Three walks")[2]
    files = re.findall(r"`((?:checks|healthd)/[^`]+\.py)`", walks)
    assert len(files) > 29
    assert [name for name in files if not (ROOT / name).is_file()] == []


# Back-quoted names that look like ours and are not files or modules here.
NOT_OURS = {
    "healthd.checks": "a group of entry points",
    "healthd.training_steps": "a group of entry points",
    "healthd.internal": "a domain",
    "healthd.owner": "a tag in AWS",
    "healthd.token": "a file",
    "healthd/bundled/checks": "in a wheel",
    "healthd/bundled/checks/host": "in a wheel",
    "healthd/fleet": "a folder that decision 0016 says is gone",
    "checks/system/file_handles.py": "made by the walk-through in CONTRIBUTING.md",
    "tests/checks/test_system_file_handles.py": "made by the walk-through in CONTRIBUTING.md",
    "healthd/integrations/chime/settings.py": "made by the walk-through in CONTRIBUTING.md",
    "healthd/integrations/chime/sink.py": "made by the walk-through in CONTRIBUTING.md",
    "tests/integrations/chime/test_chime.py": "made by the walk-through in CONTRIBUTING.md",
    "validations_view.py": "an answer in CONTRIBUTING.md: it does not exist yet",
}
ROOMS = ("healthd", "checks")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
QUOTED_NAME = re.compile(r"`((?:healthd|checks)(?:\.\w+)+)(?:\(\))?`")
QUOTED_PATH = re.compile(r"`((?:(?:healthd|checks|tests|docs|deploy)/[\w./-]*)|(?:[\w-]+/)*[\w-]+\.py)`")


def dead_names(text: str, folder: Path) -> Iterator[str]:
    """Back-quoted modules, what is in them, and paths that lead nowhere; a path may begin in any folder."""
    for name in QUOTED_NAME.findall(text):
        if name not in NOT_OURS and not is_there(name):
            yield name
    for path in QUOTED_PATH.findall(text):
        placeholder = re.search(r"[A-Z]{2,}", path) and not path.endswith(".md")
        known = path in NOT_OURS or placeholder or (folder / path).exists() or (ROOT / path).exists()
        if not known and not any(f"/{file}".endswith(f"/{path}") for file in files_here()):
            yield path


@functools.cache
def files_here() -> tuple[str, ...]:
    folders = ("healthd", "checks", "tests", "docs", "deploy")
    return tuple(str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*.py"))


@functools.cache
def is_there(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    words = name.split(".")
    if words[-1] == "toml":
        return True
    for most in range(len(words), 0, -1):
        file = ROOT.joinpath(*words[:most])
        if not (file.is_dir() or file.with_suffix(".py").is_file()):
            continue
        found: object = importlib.import_module(".".join(words[:most]))
        for word in words[most:]:
            if not hasattr(found, word):
                return word in getattr(found, "__annotations__", {}) and word == words[-1]
            found = getattr(found, word)
        return True
    return False


@every("page", [page for page in PAGES if page.name != "CHANGELOG.md"])
def test_names_and_paths_in_a_page_lead_somewhere(page: Path) -> None:
    assert list(dead_names(prose(page), page.parent)) == []


def test_names_and_paths_in_docstrings_and_comments_lead_somewhere() -> None:
    dead = {
        f"{source.relative_to(ROOT)}: {name}"
        for source in SOURCES
        for name in dead_names(source.read_text(encoding="utf-8"), source.parent)
    }
    assert dead == set()


def test_a_name_and_a_path_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    text = "`healthd.core.wire.decode` `healthd.core.gone` `checks.contract.Context.host` `checks.contract.Gone` "
    text += "`xla.py` `checks/gone.py` `gone.py` `tests/test_docs.py` `integrations/NAME/launcher.py` `docs/gone.md`"
    assert list(dead_names(text, tmp_path)) == [
        "healthd.core.gone",
        "checks.contract.Gone",
        "checks/gone.py",
        "gone.py",
        "docs/gone.md",
    ]
