"""Baselines: what is learned, from whom, how it is printed as settings, and whom it judges."""

from __future__ import annotations

import ast
import dataclasses
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import checks
from checks.contract import Limit, Measurement, Status, Tier
from checks.limits import choose, floors, has_floors, limited_names, within
from checks.peers import factor_of
from checks.system import efa
from healthd import baselines
from healthd.aggregator.page.samples import Samples
from healthd.baselines import (
    Kind,
    Learned,
    Sample,
    SampleSeries,
    kind_of,
    limit_name,
    samples_of,
    series_of,
    why_not,
    widening,
)
from healthd.cli.check import STYLES
from healthd.cli.fleet.baseline import settings_text
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.render import node_report
from healthd.core import wire
from healthd.core.config import load
from healthd.core.errors import ConfigError
from healthd.core.evidence import judge_health
from healthd.core.model import Allocation, CheckResult, Health, NodeState, Quarantine
from healthd.runner.runner import Runner
from healthd.runner.settings import Baseline, RunnerSettings
from tests.cli.cli_kit import healthd
from tests.every import every
from tests.node import node_kit

KIND = Kind(hardware="trn1.2xlarge x2", accelerator="cpu", versions=(("torch", "2.9"),))
MATMUL = "matmul_flops_per_second/bf16"
BUSBW = "all_reduce_busbw_bytes_per_second"
DAY = 20_000
NOW = DAY * 86400.0 + 3600.0


def measured_values(count: int, *, value: float = 1e12, noise: float = 0.02) -> list[float]:
    """Always the same ones."""
    chance = random.Random(count)
    return [value * (1 + noise * chance.gauss(0, 1)) for _ in range(count)]


def learn(
    values: Sequence[float], name: str = MATMUL, *, devices: int = 11, comparisons: int = 1000, **rule: float
) -> Learned | None:
    series = SampleSeries(
        hardware=KIND.hardware,
        accelerator=KIND.accelerator,
        versions=dict(KIND.versions),
        name=name,
        devices=devices,
        values=tuple(values),
    )
    return baselines.learn(series, comparisons=comparisons, **rule)


# --- limits out of samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "devices", "learned"), [(10, 10, False), (11, 2, False), (11, 3, True), (11, 11, True)]
)
def test_nothing_is_learned_of_fewer_than_eleven_samples_or_three_devices(
    count: int, devices: int, learned: bool
) -> None:
    assert (learn(measured_values(count), devices=devices) is not None) is learned


def test_a_limit_is_never_nearer_than_its_share_of_the_median() -> None:
    found = learn([100.0] * 20, share_ratio=0.1)
    assert found is not None
    assert found.median == 100.0
    assert found.mad == pytest.approx(0.5)  # its floor
    assert found.lower == pytest.approx(90.0)
    assert found.upper is None
    assert found.outside == 0


def test_noise_moves_the_limit_away_and_a_larger_fleet_moves_it_further() -> None:
    noisy = measured_values(100, noise=0.05)
    few, many = (learn(noisy, comparisons=count) for count in (1000, 1_000_000))
    assert few is not None
    assert many is not None
    assert few.lower is not None
    assert many.lower is not None
    assert many.lower < few.lower < 0.9 * few.median
    factor = factor_of(0.01, 1000) * widening(100)
    assert few.lower == pytest.approx(few.median - factor * 1.4826 * few.mad)


def test_the_factor_is_the_quantile_for_the_budget_of_the_whole_fleet() -> None:
    assert factor_of(0.01, 1000) == pytest.approx(4.417, abs=0.001)
    assert factor_of(50.0, 1000) == pytest.approx(1.960, abs=0.001)


def test_durations_have_an_upper_limit_and_what_is_neither_rate_nor_duration_has_none() -> None:
    found = learn(measured_values(20, value=0.01), "all_reduce_duration_seconds/1024")
    assert found is not None
    assert found.lower is None
    assert found.upper is not None
    assert found.upper >= 1.1 * found.median
    assert learn(measured_values(20), "memory_available_bytes") is None
    assert learn(measured_values(20), "clock_offset_seconds") is None


def test_a_quarter_of_slow_devices_does_not_move_the_limit_below_them() -> None:
    found = learn([0.7 * one if i < 10 else one for i, one in enumerate(measured_values(40, noise=0.01))])
    assert found is not None
    assert found.lower is not None
    assert found.lower > 0.7 * 1.02e12
    assert found.outside == 10


