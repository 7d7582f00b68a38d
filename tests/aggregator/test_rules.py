"""Quarantine by rule, the pure part: every threshold has a case that trips it and one that does not."""

from __future__ import annotations

import dataclasses

import pytest

from checks.contract import Action, Blame, Status, Tier
from checks.reasons import REASONS
from healthd.aggregator.policy import Policy
from healthd.aggregator.quarantine.counting import accusation
from healthd.aggregator.quarantine.records import COLLECTIVES, HARD_ACTIONS, Fault, HistoryNote, PoolLimit, RuleRecord
from healthd.core.model import Reason
from tests.aggregator.ruling import DAY, HOUR, MINUTE, POLICY, Case, fault, outcome
from tests.every import every

SLOW, WRONG, LOST = fault("SlowDevice", device="dev:0"), fault("WrongResult", device="dev:0"), fault("DeviceLost")
LOST_0 = fault("DeviceLost", device="dev:0")
ACCUSED = Fault(
    code="CollectiveFault",
    check=COLLECTIVES,
    target="node",
    message="n1 fails in collectives with n2, n3, which pass without it",
    action=Action.INSPECT,
    device=None,
    injected=False,
)


def soft(case: Case | None = None) -> Case:
    """A node that is quarantined for failing too often."""
    case = case or Case()
    for _ in range(3):
        case.result(SLOW)
    assert case.owner == "rule:soft"
    return case


# --- too often ------------------------------------------------------------------------------------------------------


def test_three_of_the_last_five_results_quarantine_and_two_do_not() -> None:
    case = Case()
    for faults in ((SLOW,), (), (SLOW,), ()):
        case.result(*faults)
    assert case.quarantine is None
    case.result(SLOW)
    assert case.quarantine is not None
    assert (case.quarantine.owner, case.quarantine.owner_kind, case.quarantine.until) == ("rule:soft", "rule", None)
    for part in ("matmul", "dev:0", "SlowDevice", "12 GFLOP/s", "3 of its last 5", "3 times since", "10 min"):
        assert part in case.quarantine.reason


def test_failures_outside_the_last_five_results_do_not_count() -> None:
    case = Case()
    for faults in ((SLOW,), (), (), (SLOW,), (), (SLOW,)):
        case.result(*faults)
    assert case.quarantine is None


def test_failures_outside_the_window_do_not_count_and_are_forgotten() -> None:
    case = Case()
    case.result(SLOW)
    case.result(SLOW)
    case.result(SLOW, after=HOUR)
    assert case.quarantine is None
    case.result(after=2 * HOUR)
    assert not case.record.active


def test_a_check_that_runs_seldom_has_a_window_of_as_many_intervals() -> None:
    case = Case()
    for _ in range(3):
        case.now += HOUR
        case.look(dataclasses.replace(outcome(case.now - 1, SLOW), interval_seconds=HOUR))
    assert case.owner == "rule:soft"


def test_one_result_seen_again_is_counted_once_whatever_its_age_is_told_as() -> None:
    case = Case()
    result = outcome(case.now, SLOW)
    for late in (0.0, 1.0, 4.0, -3.0, 0.2):
        case.now += 30
        case.look(dataclasses.replace(result, measured_at=result.measured_at + late))
    assert case.record.counts[0].fails == 1


def test_a_new_run_is_told_by_its_start_or_by_a_much_younger_age() -> None:
    case = Case()
    first = outcome(case.now, SLOW)
    case.look(first)
    case.look(dataclasses.replace(first, measured_at=first.measured_at + 3, started_at=case.now + 3))
    assert case.record.counts[0].fails == 2
    # The ages alone were told; then the state comes with the start of that run.
    case.look(dataclasses.replace(first, measured_at=first.measured_at + 63, started_at=case.now + 3))
    assert case.record.counts[0].fails == 3
    case.look(dataclasses.replace(first, measured_at=first.measured_at + 64, started_at=case.now + 63))
    assert case.record.counts[0].fails == 3


