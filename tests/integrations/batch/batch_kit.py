"""The files of deploy/batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/batch"


def load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))
