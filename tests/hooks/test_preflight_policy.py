"""What the file says of gates holds for the gate of a preflight too, as far as it can mean anything there."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.contract import Tier
from healthd.aggregator.policy import Policy
from healthd.cli.hooks.preflight import POLICY, build_task, find_my_place
from healthd.cli.settings.options import load_settings
from healthd.cli.settings.tree import Settings
from healthd.hooks.preflight.sidecar import SILENT_SECONDS, settings_of
from tests.hooks.preflight_kit import CONFIG, Job

CHOSEN = """
[policy]
require = ["matmul"]
admit_degraded = false
collective_checks = ["all_gather"]
collective_ports = [41000, 41010]
collective_start = "7s"
collective_timeout = "2m"
validation = "9m"
topology_labels = ["rack \\"7\\""]
rules = true
keep_days = 1
[policy.run]
quick = 33.5
"""


def loaded(folder: Path, text: str) -> Settings:
    file = folder / "given.toml"
    file.write_text(text)
    options = {"config": file, "nnodes": 2, "node_rank": 0, "main": "127.0.0.1", "state_dir": folder}
    return load_settings(options, section="preflight")


def policy_for(folder: Path, text: str) -> Policy:
    """What the aggregator of a preflight goes by: it reads this file and nothing else."""
    settings = loaded(folder, text)
    task = build_task(settings, find_my_place(settings), parent=1, began=0.0)
    made = folder / "aggregator.toml"
    made.write_text(settings_of(task, folder))
    return load_settings({"config": made}, section="aggregator").policy


def test_what_concerns_checks_and_validation_reaches_the_gates_aggregator(tmp_path: Path) -> None:
    policy = policy_for(tmp_path, CHOSEN)
    assert (policy.require, policy.admit_degraded) == (("matmul",), False)
    assert (policy.collective_checks, policy.collective_ports) == (("all_gather",), (41000, 41010))
    assert (policy.collective_start_seconds, policy.collective_timeout_seconds) == (7.0, 120.0)
    assert policy.validation_seconds == 540.0
    assert policy.topology_labels == ('rack "7"',)
    assert policy.run_seconds == {**Policy().run_seconds, Tier.QUICK: 33.5}
    assert (policy.rules, policy.silent_seconds) == (False, SILENT_SECONDS), "it lives for one job's start"
    assert policy.keep_days == Policy().keep_days, "a standing fleet's"


def test_without_a_word_in_the_file_all_is_as_always(tmp_path: Path) -> None:
    policy = policy_for(tmp_path, "")
    assert {name: getattr(policy, name) for name in POLICY} == {name: getattr(Policy(), name) for name in POLICY}


def test_a_check_that_the_policy_requires_keeps_a_preflight_from_starting(tmp_path: Path) -> None:
    with Job(tmp_path, size=1) as job:
        job.config.write_text(f'{CONFIG}[policy]\nrequire = ["digest"]\n')
        job.start(0, "--tier", "passive")
        ended = job.end(0)
        assert (ended.code, ended.out) == (75, ""), ended.err
        assert "digest" in ended.err
        job.nothing_left()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("collective_port = [1, 2]", "unknown key 'policy.collective_port'; did you mean 'collective_ports'?"),
        ("collective_ports = [1, 2]", "collective_ports: must be two ports from 1024 to 65535"),
        ("collective_start = 'soon'", "is not a duration"),
    ],
)
def test_a_bad_policy_is_named_as_for_an_aggregator(tmp_path: Path, text: str, said: str) -> None:
    with Job(tmp_path, size=1) as job:
        job.config.write_text(f"{CONFIG}[policy]\n{text}\n")
        job.start(0, "--tier", "passive")
        ended = job.end(0)
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert ended.err.count("\n") == 1