def test_it_ends_only_after_its_cool_down_and_two_passes_in_a_row() -> None:
    case = soft()
    case.result()
    case.result(SLOW)
    case.result()
    case.wait(20 * MINUTE)
    assert case.quarantine is not None
    assert case.quarantine.until is None
    case.result()
    assert case.quarantine is None


def test_the_end_is_told_once_only_time_is_missing() -> None:
    case = soft()
    begun = case.now
    case.result()
    case.result()
    assert case.quarantine is not None
    assert case.quarantine.until == begun + 600.0
    case.wait(590 - (case.now - begun))
    assert case.quarantine is not None
    case.wait(11)
    assert case.quarantine is None
    assert not case.record.counts


def test_a_failure_in_the_cool_down_takes_the_end_back() -> None:
    case = soft()
    for faults in ((), (), (SLOW,)):
        case.result(*faults)
    case.wait(HOUR)
    assert case.quarantine is not None
    assert case.quarantine.until is None


def test_a_result_that_says_nothing_of_the_node_is_no_pass_and_breaks_the_row() -> None:
    case = soft()
    case.wait(HOUR)
    case.result()
    case.now += MINUTE
    case.look(outcome(case.now - 1, known=False))
    case.result()
    assert case.quarantine is not None
    case.result()
    assert case.quarantine is None


def test_the_cool_down_grows_with_repeats_up_to_a_day_and_is_forgotten_after_28_days() -> None:
    case, lengths = Case(), []
    for _ in range(6):
        soft(case)
        word = case.record.word
        assert word is not None
        lengths.append(word.until - word.since)
        case.result()
        case.result()
        case.wait(2 * DAY)
        assert case.quarantine is None
    assert lengths == [600.0, 2400.0, 9600.0, 38400.0, DAY, DAY]
    case.wait(29 * DAY)
    soft(case)
    assert case.record.word is not None
    assert case.record.word.until - case.record.word.since == 600.0


# --- hard -----------------------------------------------------------------------------------------------------------


def test_hard_reasons_are_those_of_the_catalogue_whose_action_says_so() -> None:
    hard = {code for code, reason in REASONS.items() if reason.action in HARD_ACTIONS}
    assert {"WrongResult", "SilentCorruption", "MemoryCorruption", "EccErrors", "DeviceLost", "StuckCores"} <= hard
    assert not hard & {"SlowDevice", "SlowLink", "CollectiveFault", "Busy", "Timeout", "InjectedFault"}


@every("code", sorted(code for code, r in REASONS.items() if r.action in HARD_ACTIONS))
def test_a_hard_fault_latches_at_once_on_the_serial_number(code: str) -> None:
    case = Case()
    case.result(fault(code, device="dev:0"))
    assert case.owner == "rule:hard"
    assert case.quarantine is not None
    assert case.quarantine.until is None
    assert "serial:S0" in case.quarantine.reason
    for _ in range(5):
        case.result(after=DAY)
    assert case.owner == "rule:hard"


@pytest.mark.parametrize(
    ("device", "serials", "identity", "latched"),
    [
        ("dev:1", {"dev:0": "S0", "dev:1": "S1"}, "instance:i-1", "serial:S1"),
        ("dev:1", {"dev:1": None}, "instance:i-1", "instance:i-1"),
        (None, {"dev:0": "S0"}, "instance:i-1", "instance:i-1"),
        (None, {}, "node:n1", "node:n1"),
    ],
)
def test_without_a_serial_number_it_is_the_machine_that_is_latched(
    device: str | None, serials: dict[str, str | None], identity: str, latched: str
) -> None:
    case = Case(serials=serials, identity=identity)
    case.result(fault("WrongResult", device=device))
    assert [key for key, one in case.latches.items() if one] == [latched]


def test_only_a_person_releases_it_and_the_same_result_does_not_latch_again() -> None:
    case = Case()
    case.result(WRONG)
    case.boot_id = "b2"
    case.result(after=HOUR)
    assert case.owner == "rule:hard"
    case.result(WRONG)
    case.release()
    case.wait(MINUTE)
    assert case.quarantine is None
    case.result(WRONG)
    assert case.owner == "rule:hard"


