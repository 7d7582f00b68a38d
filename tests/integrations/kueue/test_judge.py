"""What is written into a check, and when: the traps of the recordings and of Kueue's issues, by number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from healthd.core.evidence import reason
from healthd.core.model import AdmittedNode, Decision, GateRequest, Verdict
from healthd.integrations.kueue.judge import (
    READY_SECONDS,
    TAKEN_BACK_SECONDS,
    Known,
    Refusal,
    Step,
    attempt_of,
    judge,
)
from healthd.integrations.kueue.workloads import (
    AdmissionCheck,
    Flavor,
    Terms,
    Workload,
    parse_admission_check,
    parse_flavor,
    parse_workload,
)
from tests.integrations.kueue import player

NOW = 1_800_000_000.0
CHECK = AdmissionCheck(name="healthd", generation=1, terms=Terms())
FLAVOR = Flavor(name="trn", labels={"type": "trn2"}, pool="a")
KNOWN = Known(flavors={"trn": FLAVOR}, ours=frozenset({"healthd"}), cluster="c")
PLACES = {"n1": {"type": "trn2"}, "n2": {"type": "trn2"}}


def made(*moves: str, at: float = NOW, **more: Any) -> dict[str, Any]:
    """A Workload after some moves of Kueue."""
    found = player.workload("train", "u1", **more)
    for move in moves:
        found = player.moves(found, at, quota=True)[move]
    return found


WAITS = ("begin checks", "reserve", "see checks")


def read(found: dict[str, Any], **state: Any) -> Workload:
    """As the controller reads it, with more in the state of its check."""
    player.check_of(found).update(state)
    return parse_workload(found)


def decision(verdict: Verdict, *, retryable: bool = True, would: Verdict | None = None) -> Decision:
    told = () if verdict is Verdict.ADMIT else (reason("NotYetRun", "n1 is bad"),)
    nodes = tuple(AdmittedNode(node=name, evidence_age_seconds=1.0) for name in PLACES)
    return Decision(
        id="g-1",
        decision=verdict,
        reasons=told,
        nodes=nodes if verdict is Verdict.ADMIT else (),
        excluded=(),
        policy={},
        retryable=retryable,
        decided_at=NOW,
        duration_seconds=1.0,
        would=would,
    )


def judged(workload: Workload, check: AdmissionCheck = CHECK, now: float = NOW + 1, **known: Any) -> Step:
    return judge(workload, check, dataclasses.replace(KNOWN, **known), now)


def wrote(step: Step) -> tuple[str, str]:
    assert step.write is not None, step
    return step.write.state, step.write.message


# --- what is asked ------------------------------------------------------------------------------------------------


def test_a_workload_with_quota_is_asked_for_with_its_pods_in_the_pool_of_its_flavor() -> None:
    workload = read(made(*WAITS))
    step = judged(workload)
    assert step.write is None
    assert step.ask == GateRequest(
        job="default/train",
        attempt=attempt_of(workload, workload.checks[0]),
        pool="a",
        count=2,
        lease_seconds=30 * 86400.0,
        workload="kueue:c/default/train/u1",
    )
    several = dataclasses.replace(CHECK, terms=Terms(pods_per_node=8))
    asked = judged(read(made(*WAITS, count=17)), several).ask
    assert asked is not None
    assert asked.count == 3


def test_nothing_is_asked_or_written_without_quota_nor_after_the_end() -> None:
    """Recording two-jobs-one-quota: what is written then is kept, and used an hour later."""
    without = player.moves(made("begin checks"), NOW, quota=False)["no quota"]
    over = made(*WAITS)
    player.finished(over, NOW)
    for found in (made("begin checks"), made("reserve"), without, over):
        assert judged(read(found)) == Step()


def test_nothing_is_written_while_evicted_3543_3322() -> None:
    """Recording written-while-evicted: kept through the requeue. A lease stays until the quota is given back."""
    for admitted in (False, True):
        found = made(*WAITS)
        if admitted:
            player.check_of(found)["state"] = "Ready"
            found = player.moves(found, NOW, quota=True)["admit"]
        player.evict(found, "Preempted", NOW)
        answer = decision(Verdict.ADMIT)
        assert judged(read(found), answer=answer, labels=PLACES) == Step(keep_all=admitted)
        found = player.moves(found, NOW, quota=True)["give quota back"]
        assert judged(read(found), answer=answer, labels=PLACES) == Step()


def test_checks_that_run_before_a_flavor_is_assigned_ask_nothing_9359() -> None:
    found = made(*WAITS)
    found["status"]["admission"]["podSetAssignments"][0].pop("flavors")
    assert wrote(judged(read(found))) == ("Pending", "asked once flavors and topology are assigned")
    found = made(*WAITS)
    found["status"]["admission"]["podSetAssignments"][0]["delayedTopologyRequest"] = "Pending"
    assert wrote(judged(read(found))) == ("Pending", "asked once flavors and topology are assigned")


def test_the_gate_is_asked_last() -> None:
    found = made(*WAITS)
    found["status"]["admissionChecks"].append({**player.check_of(found), "name": "capacity"})
    assert wrote(judged(read(found))) == ("Pending", "asked once the other checks are Ready: capacity")
    found["status"]["admissionChecks"][1]["state"] = "Ready"
    assert judged(read(found)).ask is not None


def test_one_of_two_checks_of_ours_gates_and_the_other_says_so() -> None:
    found = made(*WAITS)
    found["status"]["admissionChecks"].append({**player.check_of(found), "name": "another"})
    both = frozenset({"healthd", "another"})
    other = dataclasses.replace(CHECK, name="another")
    assert judged(read(found), other, ours=both).ask is not None
    assert "check another already gates this Workload" in wrote(judged(read(found), ours=both))[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flavors": {}}, "ResourceFlavor trn does not exist"),
        ({"flavors": {"trn": dataclasses.replace(FLAVOR, pool=None)}}, "annotate ResourceFlavor trn with healthd"),
    ],
)
def test_what_the_cluster_lacks_is_named_and_gives_the_quota_back(change: dict[str, Any], message: str) -> None:
    step = judged(read(made(*WAITS)), **change)
    state, told = wrote(step)
    assert (state, message in told) == ("Retry", True), told
    assert step.write is not None
    assert step.write.requeue_after_seconds == 5


def test_a_workload_whose_pods_have_all_succeeded_is_ready_at_once() -> None:
    """Evicted between the last pod's end and the Job's: Kueue counts the pods that are still to run."""
    found = made(*WAITS)
    found["status"]["admission"]["podSetAssignments"][0]["count"] = 0
    step = judged(read(found))
    assert wrote(step) == ("Ready", "all of its pods have succeeded: there is nothing to check")
    assert step.ask is None
    for flavors in ({}, {"trn": dataclasses.replace(FLAVOR, pool=None)}):
        assert wrote(judged(read(found), flavors=flavors))[0] == "Ready"
    player.check_of(found)["state"] = "Ready"
    assert judged(read(found), now=NOW + READY_SECONDS) == Step(), "it is not taken back"
    found = made(*WAITS)
    found["spec"]["podSets"].append({**found["spec"]["podSets"][0], "name": "launcher", "count": 1})
    assigned = found["status"]["admission"]["podSetAssignments"]
    assigned[0]["count"] = 0
    assigned.append({"name": "launcher", "count": 1, "flavors": {"cpu": "plain"}})
    plain = Flavor(name="plain", labels={}, pool=None)
    assert wrote(judged(read(found), flavors={"trn": FLAVOR, "plain": plain}))[0] == "Ready"
    assert judged(read(found), flavors={"trn": FLAVOR, "plain": FLAVOR}).ask is not None


def test_several_flavors_are_one_pool_or_none() -> None:
    found = made(*WAITS)
    found["spec"]["podSets"].append({**found["spec"]["podSets"][0], "name": "launcher", "count": 1})
    assigned = found["status"]["admission"]["podSetAssignments"]
    assigned.append({"name": "launcher", "count": 1, "flavors": {"cpu": "plain"}})
    plain = Flavor(name="plain", labels={}, pool=None)
    asked = judged(read(found), flavors={"trn": FLAVOR, "plain": plain}).ask
    assert asked is not None
    assert asked.count == 2, "pods of a flavor without a pool are not gated"
    other = dataclasses.replace(plain, pool="b")
    told = wrote(judged(read(found), flavors={"trn": FLAVOR, "plain": other}))
    assert told == ("Retry", "its pods are in the pools a, b, but a gate takes nodes of one pool")


# --- what the answers come to ---------------------------------------------------------------------------------------


def test_admit_labels_the_nodes_first_and_then_binds_the_pods_to_them() -> None:
    workload, answer = read(made(*WAITS)), decision(Verdict.ADMIT)
    before = judged(workload, answer=answer)
    assert (before.write, before.keep) == (None, "g-1")
    step = judged(workload, answer=answer, labels=PLACES)
    assert step.binding is not None
    assert step.binding.nodes == ("n1", "n2")
    assert wrote(step) == ("Ready", "gate g-1 admits 2 nodes: n1, n2")
    assert step.write is not None
    assert (step.write.bind, step.write.pod_sets, step.write.gate) == (True, ("main",), "g-1")


def test_what_a_gate_admits_in_any_case_binds_no_pods_and_keeps_no_nodes() -> None:
    """Observe mode and overrides: a node may be bad, and Kueue's choice is not made worse."""
    step = judged(read(made(*WAITS)), answer=decision(Verdict.ADMIT, would=Verdict.REJECT))
    assert step.binding is None
    assert step.write is not None
    assert not step.write.bind
    assert "enforce mode would decide reject" in step.write.message


