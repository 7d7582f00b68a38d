"""What the variables of Kubernetes, JobSet and Kubeflow Trainer mean, and what they cannot mean."""

from __future__ import annotations

from healthd.hooks.launchers import find_place
from healthd.integrations.kubernetes.launcher import find
from tests.every import every
from tests.hooks.launchers_kit import (
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line,
    makes_no_sense,
    place,
    place_of,
    without,
)


def indexed(**changes: str) -> dict[str, str]:
    return {
        "JOB_COMPLETION_INDEX": "1",
        "JOB_COMPLETIONS": "3",
        "HOSTNAME": "train-1",
        "JOB_SUBDOMAIN": "peers",
        **changes,
    }


def test_each_kind_of_job_says_who_we_are() -> None:
    jobset = indexed(JOBSET_NAME="big", JOBSET_RESTART="4")
    trainer = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-node-0-0.t", "JOB_NAME": "t"}
    assert place_of(indexed(), "an Indexed Job of Kubernetes") == (1, 3, "train", 0, "train-0.peers")
    assert place_of(jobset, "a Kubernetes JobSet") == (1, 3, "big", 4, "train-0.peers")
    assert place_of(trainer, "Kubeflow Trainer") == (1, 2, "t", 0, "t-node-0-0.t")


@every(
    ("variables", "said"),
    [
        (without(indexed(), "JOB_COMPLETIONS"), "the number of pods of its Job: use --nnodes N"),
        (indexed(JOB_COMPLETIONS="1"), "rank 1 of 1 nodes"),
        (without(indexed(JOB_SUBDOMAIN=""), "HOSTNAME"), "the address of rank 0: give its pods a headless Service"),
        (indexed(JOBSET_JOB_INDEX="2"), "JOBSET_JOB_COMPLETIONS is not"),
        ({"JOBSET_NAME": "big"}, "needs completionMode: Indexed"),
    ],
)
def test_variables_that_make_no_sense_or_are_half_there_are_one_clear_line(
    variables: dict[str, str], said: str
) -> None:
    makes_no_sense(variables, said)


def test_any_variables_are_a_place_or_one_clear_line() -> None:
    any_loss_or_change_is_a_place_that_can_be_or_one_clear_line(indexed)


def test_a_pod_finds_the_headless_service_in_its_own_full_name() -> None:
    found = find(without(indexed(), "JOB_SUBDOMAIN"), full_name=lambda: "train-1.peers.ml.svc.cluster.local")
    assert found is not None
    assert found.main == "train-0.peers.ml.svc.cluster.local"


def test_kubernetes_sets_all_but_the_number_of_pods() -> None:
    found = find_place({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, size=4, main="train-0.peers")
    assert found is not None
    assert (found.rank, found.size, found.main, found.job) == (1, 4, "train-0.peers", "train")


def test_a_pod_without_a_headless_service_does_not_guess() -> None:
    found = find(without(indexed(), "JOB_SUBDOMAIN"), full_name=lambda: "node-17.ec2.internal")
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


def test_an_indexed_job_tells_no_attempt() -> None:
    assert not place(indexed()).attempt_told
    assert place(indexed(JOBSET_RESTART="0")).attempt_told
