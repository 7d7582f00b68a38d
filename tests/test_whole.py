"""What CI has installed is used: there a skip for want of a program is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="no-such-program is not installed: apt-get install it")
def test_by_mark(): pass

def test_inside(): pytest.skip("other-program is not installed")

@pytest.mark.skipif(True, reason="no NVIDIA GPU")
def test_for_hardware(): pass
"""
MODULE = 'import pytest\npytest.importorskip("no_such_module", reason="no-such-module is not installed")\n'


def outcome(folder: Path, text: str, **variables: str) -> str:
    """The last line of a run of pytest on a file of its own."""
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    words = ["-q", "-p", "tests.whole", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith(("TESTS_", "PYTEST_"))}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return re.sub(r" in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "3 skipped"),
        ({"TESTS_WHOLE": "1"}, "1 failed, 1 skipped, 1 error"),
        ({"TESTS_WHOLE": "1", "TESTS_WITHOUT": "kubectl other-program"}, "2 skipped, 1 error"),
    ],
)
def test_skip_for_want_of_a_program_fails_where_all_is_installed(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    assert outcome(tmp_path, SKIPS, **variables) == said


def test_module_that_would_skip_as_a_whole_is_an_error_where_all_is_installed(tmp_path: Path) -> None:
    assert outcome(tmp_path, MODULE) == "1 skipped"
    assert "1 error" in outcome(tmp_path, MODULE, TESTS_WHOLE="1")