def test_hold_says_what_it_waits_for_and_keeps_its_gate() -> None:
    step = judged(read(made(*WAITS)), answer=decision(Verdict.HOLD))
    assert wrote(step) == ("Pending", "gate g-1: n1 is bad")
    assert step.write is not None
    assert (step.keep, step.write.since) == ("g-1", NOW), "a sentence is no transition"


def test_reject_is_retry_and_rejected_where_it_is_impossible_alone() -> None:
    step = judged(read(made(*WAITS)), answer=decision(Verdict.REJECT))
    assert wrote(step) == ("Retry", "gate g-1: n1 is bad")
    assert step.write is not None
    assert step.write.requeue_after_seconds == 5
    never = decision(Verdict.REJECT, retryable=False)
    assert wrote(judged(read(made(*WAITS)), answer=never))[0] == "Rejected"
    growing = dataclasses.replace(CHECK, terms=Terms(impossible="retry"))
    assert wrote(judged(read(made(*WAITS)), growing, answer=never))[0] == "Retry"


@pytest.mark.parametrize("place", ["selector", "annotation", "flavor", "check"])
def test_a_key_that_the_job_has_already_is_named_before_kueue_would_fail_it(place: str) -> None:
    """Recording conflicting-updates: the Workload is Finished, FailedToStart."""
    found = made(*WAITS, selector={"healthd.internal/gate": "mine"} if place == "selector" else None)
    flavor = dataclasses.replace(FLAVOR, labels={"healthd.internal/gate": "x"}) if place == "flavor" else FLAVOR
    if place == "annotation":
        found["spec"]["podSets"][0]["template"]["metadata"]["annotations"] = {"healthd.internal/gate": "mine"}
    if place == "check":
        update = {"name": "main", "nodeSelector": {"healthd.internal/gate": "x"}}
        other = {**player.check_of(found), "name": "other", "state": "Ready", "podSetUpdates": [update]}
        found["status"]["admissionChecks"].append(other)
    step = judged(read(found), flavors={"trn": flavor})
    assert wrote(step)[0] == "Rejected"
    assert "remove" in wrote(step)[1]
    assert step.ask is None


