"""The walk-throughs in CONTRIBUTING.md, followed to the letter in a copy of the project."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the files of the walk-through in their places."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("checks", "healthd"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.py"):
        shutil.copy(page, folder / "docs")
    (folder / "docs/runbooks").mkdir(parents=True)
    shutil.copy(ROOT / "docs/runbooks/reasons.toml", folder / "docs/runbooks")
    shutil.copy(ROOT / "docs/postmortem.md", folder / "docs")
    (folder / "tests/checks").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"Put\s+this\s+into\s+`([^`]+)`:\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    assert [path for path, _ in steps] == ["checks/system/file_handles.py", "tests/checks/test_system_file_handles.py"]
    for path, code in steps:
        (folder / path).write_text(code, encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_new_check_runs_without_being_registered(copy: Path) -> None:
    done = run(copy, "-m", "healthd", "check", "file_handles", "--json", "--run-dir", str(copy / "run"))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert (result["check"], result["status"]) == ("file_handles", "pass")
    assert result["findings"][0]["measurements"][0]["origin"] == "default"


def test_its_test_passes_and_its_page_is_written(copy: Path) -> None:
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/checks/test_system_file_handles.py")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert run(copy, "-m", "docs.generate").returncode == 0
    page = (copy / "docs/checks.md").read_text()
    assert "The kernel has file handles left." in page
    assert "max_used_ratio" in page


def test_the_files_are_in_the_form_that_the_project_asks(copy: Path) -> None:
    files = ("checks/system/file_handles.py", "tests/checks/test_system_file_handles.py")
    for command in (("ruff", "format", "--check"), ("ruff", "check")):
        done = run(copy, "-m", *command, *files)
        assert done.returncode == 0, done.stdout


def test_an_integration_is_two_folders_and_a_line(copy: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"Write this to\s`([^`]+)`[^:]*:\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    assert [Path(path).name for path, _ in steps] == ["settings.py", "sink.py", "test_chime.py"]
    for path, code in steps:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_text(code, encoding="utf-8")
    (copy / "healthd/integrations/chime/__init__.py").write_text('"""A line for each job that died."""\n')
    found = re.search(r"(?s)in the order of the names:\n\n```python\n(.*?)```", text)
    assert found is not None
    listed = copy / "healthd/integrations/__init__.py"
    before = listed.read_text(encoding="utf-8")
    listed.write_text(before.replace("INTEGRATIONS = (\n", f"INTEGRATIONS = (\n{found[1]}"), encoding="utf-8")
    assert run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", steps[-1][0]).returncode == 0
    (copy / "chime.toml").write_text(f'[aggregator.chime]\nfile = "{copy}/rings"\n')
    code = """if True:
        from pathlib import Path
        from healthd.aggregator.jobs.sinks import job_events
        from healthd.cli.settings.tree import Settings
        from healthd.core.config import load
        settings = load(Settings, file=Path("chime.toml"), environ={}, arguments={})
        print([name for name, _ in job_events(settings.aggregator, source="store-1")])
    """
    done = run(copy, "-c", code)
    assert (done.stdout, done.stderr) == ("['chime']\n", "")
    for command in (("ruff", "format", "--check"), ("ruff", "check")):
        done = run(copy, "-m", *command, *(path for path, _ in steps), "healthd/integrations")
        assert done.returncode == 0, done.stdout
