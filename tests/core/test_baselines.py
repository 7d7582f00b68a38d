"""Baselines: what is learned, from whom, who must agree, and whom it judges."""

from __future__ import annotations

import dataclasses
import json
import random
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.contract import Blame, Finding, Limit, Measurement, Status, Tier
from checks.learned import choose
from healthd.baselines import files
from healthd.baselines.book import MOST_SAMPLES, Book
from healthd.baselines.judging import limits_of, sets_of, unsilenced
from healthd.baselines.learning import factor_of, learn
from healthd.baselines.model import Kind, Sample, Series, State
from healthd.baselines.rule import Rule
from healthd.baselines.sampling import kind_of, limit_name, samples_of, why_not
from healthd.cli.fleet.baseline_init import configuration
from healthd.cli.settings.tree import Settings
from healthd.core import wire
from healthd.core.config.load import load
from healthd.core.errors import BadInputError, ConflictError, NotFoundError
from healthd.core.evidence import judge_health
from healthd.core.model import Allocation, CheckResult, Health, LearnedBounds, LearnedLimits, NodeState, Quarantine
from healthd.node.state.approved_baselines import ApprovedBaselines
from healthd.runner.runner import Runner
from healthd.runner.settings import RunnerSettings
from tests.cli.cli_kit import healthd
from tests.node import node_kit

KIND = Kind(hardware="trn1.2xlarge x2", accelerator="cpu", versions=(("torch", "2.9"),))
MATMUL = "matmul_flops_per_second/bf16"
BUSBW = "all_reduce_busbw_bytes_per_second"
DAY = 20_000
NOW = DAY * 86400.0 + 3600.0


def samples(count: int, *, sources: int = 11, value: float = 1e12, noise: float = 0.02, day: int = DAY) -> list[Sample]:
    """One a day of each source, newest last; always the same ones."""
    chance = random.Random(count * 1000 + sources)
    return [
        Sample(
            node=f"n{i % sources}",
            target="cpu:0",
            day=day - i // sources,
            value=value * (1 + noise * chance.gauss(0, 1)),
        )
        for i in range(count)
    ]


def book_of(some: Iterable[Sample], name: str = MATMUL, *, rule: Rule | None = None) -> Book:
    book = Book(rule)
    for sample in some:
        book.add(KIND, name, sample)
    return book


def only(book: Book) -> Series:
    (series,) = book.all()
    return series


def approved(book: Book, *, now: float = NOW) -> Series:
    book.learn(now=now)
    book.decide([only(book).id], State.APPROVED, by="me", now=now)
    return only(book)


# --- limits out of samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "sources", "learned"), [(10, 10, False), (11, 2, False), (11, 3, True), (11, 11, True)]
)
def test_nothing_is_learned_of_fewer_than_eleven_samples_or_three_devices(
    count: int, sources: int, learned: bool
) -> None:
    assert (learn(samples(count, sources=sources), MATMUL, Rule()) is not None) is learned


def test_a_limit_is_never_nearer_than_its_share_of_the_median() -> None:
    same = [dataclasses.replace(one, value=100.0) for one in samples(20)]
    found = learn(same, MATMUL, Rule(share_ratio=0.1))
    assert found is not None
    assert found.median == 100.0
    assert found.mad == pytest.approx(0.5)  # its floor
    assert found.lower == pytest.approx(90.0)
    assert found.upper is None
    assert found.outside == 0


def test_noise_moves_the_limit_away_and_a_larger_fleet_moves_it_further() -> None:
    noisy = samples(100, sources=100, noise=0.05)
    few, many = (learn(noisy, MATMUL, Rule(comparisons=count)) for count in (1000, 1_000_000))
    assert few is not None
    assert many is not None
    assert few.lower is not None
    assert many.lower is not None
    assert many.lower < few.lower < 0.9 * few.median
    assert few.lower == pytest.approx(few.median - few.factor * 1.4826 * few.mad)


