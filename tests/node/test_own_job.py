"""What a process may know of its own job."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.cli.settings.options import load_settings
from healthd.node.occupancy.own import job_variables


def test_what_is_out_of_sight_matters_outside_of_a_job_and_to_the_daemon_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in job_variables():
        monkeypatch.delenv(name, raising=False)
    settings = load_settings({"state_dir": tmp_path}, section="node")
    assert settings.runner().options["in_job"] is False
    assert settings.runner(in_job=True).options["in_job"] is True  # a hook runs in the job's own container
    monkeypatch.setenv(job_variables()[0], "1")
    assert settings.runner().options["in_job"] is True
    assert settings.runner(in_job=False).options["in_job"] is False  # the daemon, in a pod of its own


@pytest.mark.parametrize(("variables", "asks"), [({}, True), *(({name: "1"}, False) for name in job_variables())])
def test_a_hook_that_was_started_by_hand_heeds_the_hosts_schedulers_and_a_jobs_own_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asks: bool
) -> None:
    for name in job_variables():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({"state_dir": tmp_path}, section="preflight")
    made = settings.executor(
        "n1", "http://127.0.0.1:1", tmp_path, address="127.0.0.1:1", ask_seconds=1.0, token_file=None
    )
    assert made.allocations.read is asks