def test_samples_that_differ_by_everything_make_no_limit() -> None:
    found = learn([10.0 ** (i % 6) for i in range(30)])
    assert found is not None
    assert (found.lower, found.upper) == (None, None)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_whatever_is_measured_a_limit_is_on_the_good_side_of_nothing(values: list[float]) -> None:
    found = learn(values)
    if found is not None and found.lower is not None:
        assert 0 < found.lower < found.median


def test_new_healthy_values_hardly_ever_fall_out_of_a_learned_limit() -> None:
    chance, fleets = random.Random(5), 0
    for _ in range(40):
        found = learn([chance.gauss(1, 0.02) for _ in range(20)])
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
    return [sample.name for sample in samples_of(one, now=NOW)]


def test_active_checks_of_a_healthy_idle_node_are_learned_from() -> None:
    assert names(state()) == [MATMUL]
    (sample,) = samples_of(state(), now=NOW)
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


@every(
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


def sampled(count: int, *, devices: int, day: int = DAY, name: str = MATMUL) -> list[tuple[Kind, Sample]]:
    """One a day of each device, newest first."""
    return [
        (
            KIND,
            Sample(
                name=name, node=f"n{i % devices}", target="cpu:0", began=0.0, day=day - i // devices, value=1e12 + i
            ),
        )
        for i in range(count)
    ]


def test_a_chatty_node_counts_once_a_day() -> None:
    (series,) = series_of([(KIND, dataclasses.replace(one, node="n1", day=DAY)) for _, one in sampled(500, devices=1)])
    assert (len(series.values), series.devices) == (1, 1)


def test_samples_that_are_older_than_four_weeks_are_left_out() -> None:
    recent, old = sampled(11, devices=11), sampled(11, devices=11, day=DAY - 28)
    (series,) = series_of([*old, *recent])
    assert sorted(series.values) == sorted(one.value for _, one in recent)
    (series,) = series_of([*sampled(11, devices=11, day=DAY - 27), *recent])
    assert (len(series.values), series.devices) == (22, 11)


# --- who is judged ----------------------------------------------------------------------------------------------------


def settings_of(text: str, folder: Path) -> Settings:
    path = folder / "healthd.toml"
    path.write_text(text)
    defaults = {"node.name": "n1", "node.state_dir": folder, "node.run_dir": folder}
    return load(Settings, file=path, environ={}, arguments={}, defaults=defaults)


ONE_KIND = f"""
[baselines.mine]
hardware = "h x2"
accelerator = "cpu"
versions = {{ torch = "2.9" }}

[baselines.mine.limits."{MATMUL}"]
lower = 1e12
"""


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
def test_a_limit_for_all_machines_silences_one_of_a_kind(tmp_path: Path, configured: list[str], left: bool) -> None:
    limits = "".join(f'[limits."{name}"]\nlower = 1.0\n' for name in configured)
    (one,) = settings_of(ONE_KIND + limits, tmp_path).limits_by_kind()
    assert dict(one.limits) == ({MATMUL: Limit(lower=1e12, upper=None, origin="baseline")} if left else {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE_KIND.replace("hardware", "hardwear"), r"healthd\.toml:3: .*did you mean 'hardware'"),
        (ONE_KIND.replace('accelerator = "cpu"', ""), "'baselines.mine.accelerator' must be set"),
        (ONE_KIND.replace("lower", "lowest"), r"healthd\.toml:8: .*did you mean 'lower'"),
        (ONE_KIND.replace('{ torch = "2.9" }', "3"), r"healthd\.toml:5: baselines\.mine\.versions"),
    ],
)
def test_a_mistake_in_limits_of_a_kind_is_told_by_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(text, tmp_path)


def chosen(*sets: Baseline, hardware: str | None = "h x2", **versions: str) -> dict[str, Limit]:
    return choose(map(dataclasses.asdict, sets), hardware=hardware, accelerator="cpu", versions=versions)


def test_limits_of_a_kind_hold_for_their_hardware_and_versions_alone(tmp_path: Path) -> None:
    limit = Limit(lower=1e12, upper=None, origin="baseline")
    (one,) = settings_of(ONE_KIND, tmp_path).limits_by_kind()
    assert chosen(one, torch="2.9") == {MATMUL: limit}
    assert chosen(one, torch="2.10") == {}
    assert chosen(one, torch="2.9", hardware="h x4") == {}
    assert chosen(one, torch="2.9", hardware=None) == {}
    other = dataclasses.replace(one, versions={"torch": "2.10"})
    assert chosen(one, other, torch="2.9") == {MATMUL: limit}
    assert chosen(one, other) == {}  # nobody can say which