def test_the_factor_is_the_quantile_for_the_budget_of_the_whole_fleet() -> None:
    assert factor_of(0.01, 1000) == pytest.approx(4.417, abs=0.001)
    assert factor_of(50.0, 1000) == pytest.approx(1.960, abs=0.001)


def test_durations_have_an_upper_limit_and_what_is_neither_rate_nor_duration_has_none() -> None:
    found = learn(samples(20, value=0.01), "all_reduce_duration_seconds/1024", Rule())
    assert found is not None
    assert found.lower is None
    assert found.upper is not None
    assert found.upper >= 1.1 * found.median
    assert learn(samples(20), "memory_available_bytes", Rule()) is None
    assert learn(samples(20), "clock_offset_seconds", Rule()) is None


def test_a_quarter_of_slow_devices_does_not_move_the_limit_below_them() -> None:
    some = samples(40, sources=40, noise=0.01)
    slow = [dataclasses.replace(one, value=0.7 * one.value) if i < 10 else one for i, one in enumerate(some)]
    found = learn(slow, MATMUL, Rule())
    assert found is not None
    assert found.lower is not None
    assert found.lower > 0.7 * 1.02e12
    assert found.outside == 10


def test_samples_that_differ_by_everything_make_no_limit() -> None:
    wild = [dataclasses.replace(one, value=10.0 ** (i % 6)) for i, one in enumerate(samples(30))]
    found = learn(wild, MATMUL, Rule())
    assert found is not None
    assert (found.lower, found.upper) == (None, None)
    book = book_of(wild)
    book.learn(now=NOW, automatic=True)
    assert only(book).in_force is None
    with pytest.raises(BadInputError, match="differ by too much"):
        book.decide([only(book).id], State.APPROVED, by="me", now=NOW)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_whatever_is_measured_a_limit_is_on_the_good_side_of_nothing(values: list[float]) -> None:
    some = [Sample(node=f"n{i}", target="cpu:0", day=DAY, value=value) for i, value in enumerate(values)]
    found = learn(some, MATMUL, Rule())
    if found is not None and found.lower is not None:
        assert 0 < found.lower < found.median


def test_new_healthy_values_hardly_ever_fall_out_of_a_learned_limit() -> None:
    chance, fleets = random.Random(5), 0
    for _ in range(40):
        some = [Sample(node=f"n{i}", target="d", day=DAY, value=chance.gauss(1, 0.02)) for i in range(20)]
        found = learn(some, MATMUL, Rule())
        assert found is not None
        assert found.lower is not None
        fleets += any(chance.gauss(1, 0.02) < found.lower for _ in range(512))
    assert fleets == 0


# --- what may be learned from -----------------------------------------------------------------------------------------


def measured(name: str = "matmul_flops_per_second", value: float | None = 1e12, **labels: str) -> Measurement:
    return Measurement(name=name, value=value, lower=None, upper=None, origin="none", labels=labels)


def state(*, matmul: CheckResult | None = None, **changes: Any) -> NodeState:
    finding = dataclasses.replace(node_kit.finding(target="cpu:0"), measurements=(measured(dtype="bf16"),))
    result = matmul or node_kit.result("matmul", finding, tier=Tier.QUICK)
    made = node_kit.state(
        results=(node_kit.result("disk", node_kit.measured("disk_read_bytes_per_second", 5.0)), result),
        versions={"torch": "2.9", "python": "3.12"},
        inventory=node_kit.survey().inventory,
        instance_type="trn1.2xlarge",
    )
    health, reasons = judge_health(made)
    return dataclasses.replace(made, **{"health": health, "reasons": reasons, **changes})


def names(one: NodeState) -> list[str]:
    return [name for name, _, _ in samples_of(one, now=NOW)]


def test_active_checks_of_a_healthy_idle_node_are_learned_from() -> None:
    assert names(state()) == [MATMUL]
    ((_, _, sample),) = samples_of(state(), now=NOW)
    assert (sample.node, sample.target, sample.day, sample.value) == ("n1", "cpu:0", DAY, 1e12)


