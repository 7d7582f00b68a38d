"""Launches of a round of nccom-test over three nodes, planned and hostile, for tests of the places that judge them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from checks.collective.nccom.vector import Accepted, Refused
from healthd.core.model import CollectiveOrder, Launch, NccomGroup
from tests.checks.test_nccom_launch import JOB, vector
from tests.patience import PATIENCE

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
NODES = ("n1", "n2", "n3")
CHECK = "nccom_nodes_all_reduce"


def order(first_rank: int = 0, **changes: Any) -> CollectiveOrder:
    values: dict[str, Any] = {
        "validation": "g-1:c0",
        "group": "g-1:c0.0",
        "checks": (CHECK,),
        "first_rank": first_rank,
        "ranks": 2,
        "size": 6,
        "whole_rank": first_rank,
        "main": ADDRESSES[0],
        "port": 29500,
        "seed": 1,
        "join_seconds": 10.0,
        "timeout_seconds": 10.0,
        "nccom": NccomGroup(mode="carried", hosts=ADDRESSES, nodes=NODES),
    }
    return CollectiveOrder(**{**values, **changes})


def launch(name: str = "n2", check: str = CHECK, **changes: str | None) -> Launch:
    words = vector(ADDRESSES[NODES.index(name)], **{"ess_base_vpid": str(NODES.index(name)), **changes})
    return Launch(check=check, node=name, argv=tuple(words))


def with_program(program: str) -> Launch:
    words = launch().argv
    return Launch(check=CHECK, node="n2", argv=(words[0], program, *words[2:]))


# What somebody might try who has the main node, or the line to it: what it is, and a word of the refusal.
HOSTILE = {
    "another program": (with_program("/bin/sh"), "no daemon of Open MPI"),
    "a program before it": (with_program("id ; orted"), "command of the shell"),
    "a shell around it": (with_program("sh -c orted"), "no daemon of Open MPI"),
    "a substitution": (launch(pmix='"$(id)"'), "parameter pmix"),
    "a pipe": (launch(routed='"radix" | id'), "not expected"),
    "another agent to start with": (launch(orte_launch_agent='"/bin/sh"'), "not accepted"),
    "a library of its own": (launch(mca_base_component_path='"/tmp/evil"'), "not accepted"),
    "another host to call back": (launch(orte_hnp_uri=f'"{JOB}.0;tcp://10.9.9.9:1"'), "not the main node"),
    "daemons of its own": (launch(plm_rsh_no_tree_spawn=None), "start others"),
    "another node's host": (dataclasses.replace(launch(), node="n3"), "meant for"),
    "the main node": (Launch(check=CHECK, node="n1", argv=tuple(vector(ADDRESSES[0]))), "started by another"),
    "a stranger": (Launch(check=CHECK, node="n9", argv=tuple(vector("10.77.0.9"))), "no node of group"),
    "a host of nobody": (Launch(check=CHECK, node="n2", argv=tuple(vector("10.77.0.9"))), "no host of round"),
    "another check": (launch(check="nccom_nodes_all_gather"), "no check of group"),
    "nothing": (Launch(check=CHECK, node="n2", argv=()), "no host and no program"),
}
hostile = pytest.mark.parametrize(("asked", "why"), HOSTILE.values(), ids=list(HOSTILE))


def refusal(found: Accepted | Refused) -> str:
    assert isinstance(found, Refused), found
    return found.reason


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