def test_what_holds_inside_a_node_does_not_judge_collectives_between_nodes(tmp_path: Path) -> None:
    inside = Limit(lower=100e9, upper=None, origin="config")
    between = Limit(lower=8e9, upper=None, origin="config")
    limits = {f"{BUSBW}/8388608": inside, BUSBW: inside, f"nodes_{BUSBW}": between}
    kinds = settings_of(ONE_KIND, tmp_path).limits_by_kind()
    runner = Runner(RunnerSettings(baselines=kinds, limits=limits))
    alone, together = (workers.setup(None) for workers in (runner._workers(None), runner.session()._workers))
    assert alone["learned"]
    assert set(alone["limits"]) == set(limits)
    assert not together["learned"]
    assert together["limits"] == {BUSBW: dataclasses.asdict(between)}


# --- floors: half of the published peak -----------------------------------------------------------------------------


ON_TRN1 = {"accelerator": "neuron", "lnc": 1}


@every(
    ("kind", "inventory", "name", "lower"),
    [
        ("trn1.32xlarge", ON_TRN1, MATMUL, 190e12 / 2 / 2),  # two cores a device
        ("trn2.48xlarge", {"accelerator": "neuron", "lnc": 2}, MATMUL, 667e12 / 4 / 2),
        ("trn2.48xlarge", {"accelerator": "neuron", "lnc": 1}, MATMUL, 667e12 / 8 / 2),
        (
            "trn2.48xlarge",
            {"accelerator": "neuron", "lnc": None},
            MATMUL,
            667e12 / 8 / 2,
        ),  # the smallest that there may be
        ("p5.48xlarge", {"accelerator": "cuda"}, MATMUL, 989.4e12 / 2),
        ("p5.48xlarge", {"accelerator": "cuda"}, "memory_bandwidth_bytes_per_second", 3.35e12 / 2),
        ("p5.48xlarge", {"accelerator": "cpu"}, MATMUL, None),  # only its processors are used
        ("g5.xlarge", {"accelerator": "cuda"}, MATMUL, None),  # no peak is published
        ("g6.xlarge", {"accelerator": "cuda"}, MATMUL, None),  # 72 W do not hold the peak
        ("p5.48xlarge", {"accelerator": "cuda"}, "matmul_flops_per_second/fp8", None),
        ("trn9.xlarge", ON_TRN1, MATMUL, None),
        (None, ON_TRN1, MATMUL, None),
    ],
)
def test_each_target_of_a_known_instance_type_has_half_of_its_published_peak_as_floor(
    kind: str | None, inventory: dict[str, Any], name: str, lower: float | None
) -> None:
    limit = floors(kind, inventory).get(name)
    assert (None if limit is None else limit.lower) == (None if lower is None else pytest.approx(lower))


def test_a_part_of_a_gpu_has_no_floors_and_a_whole_one_has() -> None:
    assert has_floors("cuda | NVIDIA A100-SXM4-80GB | sm_80 | torch 2.9.1 | CUDA 12.8")
    assert not has_floors("cuda | NVIDIA A100-SXM4-80GB MIG 1g.10gb | sm_80 | torch 2.9.1 | CUDA 12.8")


@every(("share", "status", "health", "code"), [(1.0, "pass", "healthy", 0), (0.999, "warn", "degraded", 1)])
def test_a_speed_below_its_floor_degrades_the_node_and_is_a_warning_to_plugins(
    share: float, status: str, health: str, code: int
) -> None:
    floor = floors("trn1.2xlarge", ON_TRN1)[MATMUL]
    assert floor.lower is not None
    found = within(
        share * floor.lower,
        name="matmul_flops_per_second",
        target="neuroncore:0",
        limit=floor,
        reason="SlowDevice",
        subject="product",
        labels={"dtype": "bf16"},
    )
    one = state(matmul=node_kit.result("matmul", found, tier=Tier.QUICK))
    assert (found.status.value, one.health.value) == (status, health)
    assert STYLES["plugin"][found.status] == code
    assert STYLES["plain"][found.status] == 0