def test_nodes_that_are_used_faulty_or_kept_out_teach_nothing() -> None:
    kept_out = Quarantine(reason="noise", owner="me", owner_kind="person", since=0.0, until=None)
    for changes in (
        {"allocated": (Allocation(by="process", holder="pid 7"),)},
        {"faults": ("matmul=slow:2",)},
        {"quarantine": kept_out},
        {"health": Health.DEGRADED},
        {"health": Health.UNKNOWN},
        {"versions": {"python": "3.12"}},
        {"inventory": None},
    ):
        one = state(**changes)
        assert names(one) == [], changes
        assert why_not(one)


@pytest.mark.parametrize("changes", [{"injected": True}, {"age_seconds": 90_000.0}, {"status": Status.WARN}])
def test_results_that_are_injected_old_or_did_not_pass_teach_nothing(changes: dict[str, Any]) -> None:
    finding = dataclasses.replace(node_kit.finding(target="cpu:0"), measurements=(measured(dtype="bf16"),))
    result = dataclasses.replace(node_kit.result("matmul", finding, tier=Tier.QUICK), **changes)
    assert names(state(matmul=result, health=Health.HEALTHY)) == []


@pytest.mark.parametrize(
    ("measurement", "name"),
    [
        (measured(dtype="bf16"), MATMUL),
        (measured("memory_bandwidth_bytes_per_second"), "memory_bandwidth_bytes_per_second"),
        (measured("all_reduce_busbw_bytes_per_second", size_bytes="1024"), None),
        (
            measured("all_reduce_busbw_bytes_per_second", size_bytes="8388608"),
            "all_reduce_busbw_bytes_per_second/8388608",
        ),
        (measured("all_reduce_algbw_bytes_per_second", size_bytes="8388608"), None),
        (measured("all_reduce_duration_seconds", size_bytes="1024"), "all_reduce_duration_seconds/1024"),
        (measured("x_duration_seconds", size_bytes="64", dtype="fp32", ranks="2"), "x_duration_seconds/64"),
        (measured("x_duration_seconds", size_bytes="64", dtype="bf16", ranks="2"), None),
        (measured("x_duration_seconds", size_bytes="64", dtype="fp32", ranks="8"), None),
        (measured("x_duration_seconds", size_bytes="many"), None),
        (measured("x_flops_per_second", a="1", b="2"), None),
        (measured("neuron_temperature_celsius"), None),
    ],
)
def test_learned_names_are_those_that_checks_look_their_limits_up_by(
    measurement: Measurement, name: str | None
) -> None:
    assert limit_name(measurement, 2) == name


def test_a_new_library_version_or_another_split_of_the_device_starts_anew() -> None:
    first = kind_of(state())
    other = kind_of(state(versions={"torch": "2.10", "python": "3.12"}))
    same = kind_of(state(versions={"torch": "2.9", "python": "3.13", "kernel": "6.8"}))
    assert first is not None
    assert first == same != other
    inventory = node_kit.survey().inventory
    split = kind_of(state(inventory=dataclasses.replace(inventory, workers=("cpu:0", "cpu:1"))))
    assert split != first


# --- the book ---------------------------------------------------------------------------------------------------------


def test_a_chatty_node_counts_once_a_day() -> None:
    book = Book()
    for index in range(500):
        book.add(KIND, MATMUL, Sample(node="n1", target="cpu:0", day=DAY, value=1e12 + index))
    assert len(book.samples(only(book).id)) == 1


def test_samples_are_bounded_and_which_are_kept_does_not_depend_on_their_order() -> None:
    some = samples(2000, sources=500)
    one, other = book_of(some), book_of([*reversed(some), *some])
    assert one.samples(only(one).id) == other.samples(only(other).id)
    assert len(one.samples(only(one).id)) == MOST_SAMPLES
    # Four days of 500 devices: the size of the fleet is told from what was kept.
    assert 400 < one.comparisons() / 1 < 1300


def test_the_number_of_comparisons_follows_the_fleet() -> None:
    book = book_of(samples(20_000, sources=20_000))
    assert 15_000 < book.comparisons() < 25_000


