"""The training step: real steps with real torch, every place of them corrupted, and the pure comparison of devices."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from checks.contract import Evidence, Finding, Limit, Missing, Status, Tier
from checks.training.digests import Digester, judge_steps, missed_ratio
from checks.training.environment import COMPILER_PREFIXES, NUMERIC_PREFIXES
from checks.training.model import (
    BACKWARD,
    FORMATS,
    FORWARD,
    INPUTS,
    OPTIMIZER,
    all_places,
    describe,
    exact_product,
    make_batch,
    make_parameters,
    phase_of,
    scaled_product,
)
from checks.training.step import Step, Strikes, corrupting, first_state, run_step
from checks.training.train_step import train_step
from checks.training.work import EXACT_RATIO, SMALL, STEP_REVISION, built_in, parity_limit, run_parity
from checks.worker.fault_injection import faulty
from checks.worker.faults import parse_fault
from checks.worker.protocol import encode, from_evidence
from healthd.core.model.results import digests_of
from tests.every import every
from tests.profile import some

MAGNITUDES = (1e-12, 1e-3, 1.0, None)  # the last bit of the mantissa, two errors, a bit of the exponent
PLACES = list(all_places())
SHORT: dict[str, Any] = {"repeats": 2, "parity_steps": 0, "timed": 1}

PASS = ("pass", None)
UNSURE = ("fail", "DigestMismatch")
CORRUPT = ("fail", "SilentCorruption")


def findings(items: Sequence[Any]) -> list[Finding]:
    return [item for item in items if isinstance(item, Finding)]


def evidence_of(items: Sequence[Any]) -> list[Evidence]:
    return [item for item in items if isinstance(item, Evidence)]


def wrong(items: Sequence[Any]) -> list[Finding]:
    return [item for item in findings(items) if item.status is not Status.PASS]


@pytest.fixture
def one_step(cpu_device: Any) -> Callable[..., tuple[Step, dict[str, str]]]:
    """A step of the small model and its digests: `one_step("fp32", change=...)`."""
    torch = cpu_device.torch
    digester = Digester(cpu_device)

    def run(dtype: str = "fp32", **options: Any) -> tuple[Step, dict[str, str]]:
        form = FORMATS[dtype]
        state = first_state(torch, make_parameters(torch, SMALL), form.wide, "cpu")
        done = run_step(torch, SMALL, form, state, make_batch(torch, SMALL, 0), look=digester.look, **options)
        return done, digester.finish(done.places)

    return run


# --- healthy ----------------------------------------------------------------------------------------------------------


def test_healthy_device_passes_with_numbers_for_each_question(context: Any, cpu_device: Any) -> None:
    said = list(train_step(context(train_step, device=cpu_device)))
    assert not wrong(said)
    assert [item.data["dtype"] for item in evidence_of(said)] == ["fp32", "bf16"]
    names = {measured.name for item in findings(said) for measured in item.measurements}
    assert names == {
        "train_step_error_ratio",
        "train_step_steps_per_second",
        "train_step_tokens_per_second",
        "train_step_seconds",
        "train_step_loss_error_ratio",
        "train_step_loss",
    }
    (verdict,) = judge_steps(evidence_of(said), [])
    assert (verdict.status, verdict.target) == (Status.PASS, "cpu:0")
    assert "nothing to compare with" in verdict.message


def test_the_same_step_has_the_same_digests_in_every_run(context: Any, cpu_device: Any) -> None:
    first, second = (evidence_of(list(train_step(context(train_step, device=cpu_device, **SHORT)))) for _ in range(2))
    assert first == second
    assert all(len(item.data["digests"]) == len(PLACES) for item in first)


def test_every_place_is_seen_in_each_phase(one_step: Any) -> None:
    _, digests = one_step()
    assert sorted(digests) == sorted(PLACES)
    assert {phase_of(place) for place in digests} == {FORWARD, BACKWARD, OPTIMIZER}


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_errors_of_a_healthy_step_are_far_below_their_bounds(cpu_device: Any, dtype: str) -> None:
    work = built_in(cpu_device, dtype, large=False)
    done = work.run()
    errors = work.errors(done)
    assert [error.place for error in errors] == list(done.places)
    assert 0 < max(error.share for error in errors) < 0.25


def test_evidence_of_all_dtypes_fits_into_lines_of_the_protocol(context: Any, cpu_device: Any) -> None:
    for item in evidence_of(list(train_step(context(train_step, device=cpu_device, **SHORT)))):
        assert len(encode({"kind": "evidence", "evidence": from_evidence(item)})) < 16 * 1024


def test_key_has_all_that_may_change_bits_of_healthy_devices(context: Any, cpu_device: Any) -> None:
    torch = cpu_device.torch
    before = torch.get_num_threads()
    keys = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            keys |= {
                item.key for item in evidence_of(list(train_step(context(train_step, device=cpu_device, **SHORT))))
            }
    finally:
        torch.set_num_threads(before)
    assert len(keys) == 4  # two dtypes, two numbers of threads
    assert all(key.startswith(cpu_device.key) for key in keys)


def test_start_and_settings_of_libraries_are_told_for_the_comparison_over_nodes(
    context: Any, cpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> tuple[str, str]:
        one, *_ = evidence_of(list(train_step(context(train_step, device=cpu_device, **SHORT))))
        (made,) = digests_of([one], lambda: "machine")
        assert one.data["over_nodes"] in made.key
        return one.key, made.key

    for name in [name for name in os.environ if name.startswith((*NUMERIC_PREFIXES, *COMPILER_PREFIXES))]:
        monkeypatch.delenv(name)
    key, over_nodes = told()
    start = built_in(cpu_device, "fp32", large=False).start
    assert f"revision {STEP_REVISION} | start {start} | settings none" in over_nodes
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert told()[0] == key
    assert told()[1] != over_nodes
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
    assert told()[1] != over_nodes
    # Another processor draws other parameters; devices of one node are still compared.
    monkeypatch.delenv("NEURON_CC_FLAGS")
    draw = cpu_device.torch.randn
    monkeypatch.setattr(cpu_device.torch, "randn", lambda *size, **more: draw(*size, **more).mul_(1 + 2**-20))
    assert told()[0] == key
    assert told()[1] != over_nodes


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", some(MAGNITUDES, 2))
def test_one_wrong_value_is_found_at_every_place_and_named(one_step: Any, cpu_device: Any, magnitude: Any) -> None:
    _, clean = one_step()
    for place in PLACES:
        _, digests = one_step(change=corrupting(cpu_device.torch, {place: magnitude}))
        first = next(name for name, value in digests.items() if value != clean[name])
        assert first == place


@pytest.mark.parametrize(
    ("place", "magnitude", "words"),
    [
        ("embed.token", "", "layer embed, operation token"),
        ("block0.softmax", ":1e-12", "layer block0, operation softmax"),
        ("block1.gelu_grad", ":1e-3", "layer block1, gradient of gelu"),
        ("head.loss_grad", ":1", "layer head, gradient of loss"),
        ("block0.qkv_weight_grad", ":1e-12", "layer block0, gradient of qkv_weight"),
        ("head.logits_weight_update", ":1e-3", "layer head, logits_weight after the optimizer"),
    ],
)
def test_injected_fault_is_found_with_device_layer_operation_and_repeat(
    context: Any, cpu_device: Any, place: str, magnitude: str, words: str
) -> None:
    fault = parse_fault(f"train_step.{place}@cpu:0=corrupt{magnitude}", {"train_step": "device"})
    said = list(train_step(context(train_step, device=faulty(cpu_device, [fault]), **SHORT)))
    assert [(item.reason, item.target) for item in wrong(said)] == [("SilentCorruption", "cpu:0")] * 2
    for dtype, item in zip(("fp32", "bf16"), wrong(said), strict=True):
        assert f"{dtype} step repeated 2 times from the same state: {words} differs in repeat 2" in item.message
    assert not list(judge_steps(evidence_of(said), []))  # no vote, and no pass


def test_value_that_is_wrong_in_every_repeat_is_found_by_the_reference(context: Any, tampering: Any) -> None:
    """A device that always errs alike has one digest: float64 on the host finds it, at the first place it spoils."""
    shape = (SMALL.batch, SMALL.tokens, 4 * SMALL.width)
    seen: list[int] = []

    def scale(tensor: Any, _: int) -> Any:
        if tuple(tensor.shape) == shape and not seen:
            seen.append(1)
            return tensor * 1.01
        return tensor

    said = list(train_step(context(train_step, device=tampering(scale), dtypes=["fp32"], **SHORT)))
    (finding,) = wrong(said)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "WrongResult", "cpu:0")
    assert "fp32 step is wrong from layer block0, operation up on: off by 0.01" in finding.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_no_number_is_wrong(context: Any, tampering: Any, value: float) -> None:
    def spoil(tensor: Any, number: int) -> Any:
        if tensor.is_floating_point() and tensor.dim() == 3 and number < 5:
            tensor.view(-1)[0] = value
        return tensor

    said = list(train_step(context(train_step, device=tampering(spoil), dtypes=["fp32"], **SHORT)))
    assert "WrongResult" in {item.reason for item in wrong(said)}


def test_weights_of_one_layer_that_are_off_by_a_hundredth_lose_parity(context: Any, cpu_device: Any) -> None:
    """The device trains something else than the reference does: the loss says so, whichever layer it is."""
    torch = cpu_device.torch
    names = [name for name in make_parameters(torch, SMALL) if name.endswith(("up_weight", "qkv_weight"))]
    assert run_parity(cpu_device, SMALL, FORMATS["fp32"], 20).worst[1] < EXACT_RATIO / 50
    for name in some(names, 2):
        done = run_parity(cpu_device, SMALL, FORMATS["fp32"], 20, scales={name: 1.01})
        assert done.worst[1] > 2 * EXACT_RATIO, name


def test_lost_parity_is_a_finding_with_the_step(context: Any, cpu_device: Any) -> None:
    limits = {"train_step_loss_error_ratio": Limit(lower=None, upper=1e-12, origin="config")}
    said = train_step(context(train_step, device=cpu_device, limits=limits, dtypes=["fp32"], repeats=2, timed=1))
    (finding,) = wrong(list(said))
    assert (finding.status, finding.reason) == (Status.FAIL, "ParityLost")
    assert "difference at most at step" in finding.message


def test_a_soak_repeats_for_as_long_as_it_is_told_and_names_the_one_step_that_differs(
    context: Any, cpu_device: Any, tampering: Any
) -> None:
    def flip(tensor: Any, number: int) -> Any:
        return tensor.bitwise_not_() if tensor.dtype is cpu_device.torch.int64 and number == 120 else tensor

    # Reads: the digests of each repeat. The reference reads later.
    options = {**SHORT, "seconds": 0.1, "repeats": 150, "dtypes": ["fp32"]}
    said = list(train_step(context(train_step, device=tampering(flip), **options)))
    (found,) = wrong(said)
    assert found.reason == "SilentCorruption"
    assert "differs in repeat 120 (1 of " in found.message
    assert evidence_of(said)[0].data["repeats"] >= 150


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_of_one_step_in_many_strikes_by_chance_and_each_step_that_it_hit_is_counted(
    context: Any, cpu_device: Any, seed: int
) -> None:
    fault = parse_fault("train_step.block1.gelu_grad@cpu:0=corrupt:1e-3/25", {"train_step": "device"})
    device = faulty(cpu_device, [fault])
    strikes = Strikes(device, seed)
    hit = [number for number in range(60) if strikes.change(number) is not None]
    options = {**SHORT, "repeats": 60, "dtypes": ["fp32"], "seed": seed}
    said = list(train_step(context(train_step, device=device, **options)))
    assert (evidence_of(said)[0].data["stable"], bool(hit)) in ((True, False), (False, True))
    found = [one.message for one in wrong(said) if one.reason == "SilentCorruption"]
    if hit:
        words = f"layer block1, gradient of gelu differs in repeat {hit[0] + 1} ({len(hit)} of 60 differ)"
        assert [words in message for message in found] == [True]
    else:
        assert found == []


def test_a_fault_of_one_step_in_many_hits_as_many_as_it_says_and_devices_in_steps_of_their_own(
    tampering: Any,
) -> None:
    count, one_in = 200_000, 100
    hits = []
    for target in ("cpu:0", "cpu:1"):
        fault = parse_fault(f"train_step.block1.gelu=corrupt/{one_in}", {"train_step": "device"})
        strikes = Strikes(faulty(tampering(target=target), [fault]), 7)
        hits.append({number for number in range(count) if strikes.change(number) is not None})
    for found in hits:
        assert abs(len(found) - count / one_in) < 5 * (count / one_in) ** 0.5  # five standard deviations
    assert len(hits[0] & hits[1]) < 100


@pytest.mark.parametrize(
    ("repeats", "words"),
    [(3, "0.03 %"), (20, "0.2 %"), (200, "2 %"), (30_000, "95 %"), (100_000, "99.995 %")],
)
def test_a_pass_says_how_probably_a_rare_fault_would_be_caught(repeats: int, words: str) -> None:
    device = item("cpu:0", "a")
    device = dataclasses.replace(device, data={**device.data, "repeats": repeats})
    (verdict,) = judge_steps([device], [])
    assert f"a fault in 1 of 10,000 steps would be caught with {words} probability" in verdict.message
    (missed,) = [one for one in verdict.measurements if one.name == "train_step_missed_ratio"]
    assert missed.labels == {"one_in": "10000"}
    assert missed.value == pytest.approx((1 - 1e-4) ** repeats)


def test_the_odds_are_those_of_faults_that_strike_by_chance(cpu_device: Any) -> None:
    """Of 2,000 soaks of 50 steps with a fault of one step in 25, as many miss it as the formula says."""
    fault = parse_fault("train_step.block1.gelu=corrupt/25", {"train_step": "device"})
    device = faulty(cpu_device, [fault])
    soaks, repeats = 2000, 50
    missed = 0
    for seed in range(soaks):
        strikes = Strikes(device, seed)
        missed += all(strikes.change(number) is None for number in range(repeats))
    expected = missed_ratio(repeats, 25)
    assert abs(missed / soaks - expected) < 5 * (expected * (1 - expected) / soaks) ** 0.5


def test_slow_steps_fail_their_limit(context: Any, cpu_device: Any) -> None:
    limits = {"train_step_steps_per_second/bf16-small": Limit(lower=1e9, upper=None, origin="config")}
    said = list(train_step(context(train_step, device=cpu_device, limits=limits, **SHORT)))
    (finding,) = wrong(said)
    assert (finding.reason, finding.measurements[0].labels["model"]) == ("SlowDevice", "bf16-small")
    assert "is below 1e+09 (limit from config)" in finding.message


def test_places_that_a_device_does_not_repeat_are_left_out_and_said(context: Any, cpu_device: Any) -> None:
    left = ["embed.token_weight_grad"]
    fault = parse_fault("train_step.embed.token_weight_grad=corrupt", {"train_step": "device"})
    options = {**SHORT, "left_out": left, "dtypes": ["fp32"]}
    said = list(train_step(context(train_step, device=cpu_device, **options)))
    (verdict,) = judge_steps(evidence_of(said), [])
    assert "left out because the device does not repeat them: embed.token_weight_grad" in verdict.message
    # What follows from it is still seen.
    said = list(train_step(context(train_step, device=faulty(cpu_device, [fault]), **options)))
    assert "layer embed, token_weight after the optimizer" in wrong(said)[0].message


def test_dtype_and_place_that_are_not_there_are_one_line(context: Any, cpu_device: Any) -> None:
    with pytest.raises(ValueError, match="no such dtype 'fp4'; choose from: fp32, bf16, fp16, fp8"):
        list(train_step(context(train_step, device=cpu_device, dtypes=["fp4"])))
    with pytest.raises(ValueError, match=r"no place 'embed\.tokn'; did you mean 'embed\.token'"):
        list(train_step(context(train_step, device=cpu_device, left_out=["embed.tokn"])))


def skips(said: Sequence[Any]) -> list[tuple[str | None, str]]:
    return [(item.reason, item.message) for item in findings(said) if item.status is Status.SKIP]


def test_device_with_narrow_sums_skips_fp16_in_deep(context: Any, tampering: Any) -> None:
    device = tampering(narrow_sums=("fp16",))
    said = list(train_step(context(train_step, device=device, tier=Tier.DEEP, large=False, **SHORT)))
    text = "no fp16 step on this device: its sums are not kept in fp32, so no error bound applies"
    assert ("NotApplicable", text) in skips(said)


# --- fp8 --------------------------------------------------------------------------------------------------------------

FP8: dict[str, Any] = {**SHORT, "dtypes": ["fp8"]}


@pytest.mark.thorough
def test_fp8_is_done_in_deep_where_the_kind_of_device_declares_it_and_is_right(context: Any, cpu_device: Any) -> None:
    inventory = {"accelerator": "cpu"}
    options = {**SHORT, "large": False, "tier": Tier.DEEP, "inventory": inventory}
    said = list(train_step(context(train_step, device=cpu_device, **options)))
    assert not wrong(said)
    assert [item.data["dtype"] for item in evidence_of(said)] == ["fp32", "bf16", "fp16", "fp8"]
    (verdict,) = judge_steps(evidence_of(said), [])
    assert "(fp32, bf16, fp16, fp8)" in verdict.message


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [(None, "this accelerator"), ("xla", "xla"), ("neuron", "neuron"), ("another", "another")],
)
def test_fp8_is_skipped_with_the_reason_where_the_kind_of_device_does_not_declare_it(
    context: Any, cpu_device: Any, accelerator: Any, words: str
) -> None:
    said = list(train_step(context(train_step, device=cpu_device, inventory={"accelerator": accelerator}, **FP8)))
    text = f"no fp8 step on this device: {words} declares no scaled products of float8_e4m3fn"
    assert skips(said) == [("NotApplicable", text)]
    assert len(said) == 1


def test_fp8_is_skipped_where_the_device_refuses_a_scaled_product(context: Any, tampering: Any) -> None:
    device = tampering(torch_device="meta")  # it has no numbers, so that none can be read
    said = list(train_step(context(train_step, device=device, inventory={"accelerator": "cpu"}, **FP8)))
    ((reason, message),) = skips(said)
    assert reason == "NotApplicable"
    assert message.startswith("no fp8 step on this device: Cannot copy out of meta tensor")


def test_device_that_fails_at_a_scaled_product_is_no_device_without_them(
    context: Any, cpu_device: Any, tampering: Any
) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(cpu_device.torch, name)

        def _scaled_mm(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA error: unspecified launch failure")

    ctx = context(train_step, device=tampering(torch=Failing()), inventory={"accelerator": "cuda"}, **FP8)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        list(train_step(ctx))


@pytest.mark.parametrize("scale", [2.0**-40, 1e-3, 1.0, 447.9, 2.0**40])
def test_scaled_products_are_those_of_their_rounded_operands_and_rounding_is_that_of_e4m3(
    cpu_device: Any, scale: float
) -> None:
    torch = cpu_device.torch
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(32, 48, generator=generator).mul(scale).to(torch.bfloat16) for _ in range(2))
    got = scaled_product(torch, x, weight, "float8_e4m3fn").double()
    wanted = exact_product(torch, x, weight, "float8_e4m3fn")
    largest = float(wanted.abs().max())
    assert float((got - wanted).abs().max()) <= 2.0**-8 * largest
    plain = x.double() @ weight.double().t()
    off = float((wanted - plain).abs().max()) / float(plain.abs().max())
    assert 1e-3 < off < 2.0**-4  # that is rounded at all, and to four bits


def test_gradients_of_scaled_products_are_those_of_plain_ones(cpu_device: Any) -> None:
    torch = cpu_device.torch
    x, weight = (torch.randn(2, 16, 32).to(torch.bfloat16), torch.randn(16, 32).to(torch.bfloat16))
    found = []
    for product in (lambda a, b: scaled_product(torch, a, b, "float8_e4m3fn"), lambda a, b: a @ b.t()):
        pair = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        found.append(torch.autograd.grad(product(*pair).float().sum(), pair))
    for scaled, plain in zip(*found, strict=True):
        assert torch.allclose(scaled.float(), plain.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("place", some([place for place in INPUTS if place != "block0.qkv"], 4))
def test_a_wrong_product_of_fp8_is_found_by_the_reference(cpu_device: Any, place: str) -> None:
    """One element that is off by the largest: the places before it are right, and those after it go on from it."""
    work = built_in(cpu_device, "fp8", large=False)

    def change(name: str, tensor: Any) -> Any:
        if name != place:
            return tensor
        flat = tensor.detach().clone().view(-1)
        flat[7] = flat[7] + flat.abs().max()
        return tensor + (flat.view(tensor.shape) - tensor).detach()

    errors = work.errors(work.run(change=change))
    assert next(error.place for error in errors if error.share > 1.0) == place


@pytest.mark.thorough
def test_fp8_trains_with_the_loss_of_the_reference(cpu_device: Any) -> None:
    done = run_parity(cpu_device, SMALL, FORMATS["fp8"], 40)
    assert done.losses[-1] < done.losses[0] - 0.5
    assert 0 < done.mean < parity_limit(FORMATS["fp8"]) / 2


# --- devices beside each other ----------------------------------------------------------------------------------------


def item(target: str, value: str, *, place: str = "block1.gelu", key: str = "cpu | a", stable: bool = True) -> Evidence:
    digests = {"embed.token": "0" * 16, place: value * 16, "head.loss": value * 16}
    data = {"dtype": "fp32", "digests": digests, "repeats": 3, "stable": stable, "left_out": []}
    return Evidence(target=target, key=key, data=json.loads(json.dumps(data)))


def judged(devices: Sequence[Evidence], missing: Sequence[Missing] = ()) -> dict[str, tuple[str, str | None]]:
    return {f.target: (f.status.value, f.reason) for f in judge_steps(devices, missing)}


@every(
    ("values", "expected"),
    [
        ("a", [PASS]),
        ("aa", [PASS, PASS]),
        ("ab", [UNSURE, UNSURE]),
        ("aba", [PASS, CORRUPT, PASS]),
        ("abc", [UNSURE] * 3),
        ("aabb", [UNSURE] * 4),
        ("aaabc", [PASS, PASS, PASS, CORRUPT, CORRUPT]),
    ],
)
def test_minority_of_at_least_three_is_accused_and_two_are_one_of_both(values: str, expected: Any) -> None:
    devices = [item(f"cpu:{index}", value) for index, value in enumerate(values)]
    found = judged(devices)
    assert [found[device.target] for device in devices] == expected


def test_accusation_names_the_first_place_and_step_that_differ() -> None:
    accused = [f for f in judge_steps([item(f"cpu:{i}", v) for i, v in enumerate("aab")], []) if f.reason]
    assert [f.message for f in accused] == [
        "fp32 step 1: layer block1, operation gelu differs from the 2 others of its kind"
    ]
    later = [item(f"cpu:{i}", v, place="after/200") for i, v in enumerate("aab")]
    (after,) = [f.message for f in judge_steps(later, []) if f.reason]
    assert after.startswith("fp32 after step 200: a parameter differs from")
    both = [f.message for f in judge_steps([item("cpu:0", "a"), item("cpu:1", "b")], [])]
    assert all("one of cpu:0, cpu:1" in text for text in both)


def test_only_devices_of_one_key_are_compared_and_unstable_ones_have_no_vote() -> None:
    devices = [item("cpu:0", "a"), item("cpu:1", "a"), item("cpu:2", "b", key="cpu | another")]
    assert judged(devices) == dict.fromkeys(("cpu:0", "cpu:1", "cpu:2"), PASS)
    devices = [item("cpu:0", "a"), item("cpu:1", "b", stable=False)]
    assert judged(devices) == {"cpu:0": PASS}


def test_device_that_is_unstable_in_one_dtype_gets_no_pass_for_the_other() -> None:
    other = dataclasses.replace(item("cpu:1", "a", stable=False), key="cpu | a | bf16")
    assert judged([item("cpu:0", "a"), item("cpu:1", "a"), other]) == {"cpu:0": PASS}


def test_device_without_evidence_is_missed_in_words_and_gets_no_pass() -> None:
    gone = [Missing(target="cpu:1", reason="Timeout", message="no answer in 2 s")]
    (finding,) = judge_steps([item("cpu:0", "a")], gone)
    assert (finding.target, finding.status) == ("cpu:0", Status.PASS)
    assert "nothing from cpu:1" in finding.message
    assert list(judge_steps([], gone)) == []


def test_same_evidence_in_another_order_gives_the_same_findings() -> None:
    devices = [item(f"cpu:{index}", value) for index, value in enumerate("abcab")]
    assert list(judge_steps(devices, [])) == list(judge_steps(devices[::-1], []))


def test_places_read_as_layer_operation_and_phase() -> None:
    assert describe("block1.gelu") == "layer block1, operation gelu"
    assert describe("block1.gelu_grad") == "layer block1, gradient of gelu"
    assert describe("block1.up_weight_update") == "layer block1, up_weight after the optimizer"
    assert len(PLACES) == len(set(PLACES)) == 90
