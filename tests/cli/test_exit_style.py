"""Exit codes for those who know others than ours: node-problem-detector and Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.cli_kit import healthd

CONFIG = """
[node]
checks = ["memory_free", "late"]
[programs.late]
command = ["sh", "-c", "echo looked at 3 things; exit %d"]
"""


@pytest.mark.parametrize(
    ("ended", "style", "code", "line"),
    [
        (0, "npd", 0, "healthy"),
        (1, "npd", 0, "degraded: "),
        (2, "npd", 1, "un"),
        (3, "npd", 2, "unknown: "),
        (0, "slurm", 0, "healthy"),
        (1, "slurm", 0, "degraded: "),
        (2, "slurm", 1, "un"),
        (3, "slurm", 1, "unknown: "),
        (0, "plain", 0, ""),
        (1, "plain", 0, ""),
        (2, "plain", 1, ""),
        (3, "plain", 3, ""),
        (0, "plugin", 0, "healthy"),
        (1, "plugin", 1, "degraded: "),
        (2, "plugin", 2, "un"),
        (3, "plugin", 3, "unknown: "),
    ],
)
def test_a_check_ends_with_the_code_that_the_caller_knows_and_one_line(
    tmp_path: Path, ended: int, style: str, code: int, line: str
) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text(CONFIG % ended)
    said = healthd(tmp_path, "check", "late", "--tier", "passive", "--config", str(file), "--exit-style", style)
    assert said.code == code, said
    if style != "plain":
        assert said.out.startswith(line)
        assert len(said.out.splitlines()) == 1


def test_what_is_not_known_is_unknown_to_both(tmp_path: Path) -> None:
    usage = healthd(tmp_path, "check", "--exit-style", "npd", "no_such_check")
    assert usage.code >= 2
    assert healthd(tmp_path, "check", "--exit-style", "plugin", "no_such_check").code == 3, "2 is critical to it"
    for style in ("npd", "slurm"):
        away = healthd(
            tmp_path,
            *("gate", "--aggregator", "http://127.0.0.1:1", "--job", "j", "--node", "n", "--wait", "0s"),
            *("--exit-style", style),
        )
        assert away.code >= 2, "unreachable is no verdict on the nodes"