def test_series_are_bounded_and_frozen_ones_are_never_pushed_out() -> None:
    book = Book(most_series=3)
    for sample in samples(20):
        book.add(KIND, MATMUL, sample)
    frozen = approved(book)
    book.decide([frozen.id], State.FROZEN, by="me", now=NOW)
    for index in range(5):
        kind = dataclasses.replace(KIND, hardware=f"h{index}")
        book.add(kind, MATMUL, Sample(node="n", target="t", day=DAY + index, value=1.0))
    assert len(book) == 3
    assert book.get(frozen.id) is not None
    assert {one.kind.hardware for one in book.all()} == {KIND.hardware, "h3", "h4"}


def test_only_what_a_person_approved_judges() -> None:
    book = book_of(samples(30))
    book.learn(now=NOW)
    assert only(book).candidate is not None
    assert book.limits_of(KIND) is None
    series = approved(book)
    assert series.in_force is not None
    assert (series.in_force.version, series.in_force.by, series.candidate) == (1, "me", None)
    told = book.limits_of(KIND)
    assert told is not None
    assert told.limits == {MATMUL: LearnedBounds(lower=series.in_force.learned.lower, upper=None)}
    assert told.versions == {"torch": "2.9"}
    assert book.learn(now=NOW) == ()  # the same samples say nothing new


def test_nothing_can_be_approved_of_too_few_samples() -> None:
    book = book_of(samples(5))
    book.learn(now=NOW)
    with pytest.raises(BadInputError, match="too few samples"):
        book.decide([only(book).id], State.APPROVED, by="me", now=NOW)
    with pytest.raises(BadInputError, match="nothing is approved"):
        book.decide([only(book).id], State.FROZEN, by="me", now=NOW)
    with pytest.raises(NotFoundError, match="no baseline 'matmull'"):
        book.find(["matmull"])


def test_newer_samples_make_a_candidate_of_the_next_version_and_judge_nothing_yet() -> None:
    book = book_of(samples(30))
    before = approved(book)
    for sample in samples(30, value=0.97e12, day=DAY + 20):
        book.add(KIND, MATMUL, sample)
    book.learn(now=NOW + 20 * 86400)
    after = only(book)
    assert after.in_force == before.in_force
    assert after.candidate is not None
    assert after.candidate.version == 2
    book.decide([after.id], State.APPROVED, by="me", now=NOW)
    assert only(book).in_force == dataclasses.replace(after.candidate, state=State.APPROVED, by="me", decided_at=NOW)


@pytest.mark.parametrize("name", [MATMUL, "all_reduce_duration_seconds/1024"])
def test_values_that_scatter_more_make_a_candidate_although_their_median_stays(name: str) -> None:
    def around(noise: float, day: int) -> list[Sample]:
        return [
            dataclasses.replace(one, value=1.0 + noise * (i - 15) / 15)
            for i, one in enumerate(samples(31, sources=31, day=day))
        ]

    book = book_of(around(0.02, DAY), name)
    before = approved(book).in_force
    assert before is not None
    for sample in around(0.3, DAY + 28):  # those from before are dropped by then
        book.add(KIND, name, sample)
    book.learn(now=NOW + 28 * 86400)
    candidate = only(book).candidate
    assert candidate is not None
    assert candidate.learned.median == before.learned.median
    assert candidate.learned.mad > 5 * before.learned.mad


def test_automatic_approval_lets_the_first_judge_and_never_a_later_one() -> None:
    book = book_of(samples(30))
    book.learn(now=NOW, automatic=True)
    first = only(book).in_force
    assert first is not None
    assert first.by == "auto"
    for sample in samples(300, value=0.8e12, day=DAY + 20):
        book.add(KIND, MATMUL, sample)
    book.learn(now=NOW + 20 * 86400, automatic=True)
    assert only(book).in_force == first
    assert only(book).candidate is not None


