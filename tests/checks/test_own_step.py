"""A training step of the user's own, as the docs give it: what is asked of it, and what is said of one that is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Evidence, Finding, Status
from checks.training.digests import judge_steps
from checks.training.model import describe
from checks.training.own import own_step
from checks.training.probing import repeat
from checks.training.train_step import train_step
from checks.worker.fault_injection import faulty
from checks.worker.faults import parse_fault

ROOT = Path(__file__).parents[2]
XLA_PYTHON = Path(os.environ.get("HEALTHD_XLA_PYTHON") or ROOT / ".venv-xla" / "bin" / "python")
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training_step.md").read_text(), re.DOTALL)[0]
SCOPES = {"train_step": "device"}


@pytest.fixture
def example(tmp_path: Path) -> str:
    """The example of the docs, as a file, and the name of its step."""
    path = tmp_path / "my_step.py"
    path.write_text(EXAMPLE)
    return f"{path}:make"


def findings(items: list[Any]) -> list[Finding]:
    return [item for item in items if isinstance(item, Finding)]


def evidence(items: list[Any]) -> list[Evidence]:
    return [item for item in items if isinstance(item, Evidence)]


def test_example_of_the_docs_is_asked_what_the_built_in_step_is(context: Any, cpu_device: Any, example: str) -> None:
    said = list(train_step(context(train_step, device=cpu_device, step=example)))
    assert [item.status for item in findings(said)] == [Status.PASS, Status.PASS]
    right, fast = findings(said)
    assert re.match(r"own step correct in \d+ places; largest error, relative to what rounding explains", right.message)
    assert fast.measurements[0].name == "train_step_steps_per_second"
    (item,) = evidence(said)
    assert {"own.inner.1.output", "own.inner.1.output_grad", "own.loss", "own.classes.weight_grad"} < set(
        item.data["digests"]
    )
    (verdict,) = judge_steps([item], [])
    assert verdict.status is Status.PASS


@pytest.mark.parametrize("magnitude", ["", ":1e-12", ":0.001", ":1"])
def test_every_place_of_it_can_be_corrupted_and_is_found(cpu_device: Any, example: str, magnitude: str) -> None:
    work = own_step(cpu_device, example)
    for place in work.run().places:
        device = faulty(cpu_device, [parse_fault(f"train_step.{place}=corrupt{magnitude}", SCOPES)])
        repeated, _ = repeat(device, work, 2, ())
        (found,) = repeated.findings(device, work)
        assert (found.reason, found.target) == ("SilentCorruption", "cpu:0")
        assert f"{describe(place)} differs in repeat 2" in found.message


def test_parameters_in_bf16_have_the_bounds_of_bf16(context: Any, cpu_device: Any, tmp_path: Path) -> None:
    text = EXAMPLE.replace("Classifier(), batch", "Classifier().bfloat16(), (batch[0].bfloat16(), batch[1])")
    (tmp_path / "step.py").write_text(text)
    said = list(train_step(context(train_step, device=cpu_device, step=f"{tmp_path}/step.py:make")))
    assert {item.status for item in findings(said)} == {Status.PASS}


def test_place_that_the_step_does_not_have_is_one_line(context: Any, cpu_device: Any, example: str) -> None:
    fault = parse_fault("train_step.own.inner.7.output=corrupt", SCOPES)
    with pytest.raises(ValueError, match=r"the step has no place 'own\.inner\.7\.output'; did you mean 'own\.inner\."):
        list(train_step(context(train_step, device=faulty(cpu_device, [fault]), step=example)))


def test_device_that_always_errs_alike_is_found_by_float64(context: Any, tampering: Any, example: str) -> None:
    spoilt: list[int] = []

    def scale(tensor: Any, number: int) -> Any:
        if tensor.is_floating_point() and tuple(tensor.shape) == (32, 128) and not spoilt:
            spoilt.append(number)
            return tensor * 1.01
        return tensor

    device = tampering(scale)
    said = list(train_step(context(train_step, device=device, step=example, repeats=2)))
    (found,) = [item for item in findings(said) if item.status is Status.FAIL]
    assert found.reason == "WrongResult"
    assert "own step is wrong from layer own.inner.0, operation output on: off by 0.01" in found.message


def test_other_parameters_or_another_batch_are_never_compared(context: Any, cpu_device: Any, tmp_path: Path) -> None:
    keys = set()
    for number, text in enumerate((EXAMPLE, EXAMPLE.replace("32, 64", "16, 64").replace("(32,)", "(16,)"))):
        (tmp_path / "step.py").write_text(text)
        name = f"{tmp_path}/step.py:make"
        (item,) = evidence(list(train_step(context(train_step, device=cpu_device, step=name, repeats=2))))
        keys.add(item.key)
        assert len(keys) == number + 1


def test_buffers_are_the_same_each_time_and_gradients_that_cancel_are_no_error(
    context: Any, cpu_device: Any, tmp_path: Path
) -> None:
    text = EXAMPLE.replace("torch.nn.LayerNorm(64)", "torch.nn.BatchNorm1d(64)")
    (tmp_path / "step.py").write_text(text)
    said = list(train_step(context(train_step, device=cpu_device, step=f"{tmp_path}/step.py:make")))
    assert {item.status for item in findings(said)} == {Status.PASS}


def test_module_that_works_in_place_is_the_same_each_time(context: Any, cpu_device: Any, tmp_path: Path) -> None:
    """What the module before it gave is another tensor once the step is over."""
    text = EXAMPLE.replace("torch.nn.GELU()", "torch.nn.ReLU(inplace=True)")
    assert text != EXAMPLE
    (tmp_path / "step.py").write_text(text)
    said = list(train_step(context(train_step, device=cpu_device, step=f"{tmp_path}/step.py:make")))
    assert {item.status for item in findings(said)} == {Status.PASS}


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (EXAMPLE, "made", "cannot be loaded: AttributeError"),
        ("import no_such_module", "make", "cannot be loaded: ModuleNotFoundError"),
        ("make = 1", "make", "is int, not a function"),
        ("def make(): return 1", "make", "it must return (model, batch, loss)"),
        ("def make(): return 1, 2, print", "make", "its model is int, not a torch.nn.Module"),
        ("import torch\ndef make(): return torch.nn.ReLU(), 2, print", "make", "its model has no parameters"),
    ],
)
def test_what_is_no_step_is_one_line(
    context: Any, cpu_device: Any, tmp_path: Path, text: str, name: str, words: str
) -> None:
    (tmp_path / "step.py").write_text(text)
    with pytest.raises(ValueError, match="step") as error:
        list(train_step(context(train_step, device=cpu_device, step=f"{tmp_path}/step.py:{name}")))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_entry_point_that_is_not_there_is_one_line(context: Any, cpu_device: Any) -> None:
    with pytest.raises(ValueError, match=r"no training step 'mine' in entry points 'healthd\.training_steps'"):
        list(train_step(context(train_step, device=cpu_device, step="mine")))


@pytest.mark.xla
@pytest.mark.skipif(not XLA_PYTHON.exists(), reason=f"no interpreter with torch_xla at {XLA_PYTHON}: run make test-xla")
def test_example_of_the_docs_runs_on_xla_as_one_program(example: str) -> None:
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from checks.accelerators import xla
from checks.contract import Context, Finding, Tier, load_params
from checks.host.machine import Host
from checks.training.train_step import train_step
import torch_xla.debug.metrics as metrics
inventory = xla.find(Host(None), {})
device = xla.bind("xla:0", inventory, {})
params = load_params(train_step.params_type, {"step": sys.argv[2]})
said = list(train_step(Context(host=Host(None), params=params, tier=Tier.QUICK, device=device, group=None,
    previous=None, inventory=inventory, limits={})))
print(json.dumps({"statuses": [one.status.value for one in said if isinstance(one, Finding)],
    "graphs": metrics.metric_data("CompileTime")[0], "fallbacks": device.fallbacks()}))
"""
    done = subprocess.run([XLA_PYTHON, "-c", code, str(ROOT), example], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"statuses": ["pass", "pass"], "graphs": 1, "fallbacks": []}