def test_nodes_on_which_the_pods_could_not_run_are_no_admission() -> None:
    answer = decision(Verdict.ADMIT)
    for labels, message in (
        ({"n1": PLACES["n1"]}, "n2, which this cluster does not have"),
        ({**PLACES, "n2": {"type": "p5"}}, "n2, which lacks the label type=trn2 required by pod set main"),
    ):
        step = judged(read(made(*WAITS)), answer=answer, labels=labels)
        assert wrote(step)[0] == "Retry"
        assert message in wrote(step)[1]
        assert step.binding is None
    found = made(*WAITS, selector={"zone": "b"})
    assert "lacks the label zone=b" in wrote(judged(read(found), answer=answer, labels=PLACES))[1]


def test_an_admission_of_other_nodes_than_were_asked_for_is_none() -> None:
    few = dataclasses.replace(decision(Verdict.ADMIT), nodes=decision(Verdict.ADMIT).nodes[:1])
    assert "lists 1 nodes although 2 were requested" in wrote(judged(read(made(*WAITS)), answer=few, labels=PLACES))[1]


def test_an_answer_that_is_old_or_over_is_asked_anew_by_another_attempt() -> None:
    found = made(*WAITS)
    workload = read(found)
    first = attempt_of(workload, workload.checks[0])
    refused = Refusal(message="its lease has ended", again=True)
    for known in ({"answer": decision(Verdict.ADMIT), "age_seconds": READY_SECONDS}, {"answer": refused}):
        step = judged(workload, **known)
        assert wrote(step)[0] == "Pending"
        assert step.write is not None
        later = read(made(*WAITS), lastTransitionTime=player.stamp(step.write.since))
        assert attempt_of(later, later.checks[0]) > first
    usage = Refusal(message="count must be less", again=False)
    assert wrote(judged(workload, answer=usage)) == ("Retry", "count must be less")