def test_automatic_approval_leaves_to_a_person_what_its_own_samples_contradict() -> None:
    some = samples(40, sources=40)
    some[3] = dataclasses.replace(some[3], value=0.5e12)
    book = book_of(some)
    book.learn(now=NOW, automatic=True)
    assert only(book).in_force is None
    assert only(book).candidate is not None


def test_a_frozen_baseline_learns_no_more_until_somebody_thaws_it_and_a_revoked_one_judges_nobody() -> None:
    book = book_of(samples(30))
    series = approved(book)
    book.decide([series.id], State.FROZEN, by="me", now=NOW)
    for sample in samples(30, value=0.97e12, day=DAY + 20):
        book.add(KIND, MATMUL, sample)
    book.learn(now=NOW + 20 * 86400)
    assert only(book).candidate is None
    told = book.limits_of(KIND)
    assert told is not None
    assert told.limits
    book.decide([series.id], State.APPROVED, by="me", now=NOW)
    book.learn(now=NOW + 20 * 86400)
    assert only(book).candidate is not None
    book.decide([series.id], State.REVOKED, by="me", now=NOW)
    book.learn(now=NOW + 20 * 86400, automatic=True)
    gone = book.limits_of(KIND)
    assert gone is not None
    assert gone.limits == {}
    assert gone.digest != told.digest
    assert sets_of(book.all()) == ()


@pytest.mark.parametrize(("moved", "warned"), [(0.97, False), (0.93, True), (1.08, True)])
def test_a_median_that_moves_is_a_warning_about_the_fleet_and_accuses_no_node(moved: float, warned: bool) -> None:
    book = book_of(samples(30, noise=0.001))
    approved(book)
    for sample in samples(22, value=moved * 1e12, noise=0.001, day=DAY + 10):
        book.add(KIND, MATMUL, sample)
    book.learn(now=NOW + 10 * 86400)
    drifts = book.drifts()
    assert bool(drifts) is warned
    for reason in drifts:
        assert (reason.code, reason.status, reason.node) == ("BaselineDrift", Status.WARN, None)
        assert reason.blame is Blame.CONTROL
        assert "approve the new one" in reason.message


def test_a_week_of_too_few_samples_is_no_drift_and_old_samples_are_dropped() -> None:
    book = book_of(samples(30))
    approved(book)
    for sample in samples(10, value=0.5e12, day=DAY + 10):
        book.add(KIND, MATMUL, sample)
    book.learn(now=NOW + 10 * 86400)
    assert book.drifts() == ()
    book.learn(now=NOW + 60 * 86400)
    assert book.samples(only(book).id) == ()
    assert only(book).in_force is not None


# --- who is judged ----------------------------------------------------------------------------------------------------


def learned(**changes: Any) -> LearnedLimits:
    values: dict[str, Any] = {
        "digest": "d",
        "hardware": "h x2",
        "accelerator": "cpu",
        "versions": {"torch": "2.9"},
        "limits": {MATMUL: LearnedBounds(lower=1e12, upper=None)},
    }
    return LearnedLimits(**{**values, **changes})


@pytest.mark.parametrize(
    ("configured", "left"),
    [
        ([], True),
        (["matmul_flops_per_second"], False),
        ([MATMUL], False),
        (["matmul_flops_per_second@cpu:1"], False),
        (["matmul_flops_per_second/bf16@cpu:1"], False),
        (["matmul_flops_per_second/fp32"], True),
        (["matmul_flops"], True),
    ],
)
def test_a_limit_of_the_operator_silences_what_was_learned(configured: list[str], left: bool) -> None:
    assert bool(unsilenced(learned(), configured)) is left


def chosen(*sets: LearnedLimits, hardware: str | None = "h x2", **versions: str) -> dict[str, Limit]:
    return choose([wire.plain(one) for one in sets], hardware=hardware, accelerator="cpu", versions=versions)