@pytest.mark.parametrize("lost", [LOST, LOST_0, fault("MissingDevice", device="dev:0")])
def test_a_new_boot_clears_what_a_reset_or_reboot_mends_after_a_fresh_pass(lost: Fault) -> None:
    case = Case()
    case.result(lost)
    for _ in range(3):
        case.result(after=HOUR)
    assert case.owner == "rule:hard", "passes in the same boot prove nothing"
    case.boot_id = "b2"
    case.look()
    assert case.owner == "rule:hard", "a boot alone proves nothing"
    case.result()
    assert case.quarantine is None


def test_a_new_boot_alone_or_a_lighter_tier_or_an_unknown_boot_clears_nothing() -> None:
    case = Case()
    case.now += MINUTE
    case.look(outcome(case.now - 1, LOST_0, tier=Tier.DEEP))
    case.boot_id = None
    case.result(after=HOUR)
    assert case.owner == "rule:hard"
    case.boot_id = "b2"
    case.look()
    case.result()
    assert case.owner == "rule:hard"
    case.now += MINUTE
    case.look(outcome(case.now - 1, tier=Tier.DEEP))
    assert case.quarantine is None


def test_a_fault_again_in_the_new_boot_needs_another_boot() -> None:
    case = Case()
    case.result(LOST_0)
    case.boot_id = "b2"
    case.result(LOST_0, after=HOUR)
    case.result()
    assert case.owner == "rule:hard"
    case.boot_id = "b3"
    case.result()
    assert case.quarantine is None


def test_a_replaced_device_needs_a_deep_pass_measured_since_and_the_old_one_stays_latched() -> None:
    case = Case()
    case.result(WRONG)
    case.serials = {"dev:0": "T9", "dev:1": "S1"}
    early = case.now
    case.boot_id = "b2"
    case.result(after=HOUR, deep_at=early)
    assert case.owner == "rule:hard"
    assert case.quarantine is not None
    assert "serial:T9" in case.quarantine.reason
    case.result(deep_at=case.now + 2)
    assert case.quarantine is None
    assert case.latches["serial:S0"], "the device that was taken out is still what it was"
    other = Case(node="n7", identity="instance:i-7", record=dataclasses.replace(case.record, node="n7"))
    other.latches, other.record = case.latches, dataclasses.replace(other.record, seats=(), repeats=0)
    other.result()
    assert other.owner == "rule:hard"


def test_a_latched_device_that_is_not_seen_any_more_clears_nothing() -> None:
    case = Case()
    case.result(WRONG)
    for serials in ({"dev:1": "S1"}, {}, {"dev:0": None, "dev:1": "S1"}):
        case.serials = serials  # type: ignore[assignment]
        case.result(after=DAY, deep_at=case.now)
        assert case.owner == "rule:hard"


def test_a_node_renamed_or_registered_again_with_the_same_device_stays_latched() -> None:
    case = Case()
    case.result(WRONG)
    case.node, case.identity, case.quarantine = "n2", "instance:i-2", None
    case.record = RuleRecord(node="n2")
    case.result()
    assert case.owner == "rule:hard"


def test_another_machine_under_the_same_name_needs_a_deep_pass() -> None:
    case = Case(serials={})
    case.result(fault("WrongResult"))
    case.identity = "node:n1"
    case.result(deep_at=case.now + 50)
    assert case.owner == "rule:hard", "an instance id that cannot be read is not another machine"
    case.identity = "instance:i-2"
    case.result(after=HOUR)
    assert case.owner == "rule:hard"
    case.result(deep_at=case.now + 2)
    assert case.quarantine is None


# --- accusations ----------------------------------------------------------------------------------------------------


def test_two_accusations_within_a_day_quarantine_and_two_quick_passes_clear() -> None:
    case = Case()
    case.look(accusations=(ACCUSED,))
    assert case.quarantine is None
    case.now += 23 * HOUR
    case.look(accusations=(ACCUSED,))
    assert case.owner == "rule:accused"
    case.now += HOUR
    case.look(quick_at=case.now - 10)
    case.look(quick_at=case.now - 10)
    assert case.quarantine is not None
    case.now += HOUR
    case.look(quick_at=case.now - 10)
    assert case.quarantine is None