def test_two_reservations_of_one_second_are_two_attempts() -> None:
    found = made(*WAITS)
    before = read(found)
    player.preempted(found, NOW)
    after = player.moves(player.moves(found, NOW, quota=True)["give quota back"], NOW, quota=True)["reserve"]
    again = read(after)
    assert again.reserved_at == before.reserved_at
    assert attempt_of(again, again.checks[0]) != attempt_of(before, before.checks[0])


# --- after Ready --------------------------------------------------------------------------------------------------


def ready(*, admitted: bool, bound: bool = True, attempt: int | None = None, **more: Any) -> dict[str, Any]:
    found = made(*WAITS, **more)
    workload = parse_workload(found)
    number = attempt_of(workload, workload.checks[0]) if attempt is None else attempt
    update = {
        "name": "main",
        "annotations": {"healthd.internal/gate": "g-1", "healthd.internal/gate-attempt": f"{number}"},
    }
    selector = {"nodeSelector": {"healthd.internal/gate": "g-1"}} if bound else {}
    player.check_of(found).update(state="Ready", podSetUpdates=[{**update, **selector}])
    return player.moves(found, NOW, quota=True)["admit"] if admitted else found


def test_a_ready_that_kueue_does_not_use_within_a_minute_is_taken_back() -> None:
    found = ready(admitted=False)
    (check,) = read(found).checks
    later = check.since + READY_SECONDS - 1
    assert judged(read(found), now=later) == Step(keep="g-1", due=later + 1)
    state, message = wrote(judged(read(found), now=NOW + READY_SECONDS))
    assert (state, "taken back: Kueue did not admit in 60 s" in message) == ("Pending", True)
    assert judged(read(ready(admitted=True)), now=NOW + 9999) == Step(keep="g-1")


def test_a_ready_is_taken_back_when_a_node_turns_bad_before_kueue_admits() -> None:
    """Kueue may be away, and admit by it when it is back; at once it is not, since Kueue is about to act."""
    found, unfit = ready(admitted=False), {"n2": "link is down"}
    (check,) = read(found).checks
    assert judged(read(found), now=check.since, unfit=unfit).write is None
    step = judged(read(found), now=check.since + TAKEN_BACK_SECONDS, unfit=unfit)
    assert (wrote(step)[0], "node n2: link is down" in wrote(step)[1], step.keep) == ("Pending", True, None)
    assert judged(read(ready(admitted=False, bound=False)), now=check.since + 3, unfit=unfit).write is None, (
        "observe mode"
    )


def test_a_ready_of_another_reservation_or_of_somebody_else_is_taken_back() -> None:
    for found in (ready(admitted=False, attempt=7), made(*WAITS)):
        workload = read(found, state="Ready")
        assert "another quota reservation" in wrote(judged(workload))[1]


def test_a_node_that_turns_bad_is_marked_by_a_gate_first_and_then_said_by_retry_where_the_check_says_so() -> None:
    """Recording node-not-ready-after-admission: Kueue does nothing by itself."""
    unfit = {"n2": "link is down"}
    acting = dataclasses.replace(CHECK, terms=Terms(after_admission="retry"))
    running = read(ready(admitted=True))
    assert judged(running, unfit=unfit) == Step(keep="g-1")
    asks = judged(running, acting, unfit=unfit)
    assert asks.ask is not None
    assert (asks.ask.job, asks.ask.nodes, asks.keep) == ("default/train/turned-bad", ("n2",), "g-1")
    assert judged(running, acting, unfit=unfit, answer=decision(Verdict.HOLD)) == asks, "until the mark stands"
    step = judged(running, acting, unfit=unfit, answer=decision(Verdict.REJECT))
    assert wrote(step) == ("Retry", "a node turned bad after the admission: node n2: link is down")
    assert step.write is not None
    assert (step.keep, step.write.requeue_after_seconds) == ("g-1", 1), "its pods run until they are evicted"
    observed = judged(running, acting, unfit=unfit, answer=decision(Verdict.ADMIT, would=Verdict.REJECT))
    assert (observed.write, observed.keep) == (None, "g-1")
    others = judged(running, acting, unfit=unfit, answer=Refusal(message="other nodes", again=True))
    assert (others.write, others.keep) == (None, "g-1"), "the gate of the next minute asks for all that are bad by then"


