"""The digest probe: real work, and the pure comparison of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from checks.contract import Evidence, Finding, Missing, Status
from checks.device.digest import digest, judge_digests
from tests.every import every


def evidence(target: str, value: str, *, key: str = "cpu | a", stable: bool = True) -> Evidence:
    return Evidence(target=target, key=key, data={"digest": value * 64, "repeats": 4, "stable": stable})


def judged(devices: Sequence[Evidence], missing: Sequence[Missing] = ()) -> dict[str, tuple[str, str | None]]:
    return {f.target: (f.status.value, f.reason) for f in judge_digests(devices, missing)}


PASS = ("pass", None)
UNSURE = ("fail", "DigestMismatch")
CORRUPT = ("fail", "SilentCorruption")


def test_same_work_gives_the_same_bits_in_every_repeat_and_run(context: Any, cpu_device: Any) -> None:
    first, second = (list(digest(context(digest, device=cpu_device))) for _ in range(2))
    assert first == second
    (item,) = first
    assert isinstance(item, Evidence)
    assert item.key == cpu_device.key
    assert item.data["repeats"] == 4
    assert judged([item]) == {"cpu:0": PASS}


def test_number_of_threads_neither_changes_the_digest_nor_is_left_changed(context: Any, cpu_device: Any) -> None:
    torch = cpu_device.torch
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        many = list(digest(context(digest, device=cpu_device, repeats=2)))
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert list(digest(context(digest, device=cpu_device, repeats=2))) == many
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("read", [1, 2, 6, 8])
def test_device_that_differs_from_itself_is_corrupt(context: Any, tampering: Any, read: int) -> None:
    """Any bit of any tensor in any of the repeats, which read four tensors each."""

    def flip(tensor: Any, number: int) -> Any:
        return tensor.neg_() if number == read else tensor

    finding, item = digest(context(digest, device=tampering(flip), repeats=2))
    assert isinstance(finding, Finding)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "SilentCorruption", "cpu:0")
    assert isinstance(item, Evidence)
    # It has no vote, and gets no pass from the comparison.
    assert judged([item, evidence("cpu:1", "a")]) == {"cpu:1": PASS}


def test_device_that_is_wrong_the_same_way_each_time_is_found_by_its_peers(context: Any, tampering: Any) -> None:
    wrong = tampering(lambda tensor, _: tensor + 1, target="cpu:1")
    good, bad = (next(iter(digest(context(digest, device=one, repeats=2)))) for one in (tampering(), wrong))
    other = Evidence(target="cpu:2", key=good.key, data=good.data)  # type: ignore[union-attr]
    assert judged([good, bad, other]) == {"cpu:0": PASS, "cpu:1": CORRUPT, "cpu:2": PASS}  # type: ignore[list-item]


@every(
    ("digests", "expected"),
    [
        ("a", [PASS]),
        ("aa", [PASS, PASS]),
        ("ab", [UNSURE, UNSURE]),
        ("aba", [PASS, CORRUPT, PASS]),
        ("abc", [UNSURE] * 3),
        ("aabb", [UNSURE] * 4),
        ("aaab", [PASS, PASS, PASS, CORRUPT]),
        ("aaabc", [PASS, PASS, PASS, CORRUPT, CORRUPT]),
        ("aabc", [UNSURE] * 4),
    ],
)
def test_majority_of_at_least_three_names_the_minority(digests: str, expected: list[tuple[str, str | None]]) -> None:
    devices = [evidence(f"cpu:{index}", value) for index, value in enumerate(digests)]
    assert list(judged(devices).values()) == expected


def test_two_that_differ_are_one_of_both_in_words(context: Any) -> None:
    findings = list(judge_digests([evidence("cpu:0", "a"), evidence("cpu:1", "b")], []))
    assert all("one of cpu:0, cpu:1" in finding.message for finding in findings)


def test_devices_of_different_kinds_are_not_compared() -> None:
    devices = [evidence("cpu:0", "a"), evidence("cpu:1", "a"), evidence("cpu:2", "b", key="cpu | another")]
    assert judged(devices) == {"cpu:0": PASS, "cpu:1": PASS, "cpu:2": PASS}


def test_device_without_evidence_gets_no_pass_and_is_missed_in_words() -> None:
    """Rival faults 2 and 3: killed or silent is never a pass. The runner says what became of it."""
    gone = [
        Missing(target="cpu:1", reason="Timeout", message="no answer in 2 s"),
        Missing(target="cpu:2", reason="MissingDevice", message="no such device"),
    ]
    (finding,) = judge_digests([evidence("cpu:0", "a")], gone)
    assert (finding.target, finding.status) == ("cpu:0", Status.PASS)
    assert "nothing from cpu:1, cpu:2" in finding.message
    assert list(judge_digests([], gone)) == []


def test_same_evidence_in_another_order_gives_the_same_findings() -> None:
    """Rival fault 9."""
    devices = [evidence(f"cpu:{index}", value) for index, value in enumerate("abcab")]
    assert list(judge_digests(devices, [])) == list(judge_digests(devices[::-1], []))


def test_pass_shows_how_many_repeats_and_peers_it_rests_on() -> None:
    (first, _) = judge_digests([evidence("cpu:0", "a"), evidence("cpu:1", "a")], [])
    assert {m.name: m.value for m in first.measurements} == {"digest_repeats_count": 4.0, "digest_peers_count": 1.0}
