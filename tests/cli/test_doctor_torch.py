"""`healthd doctor` about a torch that is there and cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

from healthd.cli.support.doctor import _interpreter


def python_with(folder: Path, torch: str) -> Path:
    """An interpreter whose torch is this program."""
    (folder / "torch.py").write_text(torch)
    python = folder / "python"
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -c "{program}" "$3"\n')
    python.chmod(0o755)
    return python


def test_a_torch_whose_library_is_missing_is_missing_and_the_interpreter_is_not(tmp_path: Path) -> None:
    python = python_with(tmp_path, "raise OSError('libcudart.so.12: cannot open shared object file')")
    items = {item.name: item for item in _interpreter(python, 30.0)}
    assert items["probe interpreter"].state == "ok"
    assert items["torch"].state == "missing"
    assert "libcudart.so.12: cannot open shared object file" in items["torch"].text


def test_an_interpreter_that_says_something_else_is_missing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 8\n")
    python.chmod(0o755)
    (item,) = _interpreter(python, 30.0)
    assert (item.name, item.state) == ("probe interpreter", "missing")