def test_floors_give_way_to_limits_of_the_operator_and_can_be_turned_off() -> None:
    survey = {
        "inventory": {"accelerator": "neuron", "lnc": 1, "devices": []},
        "holders": [],
        "instance_type": "trn1.2xlarge",
        "versions": {},
        "boot_id": None,
    }

    def given(**settings: Any) -> set[str]:
        workers = Runner(RunnerSettings(**settings))._workers(None)
        workers.note_survey(survey)
        return set(workers.setup("neuroncore:0")["floors"])

    assert {MATMUL, "matmul_flops_per_second/fp32", "memory_bandwidth_bytes_per_second"} <= given()
    limit = Limit(lower=1.0, upper=None, origin="config")
    assert given(limits={"matmul_flops_per_second": limit}) == {"memory_bandwidth_bytes_per_second"}
    assert MATMUL not in given(limits={MATMUL: limit})
    assert given(floors=False) == set()


@every(
    ("origins", "words"),
    [
        ((), None),
        (("none",), "no speed limits configured: 'healthd baseline'"),
        (("none", "floor"), "only floors"),
        (("none", "baseline"), None),
        (("config", "floor"), None),
    ],
)
def test_a_node_whose_speeds_have_no_limit_says_so_first(origins: tuple[str, ...], words: str | None) -> None:
    numbers = tuple(dataclasses.replace(measured(), origin=origin) for origin in origins)
    finding = dataclasses.replace(node_kit.finding(target="cpu:0"), measurements=numbers)
    one = state(results=(node_kit.result("matmul", finding, tier=Tier.QUICK),))
    first = next(iter(node_report(one)))
    assert isinstance(first, str)
    samples = Samples()
    samples.take(one, NOW)
    if words is None:
        assert one.node in first
        assert samples.without_limits == set()
    else:
        assert words in first
        assert samples.without_limits == {one.node}
        samples.forget(one.node)
        assert samples.without_limits == set()


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


