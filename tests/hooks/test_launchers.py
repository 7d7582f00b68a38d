"""Who am I among how many: what each launcher's variables mean, and what they cannot mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import (
    Place,
    batch,
    describe,
    find_place,
    find_places,
    kubernetes,
    sagemaker,
    slurm,
    torchrun,
)
from tests.every import every


def torch(**changes: str) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "GROUP_RANK": "1",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "12",
        "MASTER_ADDR": "10.0.0.1",
        **changes,
    }


def multi_node(**changes: str) -> dict[str, str]:
    return {
        "AWS_BATCH_JOB_ID": "f0ab#2",
        "AWS_BATCH_JOB_ATTEMPT": "3",
        "AWS_BATCH_JOB_NUM_NODES": "4",
        "AWS_BATCH_JOB_NODE_INDEX": "2",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1",
        **changes,
    }


def indexed(**changes: str) -> dict[str, str]:
    return {
        "JOB_COMPLETION_INDEX": "1",
        "JOB_COMPLETIONS": "3",
        "HOSTNAME": "train-1",
        "JOB_SUBDOMAIN": "peers",
        **changes,
    }


def step(**changes: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[4-5]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_RESTART_COUNT": "1",
        **changes,
    }


def training(**changes: str) -> dict[str, str]:
    hosts = json.dumps(["algo-1", "algo-10", "algo-2"])
    return {"SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-10", "TRAINING_JOB_NAME": "fine-tune", **changes}


def mpi(**changes: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        **changes,
    }


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def one_line(error: ConfigError) -> None:
    assert "\n" not in str(error)


def place(variables: dict[str, str]) -> Place:
    found = find_place(variables)
    assert found is not None
    return found


@every(
    ("variables", "rank", "size", "job", "attempt", "main", "source"),
    [
        (torch(), 1, 3, "run-7", 0, "10.0.0.1", "torchrun"),
        (multi_node(), 2, 4, "f0ab", 2, "10.0.0.1", "AWS Batch"),
        (indexed(), 1, 3, "train", 0, "train-0.peers", "an Indexed Job of Kubernetes"),
        (indexed(JOBSET_NAME="big", JOBSET_RESTART="4"), 1, 3, "big", 4, "train-0.peers", "a Kubernetes JobSet"),
        (step(), 1, 2, "slurm-77", 1, "n4", "Slurm"),
        (training(), 2, 3, "fine-tune", 0, "algo-1", "SageMaker"),
        (mpi(), 1, 2, None, 0, "10.0.0.1", "Open MPI"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-node-0-0.t", "JOB_NAME": "t"},
            1,
            2,
            "t",
            0,
            "t-node-0-0.t",
            "Kubeflow Trainer",
        ),
    ],
)
def test_each_launcher_says_who_we_are_and_from_what(
    variables: dict[str, str], rank: int, size: int, job: str | None, attempt: int, main: str, source: str
) -> None:
    found = place(variables)
    assert (found.rank, found.size, found.job, found.attempt, found.main) == (rank, size, job, attempt, main)
    assert found.source == source
    assert found.evidence
    assert describe(found).startswith(f"rank {rank} of {size} by {source} ({found.evidence})")


def test_torchrun_and_mpirun_and_srun_count_processes_and_we_count_nodes() -> None:
    for variables, local in ((torch(), (1, 4)), (mpi(), (1, 2)), (step(), (1, 2))):
        found = place(variables)
        assert (found.local_rank, found.local_size) == local


def test_a_run_without_an_id_has_no_name() -> None:
    assert place(torch(TORCHELASTIC_RUN_ID="none")).job is None


def test_without_a_launcher_there_is_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "1", "WORLD_SIZE": "2"}) is None, "somebody's own variables are not torchrun's"
    assert find_place({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}) is None, "a shell of salloc is no task"
    prolog = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SCRIPT_CONTEXT": "prolog_slurmctld"}
    assert find_place(prolog) is None, "a prolog is no task of its job"


@every(
    ("variables", "said"),
    [
        (torch(WORLD_SIZE="10"), "10 ranks cannot be divided into nodes of 4"),
        (torch(LOCAL_WORLD_SIZE="0"), "cannot be divided"),
        (torch(GROUP_RANK="first"), "GROUP_RANK='first' is not a number"),
        (torch(GROUP_RANK="9"), "torchrun: rank 9 of 3 nodes"),
        (torch(LOCAL_RANK="-1"), "LOCAL_RANK='-1' is not a number"),
        (torch(WORLD_SIZE=""), "WORLD_SIZE='' is not a number"),
        (without(multi_node(), "AWS_BATCH_JOB_NODE_INDEX"), "AWS_BATCH_JOB_NODE_INDEX is not"),
        (without(multi_node(), "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"), "is not set on node 2"),
        (multi_node(AWS_BATCH_JOB_NODE_INDEX="4"), "cannot both be of 4 nodes"),
        (without(indexed(), "JOB_COMPLETIONS"), "the number of pods of its Job: use --nnodes N"),
        (indexed(JOB_COMPLETIONS="1"), "rank 1 of 1 nodes"),
        (without(indexed(JOB_SUBDOMAIN=""), "HOSTNAME"), "the address of rank 0: give its pods a headless Service"),
        (indexed(JOBSET_JOB_INDEX="2"), "JOBSET_JOB_COMPLETIONS is not"),
        ({"JOBSET_NAME": "big"}, "needs completionMode: Indexed"),
        (without(step(), "SLURM_NODEID"), "SLURM_NODEID is not"),
        (without(step(), "SLURM_STEP_ID"), "this is the batch script of job 77 on 2 nodes.*srun"),
        (step(SLURM_STEP_NODELIST="n4"), "lists 1 nodes"),
        (step(SLURM_STEP_NODELIST="n[4-"), "cannot be read"),
        (step(SLURM_STEP_TASKS_PER_NODE="two"), "tasks per node 'two' cannot be read"),
        (without(training(), "SM_HOSTS"), "SM_HOSTS is not"),
        (training(SM_HOSTS="algo-1,algo-2"), "not a list of host names"),
        (training(SM_CURRENT_HOST="algo-3"), "'algo-3' is not among the hosts algo-1, algo-2, algo-10"),
        (without(mpi(), "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not"),
        (mpi(OMPI_COMM_WORLD_LOCAL_RANK="0"), "not placed node by node; use mpirun --map-by slot"),
        (without(mpi(), "MASTER_ADDR"), "Open MPI does not provide the address of rank 0: set MASTER_ADDR"),
    ],
)
def test_variables_that_make_no_sense_or_are_half_there_are_one_clear_line(
    variables: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        find_place(variables)
    assert "\n" not in str(told.value)


# --- AWS Batch --------------------------------------------------------------------------------------------------------


def test_the_main_node_of_batch_is_rank_0_whatever_its_index() -> None:
    assert [batch.rank_of(index, 2) for index in range(4)] == [1, 2, 0, 3]
    main = place(without(multi_node(AWS_BATCH_JOB_MAIN_NODE_INDEX="2"), batch.MAIN_ADDRESS))
    assert main.rank == 0
    assert main.main not in ("", "127.0.0.1"), "children are told this address by Batch, so it must be reachable"
    assert main.main_counts


def test_a_single_job_and_a_child_of_an_array_are_jobs_of_one_node() -> None:
    single = place({"AWS_BATCH_JOB_ID": "a1", "AWS_BATCH_JOB_ATTEMPT": "1"})
    child = place({"AWS_BATCH_JOB_ID": "a1:7", "AWS_BATCH_JOB_ARRAY_INDEX": "7", "AWS_BATCH_JOB_ATTEMPT": "2"})
    assert (single.rank, single.size, single.job, single.attempt) == (0, 1, "a1", 0)
    assert (child.rank, child.size, child.job, child.attempt) == (0, 1, "a1:7", 1)
    assert "child 7 of an array" in child.source


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def test_a_pod_finds_the_headless_service_in_its_own_full_name() -> None:
    found = kubernetes.find(without(indexed(), "JOB_SUBDOMAIN"), full_name=lambda: "train-1.peers.ml.svc.cluster.local")
    assert found is not None
    assert found.main == "train-0.peers.ml.svc.cluster.local"


def test_kubernetes_sets_all_but_the_number_of_pods() -> None:
    found = find_place({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, size=4, main="train-0.peers")
    assert found is not None
    assert (found.rank, found.size, found.main, found.job) == (1, 4, "train-0.peers", "train")


def test_a_number_of_nodes_that_contradicts_the_launcher_is_said() -> None:
    with pytest.raises(ConfigError, match=r"4 nodes were requested, but torchrun has 3 \("):
        find_place(torch(), size=4)
    told = find_place(torch(), size=3, main="head")
    assert told is not None
    assert told.main == "head"


def test_a_pod_without_a_headless_service_does_not_guess() -> None:
    found = kubernetes.find(without(indexed(), "JOB_SUBDOMAIN"), full_name=lambda: "node-17.ec2.internal")
    assert found is not None
    assert found.main == ""


def test_the_jobs_of_a_jobset_are_counted_through_and_the_coordinator_is_rank_0() -> None:
    found = place(
        indexed(
            JOB_COMPLETIONS="6",
            JOBSET_NAME="big",
            JOBSET_JOB_INDEX="1",
            JOBSET_JOB_COMPLETIONS="3",
            JOBSET_COORDINATOR="big-w-0-0.big",
        )
    )
    assert (found.rank, found.size, found.main) == (4, 6, "big-w-0-0.big")


def test_how_often_an_agent_of_torchrun_has_restarted_is_no_attempt_of_the_job() -> None:
    """Each counts its own restarts, so that nodes of one job would tell different attempts."""
    for count in ("0", "2"):
        found = place(torch(TORCHELASTIC_RESTART_COUNT=count))
        assert (found.attempt, found.attempt_told) == (0, False)


def test_an_indexed_job_tells_no_attempt() -> None:
    assert not place(indexed()).attempt_told
    assert place(indexed(JOBSET_RESTART="0")).attempt_told


# --- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07]-ib,m", ["n1-ib", "n2-ib", "n3-ib", "n07-ib", "m"]),
        ("trn-[08-11]", ["trn-08", "trn-09", "trn-10", "trn-11"]),
        ("a,b[2],c", ["a", "b2", "c"]),
    ],
)
def test_lists_of_nodes_are_expanded_as_slurm_does(text: str, hosts: list[str]) -> None:
    assert list(slurm.expand(text)) == hosts


@every("text", ["", ",", "n[", "n[]", "n[3-1]", "n[a-b]", "n[1-9999999999]", "n]1"])
def test_a_list_of_nodes_that_is_none_is_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        slurm.expand(text)


@given(st.text(alphabet="n01-9[],x ", max_size=20))
def test_any_text_is_a_list_of_nodes_or_one_clear_line(text: str) -> None:
    try:
        hosts = slurm.expand(text)
    except ConfigError as error:
        one_line(error)
    else:
        assert hosts
        assert all(hosts)


# --- SageMaker --------------------------------------------------------------------------------------------------------


def test_a_container_of_ones_own_has_only_the_file(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(
        json.dumps({"current_host": "algo-2", "hosts": ["algo-2", "algo-1"], "network_interface_name": "x"})
    )
    found = sagemaker.find({"TRAINING_JOB_NAME": "t"}, file=file)
    assert found is not None
    assert (found.rank, found.size, found.main, found.job) == (1, 2, "algo-1", "t")
    assert str(file) in found.evidence


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["algo-1", "algo-2", ""]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["current_host", "hosts"]), inner),
        max_leaves=6,
    ),
    st.integers(min_value=0, max_value=40),
)
def test_any_resource_config_is_a_place_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, content: object, cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "resourceconfig.json"
    text = json.dumps(content)
    file.write_text(text[: max(0, len(text) - cut)])
    try:
        found = sagemaker.find({}, file=file)
    except ConfigError as error:
        one_line(error)
    else:
        assert found is not None
        assert found.rank < found.size


# --- several ----------------------------------------------------------------------------------------------------------


def test_of_several_launchers_the_innermost_counts_and_the_outer_ones_complete_it() -> None:
    both = {**multi_node(), **torch(GROUP_RANK="2", WORLD_SIZE="16", TORCHELASTIC_RUN_ID="none")}
    assert [found.source for found in find_places(both)] == ["torchrun", "AWS Batch"]
    found = place(both)
    assert (found.source, found.local_size, found.job) == ("torchrun", 4, "f0ab")
    assert found.main_counts, "the exit code of the main node is the job's, whoever started the process in it"


def test_mpirun_inside_of_a_job_asks_the_job_where_rank_0_is() -> None:
    inside = {**without(mpi(), "MASTER_ADDR"), **step()}
    assert (place(inside).main, place(inside).attempt, place(inside).source) == ("n4", 1, "Open MPI")


@pytest.mark.parametrize("make", [torch, multi_node, indexed, step, training, mpi])
@given(data=st.data())
def test_any_loss_or_change_of_variables_is_a_place_that_can_be_or_one_clear_line(
    make: Callable[[], dict[str, str]], data: st.DataObject
) -> None:
    variables = make()
    for name in list(variables):
        fate = data.draw(st.sampled_from(["kept", "kept", "lost", "changed"]))
        if fate == "lost":
            del variables[name]
        elif fate == "changed":
            variables[name] = data.draw(st.sampled_from(["", "0", "1", "7", "-1", "x", "²", "9" * 30, "[1]", "null"]))
    try:
        found = find_place(variables)
    except ConfigError as error:
        one_line(error)
    else:
        assert found is None or (0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size)
        assert found is None or found.main


def test_the_ranks_of_a_smaller_job_are_renumbered_and_the_store_stays_where_it_is() -> None:
    told = torchrun.renumber(torch(), rank=0, size=2, main="10.0.0.2")
    assert told == {
        "GROUP_RANK": "0",
        "RANK": "1",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "HEALTHD_MAIN": "10.0.0.2",
    }