def test_learned_limits_hold_for_their_hardware_and_versions_alone() -> None:
    limit = Limit(lower=1e12, upper=None, origin="baseline")
    assert chosen(learned(), torch="2.9") == {MATMUL: limit}
    assert chosen(learned(), torch="2.10") == {}
    assert chosen(learned(), torch="2.9", hardware="h x4") == {}
    assert chosen(learned(), torch="2.9", hardware=None) == {}
    other = learned(versions={"torch": "2.10"}, limits={MATMUL: LearnedBounds(lower=5.0, upper=None)})
    assert chosen(learned(), other, torch="2.9") == {MATMUL: limit}
    assert chosen(learned(), other) == {}  # nobody can say which


def test_a_node_keeps_what_it_was_told_and_the_operators_file_comes_first(tmp_path: Path) -> None:
    runner = Runner(RunnerSettings())
    kept = ApprovedBaselines(tmp_path / "baseline.json", runner)
    assert kept.digest == ""
    kept.set(learned())
    assert runner.learned == (learned(),)
    again = Runner(RunnerSettings(learned=(learned(digest="own"),)))
    assert ApprovedBaselines(tmp_path / "baseline.json", again).digest == "d"
    assert [one.digest for one in again.learned] == ["own"]
    kept.set(learned(digest="e", limits={}))
    assert ApprovedBaselines(tmp_path / "baseline.json", Runner(RunnerSettings())).digest == "e"
    (tmp_path / "baseline.json").write_text("{")
    assert ApprovedBaselines(tmp_path / "baseline.json", Runner(RunnerSettings())).digest == ""


def test_what_holds_inside_a_node_does_not_judge_collectives_between_nodes() -> None:
    inside = Limit(lower=100e9, upper=None, origin="config")
    between = Limit(lower=8e9, upper=None, origin="config")
    limits = {f"{BUSBW}/8388608": inside, BUSBW: inside, f"nodes_{BUSBW}": between}
    runner = Runner(RunnerSettings(learned=(learned(),), limits=limits))
    alone, together = (workers.setup(None) for workers in (runner._workers(None), runner.session()._workers))
    assert alone["learned"]
    assert set(alone["limits"]) == set(limits)
    assert not together["learned"]
    assert together["limits"] == {BUSBW: dataclasses.asdict(between)}


# --- files ------------------------------------------------------------------------------------------------------------


def one_of_each() -> tuple[Series, ...]:
    book = book_of(samples(30))
    approved(book)
    for sample in samples(30, value=0.9e12, day=DAY + 20):
        book.add(KIND, MATMUL, sample)
    for sample in samples(30, value=0.01):
        book.add(KIND, "all_reduce_duration_seconds/1024", sample)
    book.learn(now=NOW + 20 * 86400)
    return tuple(dataclasses.replace(one, drift=None, heard_day=0) for one in book.all())


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_file_gives_back_what_was_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"b{suffix}"
    series = one_of_each()
    assert files.write(path, series, candidates=True) == 3
    assert files.read(path) == series
    assert files.write(path, series) == 1
    (only_approved,) = files.read(path)
    assert only_approved.candidate is None


