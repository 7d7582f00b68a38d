"""Preflights of two nodes that know who they are by their launchers' variables alone: real hooks, on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.preflight_kit import Job
from tests.profile import some

PASSIVE = ("--tier", "passive", "--no-collective")
HERE = "localhost"


def torchrun(rank: int) -> dict[str, str]:
    told = {"TORCHELASTIC_RUN_ID": "r", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    return {**told, "GROUP_RANK": str(rank), "MASTER_ADDR": HERE}


def openmpi(rank: int) -> dict[str, str]:
    told = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    return {**told, "OMPI_COMM_WORLD_RANK": str(rank), "MASTER_ADDR": HERE}


def slurm(rank: int) -> dict[str, str]:
    told = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}
    return {**told, "SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURM_STEP_NODELIST": f"{HERE},other"}


def kubernetes(rank: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(rank), "JOB_COMPLETIONS": "2", "JOBSET_COORDINATOR": HERE, "JOB_NAME": "j"}


def sagemaker(rank: int) -> dict[str, str]:
    # The first of the hosts is rank 0; "localhost" sorts before "other".
    return {"SM_HOSTS": f'["other", "{HERE}"]', "SM_CURRENT_HOST": (HERE, "other")[rank]}


def batch(rank: int) -> dict[str, str]:
    told = {"AWS_BATCH_JOB_ID": "f0", "AWS_BATCH_JOB_ATTEMPT": "1", "AWS_BATCH_JOB_NUM_NODES": "2"}
    told |= {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_NODE_INDEX": str(rank)}
    return told | ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"} if rank else {})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, size=2) as job:
        yield job


def settled(job: Job, variables: dict[str, str]) -> dict[str, str]:
    """A port and folders of this test's own, for nodes that share a machine."""
    return {**variables, "HEALTHD_PREFLIGHT_PORT": str(job.port)}


@pytest.mark.parametrize(
    "launcher", some([torchrun, openmpi, slurm, kubernetes, sagemaker, batch], 3), ids=lambda f: f.__name__
)
def test_two_nodes_start_together_by_their_launchers_word_alone(job: Job, launcher: object) -> None:
    assert callable(launcher)
    for rank in range(2):
        job.start(rank, *PASSIVE, place=(), env=settled(job, launcher(rank)))
    for rank in range(2):
        ended = job.end(rank)
        assert ended.code == 0, ended.err
        assert f"started {rank} 2" in ended.out
        assert f"healthd: rank {rank} of 2 by " in ended.err
    job.nothing_left()


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


def test_a_main_node_whose_exit_code_is_the_jobs_is_never_left_out(job: Job) -> None:
    """AWS Batch would call the job a success when the parked main node ends well, whatever became of the others."""
    for rank in range(2):
        fault = ("--fault", "memory_free=fail") if rank == 0 else ()
        job.start(rank, *PASSIVE, "--min-nodes", "1", *fault, place=(), env=settled(job, batch(rank)))
    for rank in range(2):
        ended = job.end(rank)
        assert (ended.code, ended.out) == (75, ""), ended.err
        assert "the main node was left out" in ended.err
    job.nothing_left()


def test_half_of_a_launchers_variables_are_one_clear_line(job: Job) -> None:
    job.start(0, place=(), env={"AWS_BATCH_JOB_ID": "f0", "AWS_BATCH_JOB_NUM_NODES": "2"})
    ended = job.end(0)
    assert ended.code == 2
    assert "AWS_BATCH_JOB_NODE_INDEX" in ended.err
    assert len(ended.err.strip().splitlines()) == 1
