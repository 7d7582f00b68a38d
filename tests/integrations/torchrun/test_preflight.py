"""Preflights of nodes that know who they are by the variables of this launcher alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hooks.hook_answers_kit import serving
from tests.hooks.preflight_kit import Job
from tests.hooks.preflight_launch_kit import BAD
from tests.hooks.preflight_stopped_kit import main_node
from tests.hooks.two_nodes_kit import HERE, PASSIVE, two_nodes_start_together


def torchrun(rank: int) -> dict[str, str]:
    told = {"TORCHELASTIC_RUN_ID": "r", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    return {**told, "GROUP_RANK": str(rank), "MASTER_ADDR": HERE}


def test_two_nodes_start_together_by_the_launchers_word_alone(tmp_path: Path) -> None:
    two_nodes_start_together(tmp_path, torchrun)


def processes(job: Job, *, node: int, local: int, nodes: int = 2, each: int = 2) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(each),
        "RANK": str(node * each + local),
        "WORLD_SIZE": str(nodes * each),
        "MASTER_ADDR": "127.0.0.1",
        "HEALTHD_PREFLIGHT_PORT": str(job.port),
    }


@pytest.mark.thorough
def test_under_torchrun_one_process_a_node_probes_and_the_ranks_of_the_rest_are_renumbered(tmp_path: Path) -> None:
    with Job(tmp_path, size=2) as job:
        for node in (0, 1):
            for local in (0, 1):
                env = processes(job, node=node, local=local)
                options = (*(BAD if node == 0 else PASSIVE), "--min-nodes", "1")
                job.start(local, *options, env=env, place=(), key=2 * node + local)
        ended = [job.end(key) for key in range(4)]
        assert [one.code for one in ended] == [0, 0, 0, 0], ended[0].err
        assert [one.out for one in ended[:2]] == ["", ""]
        assert "torchrun 0 2 0 0" in ended[2].out
        assert "torchrun 1 2 0 1" in ended[3].out
        job.nothing_left()


@pytest.mark.thorough
def test_another_process_of_a_node_that_cannot_start_keeps_all_from_starting_too(tmp_path: Path) -> None:
    """Its node is confirmed by another one, that of local rank 0."""
    with Job(tmp_path, size=2) as job, serving(main_node(go=None)) as main:
        (job.temporary / f"healthd-hosts-{os.geteuid()}").touch()
        env = {**processes(job, node=1, local=1), "HEALTHD_PREFLIGHT_PORT": main.url.rpartition(":")[2]}
        job.start(1, *PASSIVE, place=(), env=env)
        ended = job.end(1)
        assert (ended.code, "the host file cannot be written" in ended.err) == (2, True), ended.err
        job.nothing_left()
    assert any(b'"withdraw"' in body and b'"rank-1"' in body for body in main.bodies)
