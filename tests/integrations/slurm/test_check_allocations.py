"""A person who checks a node by hand disturbs no job that was just placed there; a job's own hook is no stranger."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.cli.hooks.answer import own_workload
from healthd.integrations.slurm.occupancy import own_jobs
from healthd.node.occupancy.own import inside_a_job
from tests.cli.cli_kit import healthd
from tests.integrations.slurm.occupancy_kit import slurm_config
from tests.node.allocation_kit import process


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A machine with Slurm, and a job that has been placed and holds no device yet."""
    root = tmp_path / "host"
    process(root, 100, "slurmd")
    process(root, 200, "slurmstepd", "slurmstepd: [4711.extern]")
    slurm_config(root)
    return root


def test_active_checks_are_refused_where_a_job_was_just_placed_and_it_is_named(tmp_path: Path, host: Path) -> None:
    said = healthd(tmp_path, "check", "digest", "memory_free", "--json", "--host-root", str(host))
    assert said.code == 3, said.err
    results = {result["check"]: result for result in said.json["results"]}
    (finding,) = results["digest"]["findings"]
    assert (finding["status"], finding["reason"]) == ("skip", "Busy")
    assert "Slurm has given this node to slurm:4711" in finding["message"]
    assert "node.allocations.ignore" in finding["message"]
    assert results["memory_free"]["findings"][0]["reason"] != "Busy", "passive checks disturb nobody"


def test_inside_of_the_jobs_own_allocation_active_checks_run(tmp_path: Path, host: Path) -> None:
    said = healthd(tmp_path, "check", "digest", "--json", "--host-root", str(host), env={"SLURM_JOB_ID": "4711"})
    assert [result["status"] for result in said.json["results"]] == ["pass"], said.out


def test_a_workload_that_never_uses_the_devices_can_be_ignored(tmp_path: Path, host: Path) -> None:
    told = {"HEALTHD_NODE_ALLOCATIONS_IGNORE": "slurm:4711"}
    said = healthd(tmp_path, "check", "digest", "--json", "--host-root", str(host), env=told)
    assert [result["status"] for result in said.json["results"]] == ["pass"], said.out


def own(proc: Path, pid: int, cgroup: str) -> None:
    """This very process, in a table of processes as data."""
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/stat").write_text(f"{pid} (python) R 1 1 1\n")


@pytest.mark.parametrize(
    ("cgroup", "parent", "found"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", 1, {"slurm:12"}),
        ("4:devices:/slurm/uid_1000/job_13/step_batch\n", 1, {"slurm:13"}),
        ("0::/user.slice/session-3.scope\n", 200, {"slurm:4711"}),
        ("0::/user.slice/job_14\n", 1, set()),
    ],
)
def test_the_own_slurm_job_is_known_where_its_variables_were_lost(
    tmp_path: Path, host: Path, cgroup: str, parent: int, found: set[str]
) -> None:
    process(host, 300, "python", parent=parent)
    own(host / "proc", 300, cgroup)
    assert own_jobs(host, {}) == found
    assert inside_a_job({}, host) is bool(found)


def test_a_hook_names_the_job_that_it_runs_in() -> None:
    assert own_workload({"SLURM_JOB_ID": "9"}, ("n1", "n2")) == "slurm:9"
