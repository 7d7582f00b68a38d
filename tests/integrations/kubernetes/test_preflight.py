"""Preflights of pods that know who they are by the variables of Kubernetes alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.preflight_kit import Job
from tests.hooks.two_nodes_kit import HERE, PASSIVE, settled, two_nodes_start_together


def kubernetes(rank: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(rank), "JOB_COMPLETIONS": "2", "JOBSET_COORDINATOR": HERE, "JOB_NAME": "j"}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, size=2) as job:
        yield job


def test_two_nodes_start_together_by_the_launchers_word_alone(tmp_path: Path) -> None:
    two_nodes_start_together(tmp_path, kubernetes)


def pod(folder: Path, rank: int) -> tuple[str, ...]:
    """A command within the host name and /etc/hosts that the kubelet gives a pod of Job `train` by Service `peers`."""
    name, hosts = f"train-{rank}", folder / f"hosts-{rank}"
    everyone = (f"127.0.0.1 train-{n}.peers.ml.svc.cluster.local train-{n}\n" for n in (rank, 1 - rank))
    hosts.write_text("".join(everyone) + "127.0.0.1 localhost\n")
    script = f'hostname {name} && mount --bind {hosts} /etc/hosts && exec "$@"'
    return ("unshare", "--mount", "--uts", "sh", "-ec", script, "sh")


@pytest.mark.system("unshare", "hostname", root=True)
def test_pods_of_an_indexed_job_need_be_told_how_many_they_are_and_nothing_else(job: Job, tmp_path: Path) -> None:
    for rank in range(2):
        told = {"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"train-{rank}"}
        told["HEALTHD_NODE_RUN_DIR"] = str(tmp_path / f"run-{rank}")
        within = pod(tmp_path, rank)
        job.start(rank, *PASSIVE, place=("--nnodes", "2"), env=settled(job, told), within=within)
    for rank in range(2):
        ended = job.end(rank)
        assert ended.code == 0, ended.err
        assert "rank 0 at train-0.peers.ml.svc.cluster.local" in ended.err
    job.nothing_left()


@pytest.mark.system("unshare", "hostname", root=True)
def test_a_pod_that_comes_before_the_name_of_the_main_one_is_known_gives_the_others_its_address(
    job: Job, tmp_path: Path
) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        told = {"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"train-{rank}"}
        told["HEALTHD_NODE_RUN_DIR"] = str(tmp_path / f"run-{rank}")
        within = pod(tmp_path, rank)
        return job.start(rank, *PASSIVE, place=("--nnodes", "2"), env=settled(job, told), within=within)

    late = start(1)
    known = (tmp_path / "hosts-1").read_text()
    (tmp_path / "hosts-1").write_text("127.0.0.1 localhost train-1.peers.ml.svc.cluster.local train-1\n")
    assert late.stderr is not None
    while "waiting for rank 0" not in late.stderr.readline():
        pass
    (tmp_path / "hosts-1").write_text(known)
    start(0)
    assert "hosts ['127.0.0.1', '127.0.0.1']" in job.end(1).out
    assert job.end(0).code == 0
    job.nothing_left()
