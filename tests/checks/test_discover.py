"""Checks are found by their type; third-party ones by entry point, and a name that matches nothing is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checks.contract import Check, Tier
from checks.discover import PACKAGES, builtin_checks, checks_in, find_builtin

REPOSITORY = Path(__file__).parents[2]
CHECK_FILE = """
from __future__ import annotations
from collections.abc import Iterator
from checks.contract import Context, Finding, NoParams, Status, check

@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def {name}(ctx: Context[NoParams]) -> Iterator[Finding]:
    yield Finding(status=Status.PASS, reason=None, message="1 fan turns", target="node")
"""


def test_at_least_ten_passive_checks_are_built_in_and_every_name_is_the_key() -> None:
    found = builtin_checks(PACKAGES[:1])
    assert len(found) >= 10
    assert all(name == check.name and check.tier is Tier.PASSIVE for name, check in found.items())


def test_every_passive_check_says_what_it_reads_judges_and_costs() -> None:
    for check in builtin_checks(PACKAGES[:1]).values():
        assert all(word in check.doc for word in ("Reads:", "Judges:", "Cost:")), check.name


def test_check_is_found_by_name_and_an_unknown_name_finds_nothing() -> None:
    found = find_builtin("memory_free")
    assert isinstance(found, Check)
    assert find_builtin("no_such_check") is None


def test_imported_check_does_not_count_as_one_of_the_importing_module() -> None:
    import checks.system.memory as memory

    assert [check.name for check in checks_in(memory)] == ["memory_free"]
    importing = type(memory)("importing")
    vars(importing).update(memory_free=memory.memory_free)
    assert checks_in(importing) == []


def run_child(code: str, folder: Path, *arguments: str) -> str:
    """Run code in a fresh interpreter that sees `folder` as an installed package does."""
    start = f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}, {str(folder)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", start + code, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_checks_of_one_name_are_refused_naming_both_files(tmp_path: Path) -> None:
    package = tmp_path / "twice"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("one", "two"):
        (package / f"{name}.py").write_text(CHECK_FILE.format(name="fan"))
    code = (
        "from checks.discover import builtin_checks\ntry: builtin_checks(['twice'])\nexcept ValueError as e: print(e)\n"
    )
    text = run_child(code, tmp_path)
    assert all(word in text for word in ("'fan'", "twice.one", "twice.two"))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as pip leaves it: a package and its entry points."""
    (tmp_path / "acme_fans.py").write_text(CHECK_FILE.format(name="fan_speed"))
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('no such bus')\n")
    (tmp_path / "acme_quits.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "acme_unwanted.py").write_text("import sys\nprint('imported')\n")
    record = tmp_path / "acme_fans-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fans\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(
        "[healthd.checks]\nfan_speed = acme_fans:fan_speed\nbroken = acme_broken:x\n"
        "text = acme_fans:__name__\nquits = acme_quits:x\nunwanted = acme_unwanted:x\n"
    )
    return tmp_path


LOAD = """
import json
from checks.discover import load_third_party
try:
    print(json.dumps(sorted(load_third_party(sys.argv[1:]))))
except ValueError as error:
    print(json.dumps(str(error)))
"""


def test_installed_check_is_found_by_its_entry_point_and_others_are_not_imported(installed: Path) -> None:
    assert json.loads(run_child(LOAD, installed, "fan_speed")) == ["fan_speed"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fan_sped", "did you mean 'fan_speed'?"),
        ("zzzzz", "choose from: broken, fan_speed, quits, text, unwanted"),
        ("broken", "RuntimeError: no such bus"),
        ("quits", "SystemExit: 0"),
        ("text", "is not made with @check"),
    ],
)
def test_name_that_leads_to_no_check_is_one_line_naming_it(installed: Path, name: str, words: str) -> None:
    """Rival fault 7."""
    text = json.loads(run_child(LOAD, installed, name))
    assert words in text
    assert repr(name) in text
    assert "\n" not in text


def test_where_nothing_is_installed_the_error_says_so(tmp_path: Path) -> None:
    assert "none is installed" in json.loads(run_child(LOAD, tmp_path, "fan_speed"))


@pytest.fixture
def second(installed: Path) -> Path:
    """Another package, which brings a check and an entry point of the same names."""
    (installed / "other_fans.py").write_text(CHECK_FILE.format(name="fan_speed"))
    record = installed / "other_fans-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: other-fans\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(
        "[healthd.checks]\nfan_speed = other_fans:fan_speed\nfans = other_fans:fan_speed\n"
    )
    return installed


def test_entry_point_that_two_packages_bring_is_refused_naming_both(second: Path) -> None:
    text = json.loads(run_child(LOAD, second, "fan_speed"))
    assert all(word in text for word in ("two packages", "acme_fans:fan_speed", "other_fans:fan_speed"))


def test_two_entry_points_with_checks_of_one_name_are_refused(second: Path) -> None:
    points = second / "other_fans-1.0.dist-info/entry_points.txt"
    points.write_text("[healthd.checks]\nfans = other_fans:fan_speed\n")
    assert "two have the name fan_speed" in json.loads(run_child(LOAD, second, "fan_speed", "fans"))
