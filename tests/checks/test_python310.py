"""The checks run under Python 3.10, which the interpreters that bring the vendors' libraries still are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.hosts.machine import HEALTHY, INVENTORY
from tests.pythons import find_python

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> str:
    found = find_python("3.10")
    if found is None:
        pytest.skip("no Python 3.10 here; install one as python3.10 on PATH")
    return found


def run(python: str, code: str, *arguments: str) -> str:
    start = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
    command = [python, "-I", "-W", "error", "-B", "-c", start + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_checks_imports_without_torch(python: str) -> None:
    code = (
        "import pkgutil, importlib, checks\n"
        "names = [m.name for m in pkgutil.walk_packages(checks.__path__, 'checks.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\nprint(len(names))\n"
    )
    assert int(run(python, code)) > 20


def test_all_passive_checks_pass_on_the_healthy_machine(python: str) -> None:
    code = """
import json
from pathlib import Path
from checks.contract import Context, Finding, Tier, load_params
from checks.discover import PACKAGES, builtin_checks
from checks.host.machine import Host
said = {}
for name, check in builtin_checks(PACKAGES[:1]).items():
    context = Context(host=Host(Path(sys.argv[1])), params=load_params(check.params_type, {}), tier=Tier.PASSIVE,
                      device=None, group=None, previous=None, inventory=json.loads(sys.argv[2]), limits={})
    said[name] = [item.status.value for item in check(context) if isinstance(item, Finding)]
print(json.dumps(said))
"""
    said = json.loads(run(python, code, str(HEALTHY), json.dumps(dict(INVENTORY))))
    assert len(said) >= 10
    assert said.pop("instance_type") == said.pop("scheduled_events") == ["skip"]  # a plain machine, not on EC2
    # Nor one with Neuron devices.
    for name in ("neuron_counters", "neuron_versions", "neuron_cores", "neuron_topology", "device_permissions"):
        assert said.pop(name) == ["skip"]
    assert said.pop("job_steps") == ["skip"]  # no job reports
    for name in (
        "efa",
        "gpu_memory",
        "gpu_throttle",
        "gpu_links",
        "gpu_driver",
        "gpu_recovery",
    ):  # nor with EFA or NVIDIA GPUs
        assert said.pop(name) == ["skip"]
    assert {status for statuses in said.values() for status in statuses} == {"pass"}
    assert all(said.values())