def test_accusations_more_than_a_day_apart_do_not_add_up() -> None:
    case = Case()
    case.look(accusations=(ACCUSED,))
    case.now += 25 * HOUR
    case.look(accusations=(ACCUSED,))
    assert case.quarantine is None


def test_a_failed_quick_result_breaks_the_row_of_an_accused_node() -> None:
    case = Case()
    for _ in range(2):
        case.look(accusations=(ACCUSED,))
    case.now += HOUR
    case.look(quick_at=case.now - 10)
    case.result(SLOW)
    case.result(quick_at=case.now + 30)
    assert case.owner == "rule:accused"


# --- injected, observed, a person's, the breaker --------------------------------------------------------------------


@pytest.mark.parametrize("code", ["WrongResult", "SlowDevice", "DeviceLost"])
def test_what_an_injected_fault_did_is_undone_when_it_is_cleared(code: str) -> None:
    case = Case(injected=("matmul=fail",))
    for _ in range(3):
        case.result(fault(code, device="dev:0", injected=True))
    assert case.quarantine is not None
    assert case.quarantine.reason.count("(injected)") == 1
    case.injected = ()
    case.look()
    assert case.quarantine is None
    assert not any(case.latches.values())
    assert (case.record.repeats, case.record.active) == (0, False)


def test_an_injected_accusation_says_so_once() -> None:
    """What a validation says of an injected fault ends with the mark already."""
    told = Reason(
        code="CollectiveFault",
        message="n3 fails in collectives with n1 (injected)",
        status=Status.FAIL,
        blame=Blame.NODE,
        action=Action.INSPECT,
        injected=True,
    )
    case = Case(injected=("all_reduce=corrupt",))
    for _ in range(2):
        case.look(accusations=(accusation(told),))
    assert case.quarantine is not None
    notes = [effect.message for effect in case.effects if isinstance(effect, HistoryNote)]
    assert "(injected)" in " ".join(notes)
    for text in (case.quarantine.reason, *notes):
        assert text.count("(injected)") <= 1, text


def test_a_real_fault_beside_an_injected_one_stays() -> None:
    case = Case(injected=("matmul=fail",))
    case.result(fault("WrongResult", device="dev:0", injected=True))
    case.result(fault("MemoryCorruption", device="dev:1"))
    case.injected = ()
    case.look()
    assert case.owner == "rule:hard"
    assert case.quarantine is not None
    assert "MemoryCorruption" in case.quarantine.reason


@pytest.mark.parametrize("observe", ["hard", "WrongResult"])
def test_an_observed_rule_or_reason_says_what_it_would_have_done_and_does_nothing(observe: str) -> None:
    case = Case(policy=dataclasses.replace(POLICY, rules_observe=(observe,)))
    case.result(WRONG)
    case.result(WRONG)
    assert case.quarantine is None
    assert case.modes() == ["observed"]
    case.result(fault("SlowDevice"))
    for _ in range(2):
        case.result(SLOW)
    assert case.owner == "rule:soft"


def test_rules_do_not_touch_a_persons_quarantine_and_take_over_when_it_ends() -> None:
    case = Case(person=True)
    case.result(WRONG)
    assert case.quarantine is None
    assert case.modes() == ["shadowed"]
    case.person = False
    case.result()
    assert case.owner == "rule:hard"


def test_the_breaker_trips_at_its_share_and_nobody_more_is_taken() -> None:
    case = Case(room=PoolLimit(pool="a", size=100, kept=9, most=10, open=False))
    case.result(WRONG)
    assert case.owner == "rule:hard"
    full = Case(room=PoolLimit(pool="a", size=100, kept=10, most=10, open=False))
    full.result(WRONG)
    assert full.quarantine is None
    assert "10 of 100" in full.trips()[0].reason
    assert "healthd fleet breaker reset" in full.trips()[0].reason
    full.room = PoolLimit(pool="a", size=100, kept=3, most=10, open=True)
    full.result(WRONG)
    assert full.quarantine is None
    full.room = dataclasses.replace(full.room, open=False)
    full.result(WRONG)
    assert full.owner == "rule:hard"
    assert full.modes() == ["held", "enforced"]


