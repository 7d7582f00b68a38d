"""
Collectives through hooks that execute: on four hosts with addresses of their own, and no daemon anywhere.

Each time: all start or none does, the right name and no other, and no process of ours is left on any host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.aggregator.service import until
from tests.netns.hooks import Ended, Hook, Hooks, marks

pytestmark = marks

NODES = ["n0", "n1", "n2", "n3"]


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hooks]:
    try:
        made = Hooks(tmp_path_factory.mktemp("hooks"), len(NODES), join="15s", silent="15s")
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
    finally:
        made.close()


def ended(hooks: Hooks, started: Sequence[Hook]) -> list[Ended]:
    """What all came to; each has left nothing behind on its host."""
    found = [hook.ended() for hook in started]
    hooks.nothing_left()
    return found


def in_the_middle(hooks: Hooks, group: str) -> None:
    """Returns once the ranks of a group are up, and are about to find each other or have done so."""

    def up() -> bool:
        text = hooks.waiting(group)
        return "collectives over" in text and (" ready" in text or " at " in text)

    until(up, 40, lambda: hooks.waiting(group))


def test_sound_hosts_run_one_group_together_and_all_start(hooks: Hooks) -> None:
    started = hooks.start_all("sound")
    said = ended(hooks, started)
    assert [one.code for one in said] == [0] * 4, said
    assert [one.hosts for one in said] == [NODES] * 4
    (validation,) = hooks.validations("sound")
    assert [(one["members"], one["outcome"]) for one in validation["history"]] == [(NODES, "pass")]
    for one in said:
        assert "holding: collectives over 4 nodes, all together: " in one.err, "who waits is told what runs"
        assert "refuses" not in one.err, "that nobody wants its executor after the answer is no complaint"


def test_host_with_wrong_values_is_named_and_the_others_start_renumbered_without_it(hooks: Hooks) -> None:
    said = ended(hooks, hooks.start_all("less", "--min-nodes", "3", faults={2: "all_reduce@rank:2=corrupt"}))
    assert [one.code for one in said] == [0, 0, 75, 0], said
    assert [said[rank].hosts for rank in (0, 1, 3)] == [["n0", "n1", "n3"]] * 3
    assert said[2].hosts == [], "who must not start is given no hosts"
    assert "rank 2 on n2 is left out; the others start without it: n2 fails in collectives" in said[2].err
    reasons = [reason for one in hooks.gate("less")["excluded"] for reason in one["reasons"]]
    assert [(one["node"], one["code"], one["injected"]) for one in reasons] == [("n2", "CollectiveFault", True)]


@pytest.mark.nightly
def test_where_all_are_needed_none_starts_and_every_hook_names_the_host_at_fault(hooks: Hooks) -> None:
    said = ended(hooks, hooks.start_all("strict", faults={1: "all_reduce@rank:1=corrupt"}))
    assert [one.code for one in said] == [75] * 4, said
    for one in said:
        assert "CollectiveFault n1 fails in collectives" in " ".join(one.out.split()), one
        assert one.hosts == []
    assert len(hooks.validations("strict")[-1]["history"]) > 1, "it was searched for"


@pytest.mark.nightly
def test_hook_killed_in_the_middle_is_named_in_time_and_leaves_no_rank(hooks: Hooks) -> None:
    started = hooks.start_all("killed")
    in_the_middle(hooks, "killed")
    started[1].kill()
    until(lambda: not hooks.hosts["n1"].pids(), 3, lambda: "its ranks outlived it")
    rest = [started[rank] for rank in (0, 2, 3)]
    # A silent member is borne for 8 s, and its rank is waited for for 15 s.
    said = [hook.ended(45) for hook in rest]
    hooks.nothing_left()
    assert [one.code for one in said] == [75] * 3, said
    for one in said:
        text = " ".join(one.out.split())
        assert "3 of 4 members have joined; missing within 15 s: rank 1 (its hook on n1 stopped polling)" in text, one
    decision = hooks.gate("killed")
    assert not [reason for reason in decision["reasons"] if reason["blame"] == "node"], "undecided"


@pytest.mark.nightly
def test_others_start_without_a_killed_hook_where_they_are_enough(hooks: Hooks) -> None:
    started = hooks.start_all("enough", "--min-nodes", "3")
    in_the_middle(hooks, "enough")
    started[3].kill()
    said = [hook.ended(60) for hook in started[:3]]
    hooks.nothing_left()
    assert [one.code for one in said] == [0] * 3, (said, hooks.explain("enough"))
    assert [one.hosts for one in said] == [["n0", "n1", "n2"]] * 3
    last = hooks.validations("enough")[-1]
    assert [(one["members"], one["outcome"]) for one in last["history"]] == [(["n0", "n1", "n2"], "pass")]


@pytest.mark.nightly
def test_group_with_a_late_and_a_replaced_hook_runs_anew_and_starts_together(hooks: Hooks) -> None:
    started = {rank: hooks.start(rank, group="late", size=4) for rank in (0, 1, 3)}
    until(lambda: "missing: rank 2" in hooks.waiting("late"), 20, lambda: hooks.waiting("late"))
    started[2] = hooks.start(2, group="late", size=4)
    in_the_middle(hooks, "late")
    started[1].kill()
    started[1] = hooks.start(1, group="late", size=4)
    said = ended(hooks, [started[rank] for rank in range(4)])
    assert [one.code for one in said] == [0] * 4, (said, hooks.explain("late"))
    assert [one.hosts for one in said] == [NODES] * 4
    last = hooks.validations("late")[-1]
    assert [(one["members"], one["outcome"]) for one in last["history"]] == [(NODES, "pass")]