def test_a_file_that_cannot_be_written_is_an_error_and_the_old_one_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "b.json"
    target.mkdir()
    with pytest.raises(BadInputError, match="cannot be written"):
        files.write(target, one_of_each())
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lower": -1.0}, "makes no sense"),
        ({"lower": 2e12}, "makes no sense"),
        ({"upper": 2e12}, "makes no sense"),
        ({"median": 0.0}, "median must be above 0"),
        ({"versions": {}}, "must be there"),
        ({"hardware": ""}, "must be there"),
        ({"name": "disk_available_bytes"}, "no rate and no duration"),
        ({"version": 0}, "cannot be negative"),
        ({"version": 10**30}, "or above"),
        ({"learned_at": 1e300}, "seconds since the epoch"),
        ({"decided_at": -1.0}, "seconds since the epoch"),
        ({"hardware": "\0"}, "printable"),
        ({"by": "x" * 1000}, "printable"),
        ({"state": "agreed"}, "state"),
        ({"lower": "much"}, "lower"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "b.json"
    files.write(path, one_of_each()[1:])
    plain = json.loads(path.read_text())
    plain["baseline"][0].update(change)
    path.write_text(json.dumps(plain))
    with pytest.raises(BadInputError, match=said):
        files.read(path)


def test_the_same_series_twice_and_other_formats_are_refused() -> None:
    entries = files.entries_of(one_of_each())
    twice = wire.encode(files.File(format=1, baseline=(*entries, *entries)))
    with pytest.raises(BadInputError, match="there twice"):
        files.decode(twice, what="f")
    with pytest.raises(BadInputError, match="format 2 is not known"):
        files.decode(wire.encode(files.File(format=2, baseline=entries)), what="f")
    with pytest.raises(BadInputError, match="larger than"):
        files.decode(b" " * (files.MOST_BYTES + 1), what="f")


WHOLE = files.encode(one_of_each(), candidates=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150)
@given(st.integers(0, 2), st.sampled_from(sorted(json.loads(WHOLE)["baseline"][0])), st.none() | JSON, st.booleans())
def test_damaged_members_are_refused_or_harmless(entry: int, member: str, value: object, drop: bool) -> None:
    plain = json.loads(WHOLE)
    if drop:
        plain["baseline"][entry].pop(member, None)
    else:
        plain["baseline"][entry][member] = value
    _read_or_refuse(json.dumps(plain).encode())


def test_a_file_that_is_too_large_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)
    with pytest.raises(BadInputError, match=r"b\.json: cannot be read: larger than 4 MiB"):
        files.read(path)


@given(st.integers(0, len(WHOLE)))
def test_a_cut_file_is_refused(end: int) -> None:
    if end < len(WHOLE):
        with pytest.raises(BadInputError, match=r"^f: "):
            files.decode(WHOLE[:end], what="f")


@given(st.binary(max_size=200), st.booleans())
def test_whatever_bytes_are_there_it_is_one_clear_error(body: bytes, toml: bool) -> None:
    with pytest.raises(BadInputError, match=r"^f: "):
        files.decode(body, what="f", toml=toml)


def _read_or_refuse(body: bytes) -> None:
    try:
        found = files.decode(body, what="f")
    except BadInputError:
        return
    for one in found:
        told = limits_of(one.kind, found)
        for name, bounds in (told.limits if told is not None else {}).items():
            assert bounds.lower is None or bounds.lower > 0, name


# --- the command ------------------------------------------------------------------------------------------------------


def fleet_files(folder: Path, *, count: int = 12, torch: str = "2.9") -> list[str]:
    chance, paths = random.Random(1), []
    for index in range(count):
        value = 1e12 * chance.gauss(1, 0.02)
        finding = dataclasses.replace(
            node_kit.finding(target="cpu:0"), measurements=(measured(value=value, dtype="bf16"),)
        )
        one = state(
            matmul=node_kit.result("matmul", finding, tier=Tier.QUICK),
            node=f"n{index}",
            observed_at=NOW,
            versions={"torch": torch},
        )
        path = folder / f"n{index}.json"
        path.write_bytes(wire.encode(one))
        paths.append(str(path))
    return paths


def test_files_are_learned_from_approved_exported_and_compared(tmp_path: Path) -> None:
    out = str(tmp_path / "b.json")
    said = healthd(tmp_path, "baseline", "learn", *fleet_files(tmp_path), "--out", out)
    assert said.code == 0, said.err
    assert "candidate v1" in said.out
    said = healthd(tmp_path, "baseline", "export", str(tmp_path / "x.toml"), "--file", out)
    assert said.code == 1
    assert "nothing is approved" in said.err
    assert healthd(tmp_path, "baseline", "approve", "--file", out).out.startswith("1 baselines are approved")
    exported = tmp_path / "x.toml"
    assert healthd(tmp_path, "baseline", "export", str(exported), "--file", out).code == 0
    (entry,) = tomllib.loads(exported.read_text())["baseline"]
    assert entry["name"] == MATMUL
    assert entry["state"] == "approved"
    assert healthd(tmp_path, "baseline", "diff", out, str(exported)).code == 0
    assert healthd(tmp_path, "baseline", "revoke", MATMUL, "--file", out).code == 0
    said = healthd(tmp_path, "baseline", "diff", str(exported), out)
    assert said.code == 1
    assert said.out.startswith(f"- {MATMUL} on ")


