"""An interpreter whose torch does nothing, for tests and figures in which the seconds of importing it say nothing."""

from __future__ import annotations

import venv
from pathlib import Path

TORCH = '''
"""What binding a CPU asks of torch."""
import types
__version__ = "0.0"
backends = types.SimpleNamespace(cpu=types.SimpleNamespace(get_cpu_capability=lambda: "none"))
def device(name): return name
def get_num_threads(): return 1
def set_num_threads(number): pass
'''


def make_python(folder: Path) -> Path:
    """Make an environment in a new folder; its interpreter, for workers on CPUs."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.py").write_text(TORCH)
    return folder / "bin/python"