# --- runs to prove it well ------------------------------------------------------------------------------------------


def test_after_the_cool_down_a_run_is_ordered_and_another_for_the_row() -> None:
    case = soft()
    case.wait(5 * MINUTE)
    assert case.record.probe is None
    case.wait(6 * MINUTE)
    probe = case.record.probe
    assert probe is not None
    assert probe.tier is Tier.QUICK
    case.probe_status = "done"
    case.result()
    assert case.record.probe is None
    case.probe_status = ""
    case.result()
    assert case.quarantine is None


def test_a_node_in_use_gets_no_run_and_a_refused_one_is_not_repeated_at_once() -> None:
    case = soft(Case(allocated=True))
    case.wait(HOUR)
    assert case.record.probe is None
    case.allocated = False
    case.look(outcome(case.now - HOUR, SLOW))
    assert case.record.probe is not None
    case.probe_status = "refused"
    case.look()
    case.probe_status = ""
    case.wait(MINUTE)
    assert case.record.probe is None
    case.wait(10 * MINUTE)
    assert case.record.probe is not None


def test_a_latch_that_no_run_can_take_away_gets_none_and_a_replaced_device_a_deep_one() -> None:
    case = Case()
    case.result(WRONG)
    case.wait(HOUR)
    assert case.record.probe is None
    case.serials = {"dev:0": "T9", "dev:1": "S1"}
    case.result()
    assert case.record.probe is not None
    assert case.record.probe.tier is Tier.DEEP


@pytest.mark.parametrize(
    "wrong",
    [
        {"out_ratio": 1.5},
        {"rules_observe": ("sfot",)},
        {"keep_days": -1.0},
        {"keep_gates": -1},
        {"forget_days": 0.5},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        Policy(**wrong)  # type: ignore[arg-type]


# --- in maintenance -------------------------------------------------------------------------------------------------


def test_what_fails_in_maintenance_counts_neither_then_nor_afterwards() -> None:
    case = Case()
    case.result(SLOW)
    case.result(SLOW)
    for _ in range(5):
        case.result(SLOW, LOST_0, maintenance=True)
    assert case.quarantine is None
    # The first report after it: the result of the last one in it, and one that was measured before its end was told.
    assert case.last is not None
    case.take(dataclasses.replace(case.last, maintenance=False))
    case.take(dataclasses.replace(case.last, maintenance=False))
    assert case.quarantine is None
    case.result(SLOW)
    assert case.owner == "rule:soft", "two before it and one after it"
    other = Case()
    other.result(LOST_0, maintenance=True)
    assert other.last is not None
    for _ in range(3):
        other.take(dataclasses.replace(other.last, maintenance=False))
    assert other.quarantine is None, "the same result again"


def test_last_result_of_a_maintenance_that_is_told_after_its_end_does_not_count() -> None:
    case = Case()
    case.look(maintenance=True)
    case.result(LOST_0)
    assert case.quarantine is None
    case.result(LOST_0)
    assert case.owner == "rule:hard"


def test_accusation_of_a_node_in_maintenance_does_not_count_and_a_pass_does() -> None:
    case = soft()
    case.look(maintenance=True, accusations=(ACCUSED,))
    case.look(maintenance=True, accusations=(ACCUSED,))
    assert not any(count.fault.check == COLLECTIVES for count in case.record.counts)
    case.result(maintenance=True)
    case.result(maintenance=True)
    assert case.quarantine is not None
    assert case.quarantine.until is not None


def test_no_run_is_ordered_in_maintenance_and_nothing_is_remembered_of_it_in_the_end() -> None:
    case = soft()
    case.now += HOUR
    case.look(maintenance=True)
    assert case.record.probe is None
    case.look()
    assert case.record.probe is not None
    well = Case()
    well.look(maintenance=True)
    assert well.record.active
    well.look()
    assert not well.record.active
