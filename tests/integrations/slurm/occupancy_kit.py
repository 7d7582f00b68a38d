"""The files of a host with Slurm."""

from __future__ import annotations

from pathlib import Path


def slurm_config(root: Path, text: str = "PrologFlags=Alloc,Contain\n") -> None:
    (root / "etc/slurm").mkdir(parents=True)
    (root / "etc/slurm/slurm.conf").write_text(text)