def test_while_kueue_replaces_a_node_itself_nothing_is_written_10660() -> None:
    acting = dataclasses.replace(CHECK, terms=Terms(after_admission="retry"))
    found = ready(admitted=True)
    found["status"]["unhealthyNodes"] = [{"name": "n2"}]
    assert judged(read(found), acting, unfit={"n2": "down"}) == Step(keep="g-1")


def test_a_state_that_kueue_is_about_to_act_on_is_left_alone() -> None:
    for state in ("Retry", "Rejected"):
        assert judged(read(made(*WAITS), state=state), answer=decision(Verdict.ADMIT)) == Step()
        assert judged(read(ready(admitted=True), state=state)) == Step(keep_all=True)


# --- topology-aware scheduling ------------------------------------------------------------------------------------


def placed(*slices: dict[str, Any], levels: tuple[str, ...] = ("kubernetes.io/hostname",)) -> dict[str, Any]:
    found = made(*WAITS)
    assigned = found["status"]["admission"]["podSetAssignments"][0]
    assigned["topologyAssignment"] = {"levels": list(levels), "slices": list(slices)}
    return found


def test_nodes_that_kueue_chose_are_asked_for_by_name_and_need_no_label_9616() -> None:
    """A node that is tainted between the assignment and the ungating is named by the gate, which is asked for it."""
    value = {"individual": {"prefix": "n", "roots": ["1", "2"]}}
    found = placed({"domainCount": 2, "valuesPerLevel": [value], "podCounts": {"universal": 1}})
    step = judged(read(found))
    assert step.ask is not None
    assert (step.ask.nodes, step.ask.pool, step.ask.count) == (("n1", "n2"), None, None)
    after = judged(read(found), answer=decision(Verdict.ADMIT))
    assert after.binding is None
    assert after.write is not None
    assert (after.write.state, after.write.bind, after.keep) == ("Ready", False, "g-1")
    assert wrote(judged(read(found), answer=decision(Verdict.REJECT)))[0] == "Retry"


@pytest.mark.parametrize(
    ("slices", "levels", "message"),
    [
        ([], ("rack",), "ends above kubernetes.io/hostname"),
        ([], ("kubernetes.io/hostname",), "lists no node"),
        (
            [{"domainCount": 3, "valuesPerLevel": [{"individual": {"roots": ["1"]}}]}],
            ("kubernetes.io/hostname",),
            "cannot be read",
        ),
        ([{"domainCount": 1, "valuesPerLevel": []}], ("kubernetes.io/hostname",), "cannot be read"),
    ],
)
def test_a_topology_that_names_no_nodes_is_no_admission(
    slices: list[dict[str, Any]], levels: tuple[str, ...], message: str
) -> None:
    step = judged(read(placed(*slices, levels=levels)))
    assert (wrote(step)[0], message in wrote(step)[1]) == ("Retry", True), step
    assert step.ask is None


# --- what objects say -----------------------------------------------------------------------------------------------


def test_terms_are_annotations_and_a_wrong_one_is_named() -> None:
    def check(**annotations: str) -> AdmissionCheck:
        named = {f"healthd.internal/{key.replace('_', '-')}": text for key, text in annotations.items()}
        return parse_admission_check({"metadata": {"name": "healthd", "annotations": named}})

    found = check(tier="deep", max_age="10m", wait="5m", pods_per_node="8", after_admission="retry", impossible="retry")
    assert found.problem == ""
    assert (found.terms.max_age_seconds, found.terms.wait_seconds, found.terms.pods_per_node) == (600.0, 300.0, 8)
    for key, text in (
        ("tier", "x"),
        ("wait", "soon"),
        ("pods_per_node", "0"),
        ("after_admission", "kill"),
        ("teir", "quick"),
    ):
        assert f"annotation healthd.internal/{key.replace('_', '-')}" in check(**{key: text}).problem
    bad = check(tier="x")
    assert "x" in wrote(judged(read(made(*WAITS)), bad))[1], "an unreadable term asks nothing"


def test_objects_of_another_form_are_never_taken_for_good_ones() -> None:
    for found in ({}, {"status": []}, {"metadata": {"name": 7}, "status": {"conditions": [{"type": "QuotaReserved"}]}}):
        assert judged(parse_workload(found)) == Step()
    broken = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "soon"}
    assert parse_workload({"status": {"conditions": [broken]}}).reserved_at is None
    assert parse_flavor({"metadata": {"name": "x"}, "spec": {"nodeLabels": {"a": 1}}}).labels == {}