def test_too_few_files_and_used_nodes_are_said_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    paths = fleet_files(tmp_path, count=11)
    busy = dataclasses.replace(
        wire.decode(Path(paths[0]).read_bytes(), NodeState, what="it"),
        allocated=(Allocation(by="process", holder="pid 7 (train)"),),
    )
    Path(paths[0]).write_bytes(wire.encode(busy))
    said = healthd(tmp_path, "baseline", "learn", *paths, "--out", str(out))
    assert said.code == 1
    assert "at most 10 samples" in said.err
    assert "in use by pid 7 (train)" in said.err
    assert not out.exists()


def test_a_check_judges_by_the_file_shows_the_origin_and_leaves_other_versions_unjudged(tmp_path: Path) -> None:
    survey = wire.decode(healthd(tmp_path, "check", "device_count", "--json").out.encode(), NodeState, what="state")
    kind = kind_of(dataclasses.replace(survey, versions={"torch": version("torch")}))
    assert kind is not None
    book = Book()
    for sample in samples(30, value=1e16):
        book.add(kind, MATMUL, sample)
    approved(book)
    path = tmp_path / "b.json"
    files.write(path, book.all())
    said = healthd(tmp_path, "check", "matmul", "--baseline", str(path), "--json")
    assert said.code == 1, said.err
    found = wire.decode(said.out.encode(), NodeState, what="state")
    numbers = [m for f in _findings(found) for m in f.measurements]
    assert {(number.labels["dtype"], number.origin) for number in numbers} == {("bf16", "baseline"), ("fp32", "none")}
    assert {reason.code for reason in found.reasons} == {"SlowDevice"}
    path.write_text(path.read_text().replace(dict(kind.versions)["torch"], "1.0"))
    said = healthd(tmp_path, "check", "matmul", "--baseline", str(path), "--json")
    assert said.code == 0
    config = tmp_path / "h.toml"
    config.write_text(f'[baseline]\nfile = "{tmp_path / "missing.json"}"\n')
    said = healthd(tmp_path, "check", "matmul", "--config", str(config))
    assert said.code == 2
    assert "missing.json: no such file" in said.err


def _findings(one: NodeState) -> list[Finding]:
    return [finding for result in one.results for finding in result.findings]


def test_a_starting_configuration_holds_the_worst_value_less_its_margin(tmp_path: Path) -> None:
    fast = state()
    finding = dataclasses.replace(
        node_kit.finding(target="cpu:0"),
        measurements=(
            measured(value=0.8e12, dtype="bf16"),
            measured("all_reduce_duration_seconds", 1e-3, size_bytes="1024"),
        ),
    )
    slow = state(matmul=node_kit.result("matmul", finding, tier=Tier.QUICK))
    text = configuration([fast, slow], margin=0.25, tier="quick")
    path = tmp_path / "h.toml"
    path.write_text(text)
    defaults = {"node.name": "n1", "node.state_dir": tmp_path, "node.run_dir": tmp_path}
    limits = load(Settings, file=path, environ={}, arguments={}, defaults=defaults).limits_by_name()
    assert limits == {MATMUL: Limit(lower=0.6e12, upper=None, origin="config")}
    assert '# [limits."all_reduce_duration_seconds/1024"]' in text


def test_no_configuration_is_written_from_a_node_that_is_not_healthy_or_in_use() -> None:
    used = state(allocated=(Allocation(by="process", holder="pid 7"),))
    for bad in (used, state(health=Health.UNHEALTHY), state(health=Health.UNKNOWN)):
        with pytest.raises(ConflictError, match="no limits are written from this node"):
            configuration([state(), bad], margin=0.2, tier="quick")