def test_limits_learned_of_files_are_printed_as_settings_for_each_kind_of_machine(tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    paths = [*fleet_files(tmp_path), *fleet_files(tmp_path / "newer", torch="2.10")]
    said = healthd(tmp_path, "baseline", *paths)
    assert said.code == 0, said.err
    assert "12 samples, 12 devices" in said.out
    found = settings_of(said.out, tmp_path).limits_by_kind()
    assert [(one.hardware, one.accelerator, one.versions) for one in found] == [
        ("trn1.2xlarge x1", "cpu", {"torch": "2.10"}),
        ("trn1.2xlarge x1", "cpu", {"torch": "2.9"}),
    ]
    for one in found:
        assert one.limits[MATMUL].lower == pytest.approx(0.85e12, rel=0.1)


def test_learned_limits_go_into_a_new_file_and_none_is_written_over(tmp_path: Path) -> None:
    out, paths = tmp_path / "new.toml", fleet_files(tmp_path)
    said = healthd(tmp_path, "baseline", *paths, "--write", str(out))
    assert (said.code, said.out) == (0, "")
    assert "review these limits" in said.err
    before = out.read_text()
    assert MATMUL in before
    said = healthd(tmp_path, "baseline", *paths, "--write", str(out))
    assert said.code == 2
    assert "exists; name a new file" in said.err
    assert out.read_text() == before


def test_series_of_too_few_samples_are_told_beside_those_that_have_a_limit() -> None:
    def series(name: str, count: int) -> SampleSeries:
        return SampleSeries(
            hardware='x" \x7f\n', accelerator="cpu", versions={}, name=name, devices=count, values=(1e9,) * count
        )

    some = [series(MATMUL, 20), series("memory_bytes_per_second", 4)]
    text = settings_text(some, [baselines.learn(one, comparisons=24) for one in some])
    assert '# "memory_bytes_per_second": no limit: 4 samples of 4 devices are too few' in text
    (table,) = tomllib.loads(text)["baselines"].values()
    assert table["hardware"] == 'x" \x7f\n'
    assert table["limits"] == {MATMUL: {"lower": 9e8}}


def test_too_few_files_and_used_nodes_are_said_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "new.toml"
    paths = fleet_files(tmp_path, count=11)
    busy = dataclasses.replace(
        wire.decode(Path(paths[0]).read_bytes(), NodeState, what="it"),
        allocated=(Allocation(by="process", holder="pid 7 (train)"),),
    )
    Path(paths[0]).write_bytes(wire.encode(busy))
    said = healthd(tmp_path, "baseline", *paths, "--write", str(out))
    assert said.code == 1
    assert "only 10 samples" in said.err
    assert "in use by pid 7 (train)" in said.err
    assert not out.exists()


@pytest.mark.parametrize("body", [b"", b"\xff", b"[3]", b'{"node": "n1"}', b"[" * 100])
def test_a_file_that_is_no_state_is_one_line_that_names_it(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "odd.json").write_bytes(body)
    said = healthd(tmp_path, "baseline", str(tmp_path / "odd.json"))
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert "odd.json: " in said.err
    assert "written by 'healthd check --json'" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--false-alarms", "0"), "--false-alarms must be more than 0"),
        (("--share-ratio", "1"), "--share-ratio must be"),
        (("--share-ratio", "nan"), "--share-ratio must be"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    found = healthd(tmp_path, "baseline", *fleet_files(tmp_path), *words)
    assert found.code == 2
    assert said in found.err


def test_a_check_judges_by_its_kind_shows_the_origin_and_leaves_other_versions_unjudged(tmp_path: Path) -> None:
    # The version that the worker reports: that of the package's metadata has no "+cu130".
    survey = wire.decode(healthd(tmp_path, "check", "matmul", "--json").out.encode(), NodeState, what="state")
    kind = kind_of(survey)
    assert kind is not None
    one = SampleSeries(
        hardware=kind.hardware,
        accelerator=kind.accelerator,
        versions=dict(kind.versions),
        name=MATMUL,
        devices=30,
        values=tuple(measured_values(30, value=1e16)),
    )
    config = tmp_path / "h.toml"
    config.write_text(settings_text([one], [baselines.learn(one, comparisons=30)]))
    said = healthd(tmp_path, "check", "matmul", "--config", str(config), "--json")
    assert said.code == 1, said.err
    found = wire.decode(said.out.encode(), NodeState, what="state")
    numbers = [m for result in found.results for finding in result.findings for m in finding.measurements]
    assert {(number.labels["dtype"], number.origin) for number in numbers} == {("bf16", "baseline"), ("fp32", "none")}
    assert {reason.code for reason in found.reasons} == {"SlowDevice"}
    config.write_text(config.read_text().replace(dict(kind.versions)["torch"], "1.0"))
    assert healthd(tmp_path, "check", "matmul", "--config", str(config), "--json").code == 0


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("memory_availble_ratio", "memory_available_ratio"),
        ("matmul_flops/bf16", "matmul_flops_per_second"),
        ("memory_bandwidth_byte_per_second@cpu:1", "memory_bandwidth_bytes_per_second"),
        ("node_all_reduce_busbw_bytes_per_second", "nodes_all_reduce_busbw_bytes_per_second"),
        ("digest_repeats_count", ""),  # measured, and judged by no limit
    ],
)
def test_a_limit_that_no_check_asks_for_is_refused_with_the_nearest_name(tmp_path: Path, name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"healthd\.toml:2: no check has a limit .*; did you mean '{near}"):
        settings_of(f'\n[limits."{name}"]\nlower = 1.0\n', tmp_path).runner()


def test_limits_of_checks_of_ones_own_are_taken_and_slips_in_other_names_are_not(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = f'[probe]\ndirectories = ["{tmp_path}/own"]\n'
    asked = settings_of(own + "[limits.fan_speed_per_second]\nlower = 1.0\n", tmp_path).runner()
    assert set(asked.limits) == {"fan_speed_per_second"}
    with pytest.raises(ConfigError, match="did you mean 'memory_available_ratio'"):
        settings_of(own + "[limits.memory_availble_ratio]\nlower = 1.0\n", tmp_path).runner()


def test_every_limit_that_a_check_asks_for_can_be_set() -> None:
    asked = {f"efa_{key.removeprefix('max_')}" for key in vars(efa.Params) if key.endswith("_per_second")}
    for file in Path(checks.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                asked |= asked_in(function)
    assert {"efa_rx_drops_per_second", "load_per_core_ratio", "matmul_flops_per_second"} <= asked
    assert asked - limited_names() == set()


def asked_in(function: ast.FunctionDef) -> set[str]:
    """The names of limits that a function asks for as text, or by a variable that holds text."""
    found: set[str] = set()
    held: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for target in node.targets:
                held.setdefault(ast.unparse(target), set()).add(node.value.value)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ctx.limit", "bound", "labelled_limit"):
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant):
                    found.add(argument.value)
                found |= held.get(ast.unparse(argument), set())
    return found - {"node"}
