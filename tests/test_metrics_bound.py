"""
How many series a node has at most: all checks, 32 cores, everything measured, and more labels than anybody wants.

The contract is 600 at 32 cores. Whatever any check may measure is fed here, by the names that stand in the code, so a
measurement that gets series without a bound on its labels fails a test.
"""

from __future__ import annotations

import ast
import collections
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import healthd.node.http.metrics
from checks.contract import Finding, Measurement, Status, Tier
from checks.discover import builtin_checks
from checks.limits import _UNITS
from healthd.core.http.server import exposition
from healthd.core.model import CheckResult
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.http.metrics import registry_of
from healthd.node.state.store import NodeStore
from tests.node.node_kit import BOOT, MovedClock, finding, measured, result, settings, survey

MOST_SERIES = 600 - 12  # the steps of jobs have twelve (tests/integrations/steps)
CORES = tuple(f"neuroncore:{number}" for number in range(32))
DEVICES = tuple(f"neuron:{number}" for number in range(16))
CHECKS = Path(__file__).parent.parent / "checks"
COLLECTIVES = tuple(name for name, info in builtin_checks().items() if info.collective)
STRANGE = 40  # values of a label that nobody has bounded


def series(book: NodeStore) -> list[str]:
    """Each sample, by name and labels."""
    text, _ = exposition(registry_of(book, {}), "text/plain")
    return [
        f"{sample.name}{sorted(sample.labels.items())}"
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    ]


def book_of(folder: Path) -> NodeStore:
    """A node with every check that comes with healthd, none of them run."""
    chosen = settings(folder)
    book = NodeStore(chosen, enabled_checks(builtin_checks(), chosen), clock=MovedClock().clock, boot_id=BOOT)
    book.set_survey(survey())
    return book


def measurements_of(check: str) -> Iterator[Finding]:
    """What the device checks and the collectives measure in a deep run of 32 cores."""
    if check == "matmul":
        for core in CORES:
            for dtype in ("fp32", "bf16", "fp16", "fp8"):
                yield measured("matmul_flops_per_second", 1e12, core, dtype=dtype)
    if check == "memory":
        yield from (measured("memory_bandwidth_bytes_per_second", 1e11, core) for core in CORES)
    if check in COLLECTIVES:
        for ranks, dtype in (("32", "fp32"), ("32", "bf16"), ("32", "fp16"), ("8", "fp32"), ("2", "fp32")):
            for size in (1024, 2**19, 2**20, 2**23, 2**27):
                for kind in ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds"):
                    yield measured(f"{check}_{kind}", 1.0, size_bytes=str(size), dtype=dtype, ranks=ranks)


def faults_of(check: str) -> Iterator[Finding]:
    """More of what is not pass than is shown."""
    for target in (*DEVICES, "node"):
        for reason in ("HardwareErrors", "MissingDevice"):
            yield finding(Status.FAIL, reason, target)


def everything(book: NodeStore, extra: Sequence[CheckResult] = ()) -> NodeStore:
    for spec in book.specs:
        found = (*measurements_of(spec.name), *faults_of(spec.name))
        book.record(result(spec.name, *found, tier=Tier.DEEP if spec.tier is not Tier.PASSIVE else Tier.PASSIVE))
    for one in extra:
        book.record(one)
    return book


def test_node_of_32_cores_has_at_most_600_series_with_every_check_and_every_fault(tmp_path: Path) -> None:
    found = series(everything(book_of(tmp_path)))
    assert len(found) == len(set(found))
    names = collections.Counter(one.partition("[")[0] for one in found)
    assert names["healthd_finding"] == 48
    assert names["healthd_device_matmul_flops_per_second"] == 64
    assert names["healthd_device_memory_bandwidth_bytes_per_second"] == 32
    assert len(COLLECTIVES) == 7
    assert (
        names["healthd_collective_duration_seconds"]
        == 7 * 4
        == names["healthd_collective_bus_bandwidth_bytes_per_second"]
    )
    assert names["healthd_check_status"] == 5 * len(builtin_checks())
    assert len(found) <= MOST_SERIES, names


def test_what_has_not_run_yet_has_no_more_series(tmp_path: Path) -> None:
    assert len(series(book_of(tmp_path))) <= MOST_SERIES


def named_in(path: Path) -> set[str]:
    """The names of measurements in a file: its strings that end in a unit, also behind a check's own name."""
    endings = (*(suffix for suffix, _ in _UNITS), "_per_second", "_per_hour")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            if node.value.startswith("_"):  # the rest of f"{check}_busbw_bytes_per_second"
                found |= {check + node.value for check in builtin_checks()}
            else:
                found.add(node.value)
    return {name for name in found if name.endswith(endings)}


@functools.cache
def measurement_names() -> tuple[str, ...]:
    files = [*CHECKS.rglob("*.py"), Path(healthd.node.http.metrics.__file__)]
    return tuple(sorted(set().union(*map(named_in, files))))


def test_names_of_measurements_are_found_in_the_code() -> None:
    found = set(measurement_names())
    assert {"matmul_flops_per_second", "memory_bandwidth_bytes_per_second", "neuron_cores_count"} <= found
    assert {f"{name}_busbw_bytes_per_second" for name in COLLECTIVES} <= found


class AnyLabel(dict[str, str]):
    """Has every label that somebody asks for, always with the same strange value but for those that are given."""

    def __init__(self, value: str, **given: str) -> None:
        super().__init__(given)
        self.value = value

    def get(self, key: str, default: object = None) -> str:
        return self[key]

    def __missing__(self, key: str) -> str:
        return self.value


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The series of a node with everything measured."""
    return series(everything(book_of(tmp_path_factory.mktemp("before"))))


@pytest.mark.parametrize("given", [{}, {"dtype": "fp32"}, {"dtype": "fp32", "ranks": "32"}, {"size_bytes": "1024"}])
def test_no_measurement_makes_series_by_labels_that_are_not_bounded(
    tmp_path: Path, before: list[str], given: dict[str, str]
) -> None:
    numbers = tuple(
        Measurement(name=name, value=1.0, lower=None, upper=None, origin="none", labels=AnyLabel(str(value), **given))
        for name in measurement_names()
        for value in range(STRANGE)
    )
    told = Finding(status=Status.PASS, reason=None, message="m", target=CORES[0], measurements=numbers)
    extra = [result(name, told, *measurements_of(name), *faults_of(name), tier=Tier.DEEP) for name in builtin_checks()]
    after = series(everything(book_of(tmp_path), extra))
    added = sorted(set(after) - set(before))
    assert len(after) <= MOST_SERIES, added[:8]
