"""The user data of container hosts does what it says, on a root folder and with programs that only note their calls."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from checks.contract import Tier
from checks.discover import builtin_checks
from healthd.cli.settings.tree import Settings
from healthd.core.config import load as load_config
from healthd.core.evidence import judge_health
from healthd.core.model import Health
from healthd.node.checks.catalogue import enabled_checks
from tests.aggregator.world import result, state

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy/batch/user-data.sh"


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=60)
    text = SCRIPT.read_text(encoding="ascii")
    assert text.startswith("#!/bin/bash\n")
    for line in text.splitlines():
        if "systemctl" in line and ("start" in line or "--now" in line) and not line.lstrip().startswith("#"):
            assert "--no-block" in line, f"the agent waits for user data, so this would wait for ever: {line}"


class Machine:
    """A root folder, and programs that note how they were called in place of those that change the machine."""

    def __init__(self, folder: Path, *, pip: int = 0) -> None:
        self.root, self.bin, self.log = folder / "root", folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.program("systemctl", "exit 0")
        self.program("dnf", "exit 1")
        made = f'mkdir -p "$3/bin"; printf "#!/bin/sh\\necho pip \\"\\$@\\" >>{self.log}; exit {pip}\\n" >"$3/bin/pip"'
        self.program("python3.11", f'{made}; chmod +x "$3/bin/pip"')

    def program(self, name: str, body: str) -> None:
        """A program that notes its call and does this."""
        file = self.bin / name
        file.write_text(f'#!/bin/sh\necho {name} "$@" >>{self.log}\n{body}\n', encoding="ascii")
        file.chmod(0o755)

    def run(self, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "ROOT": str(self.root),
            "UNITS": str(ROOT / "deploy/systemd"),
            "HEALTHD_PACKAGE": "healthd.whl",
            **settings,
        }
        return subprocess.run(
            ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=20, check=False
        )

    @property
    def units(self) -> Path:
        return self.root / "etc/systemd/system"

    @property
    def settings(self) -> Settings:
        file = self.root / "etc/healthd/healthd.toml"
        defaults = {"node.name": "n", "node.state_dir": Path("/s"), "node.run_dir": Path("/r")}
        return load_config(Settings, file=file, environ={}, arguments={}, defaults=defaults)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text(encoding="ascii").splitlines()


def test_user_data_installs_the_daemon_and_the_boot_check(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (machine.units / "healthd-boot.service").is_file()
    assert (machine.units / "healthd-node.service").is_file()
    assert os.access(machine.root / "opt/healthd/libexec/healthd-boot", os.X_OK)
    assert "Before=slurmd.service ecs.service kubelet.service" in (machine.units / "healthd-boot.service").read_text()
    assert not (machine.units / "ecs.service.d").exists(), "observe first: the agent starts in any case"
    assert "pip install --quiet --disable-pip-version-check healthd.whl" in machine.calls
    assert machine.calls[-1] == "systemctl enable --now --no-block healthd-node.service healthd-boot.service"


@pytest.mark.parametrize("place", ["", "s3://bucket/"])
def test_folder_of_wheels_is_installed_from_and_not_taken_for_a_project(place: str, tmp_path: Path) -> None:
    """pip refuses a folder without a pyproject.toml: "is not installable"."""
    wheels = tmp_path / "wheels of mine"
    wheels.mkdir()
    machine = Machine(tmp_path)
    machine.program("aws", 'mkdir -p "$5"')
    done = machine.run(HEALTHD_PACKAGE=f"{place or tmp_path}/{wheels.name}/")
    assert done.returncode == 0, done.stdout + done.stderr
    found = f"/tmp/{wheels.name}" if place else wheels
    if place:
        shutil.rmtree(found)
    assert f"pip install --quiet --disable-pip-version-check --no-index --find-links {found} healthd" in machine.calls


def test_settings_that_user_data_writes_are_settings_that_healthd_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for python, unprompted, boot in (
        ("", "off", "BOOT_TIER=passive\n"),
        ("/opt/venv/bin/python", None, "BOOT_TIER=quick\nBOOT_WAIT=25m\n"),
    ):
        assert machine.run(PROBE_PYTHON=python).returncode == 0
        settings = machine.settings
        assert str(settings.probe.python or "") == python
        assert settings.node.active.unprompted == unprompted
        assert settings.node.name == os.uname().nodename
        assert settings.node.sync.aggregators == ()
        assert (machine.root / "etc/healthd/boot.env").read_text() == boot


def test_daemon_of_a_host_without_torch_is_healthy_by_what_it_can_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.run().returncode == 0
    specs = enabled_checks(builtin_checks(), machine.settings.node)
    assert {spec.tier for spec in specs} == {Tier.PASSIVE}
    known = dataclasses.replace(state("host", [result(spec.name, spec.tier) for spec in specs]), checks=specs)
    assert judge_health(known) == (Health.HEALTHY, ())


def test_daemon_that_is_told_of_an_aggregator_speaks_to_it_and_its_token_is_for_root_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("sync.token", "gate.token", "ca.crt"):
        (tmp_path / name).write_text(f"{name}-secret\n")
        (tmp_path / name).chmod(0o644)
    files = {"TOKEN": "sync.token", "GATE_TOKEN": "gate.token", "CA": "ca.crt"}
    done = machine.run(
        AGGREGATOR="https://a:8090,https://b:8090", **{key: str(tmp_path / name) for key, name in files.items()}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sync = machine.settings.node.sync
    assert sync.aggregators == ("https://a:8090", "https://b:8090")
    for file, said in (
        (sync.token_file, "sync.token"),
        (sync.ca_file, "ca.crt"),
        (Path("/var/lib/healthd/host/gate.token"), "gate.token"),
    ):
        assert file is not None
        there = machine.root / file.relative_to("/")
        assert there.read_text() == f"{said}-secret\n"
        if said != "ca.crt":
            assert there.stat().st_mode & 0o777 == 0o600
    assert "secret" not in done.stdout + done.stderr + "".join(machine.calls)
    assert (machine.root / "var/lib/healthd/host/name").read_text().strip() == machine.settings.node.name


def test_a_token_that_cannot_be_fetched_is_told_and_nothing_starts(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.run(AGGREGATOR="https://a:8090", TOKEN=str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "could not be written" in done.stdout
    assert not any("enable" in call for call in machine.calls)


def test_enforcing_user_data_makes_the_agent_wait_for_a_fit_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.run(ENFORCE="yes", REPLACE="yes").returncode == 0
    assert "Requires=healthd-boot.service" in (machine.units / "ecs.service.d/healthd.conf").read_text()
    assert "poweroff" in (machine.units / "healthd-boot.service.d/replace.conf").read_text()


def test_a_machine_on_which_nothing_could_be_installed_takes_no_jobs_when_it_is_to_be_enforced(tmp_path: Path) -> None:
    machine = Machine(tmp_path, pip=1)
    done = machine.run(ENFORCE="yes")
    assert done.returncode == 1
    assert "could not be installed: healthd.whl" in done.stdout
    assert "Requires=healthd-boot.service" in (machine.units / "ecs.service.d/healthd.conf").read_text()
    assert not (machine.units / "healthd-boot.service").exists()


def test_a_machine_on_which_nothing_could_be_installed_works_on_as_long_as_nothing_is_enforced(tmp_path: Path) -> None:
    machine = Machine(tmp_path, pip=1)
    assert machine.run().returncode == 1
    assert not (machine.units / "ecs.service.d").exists()


def test_both_ways_to_make_the_agent_wait_say_the_same(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(ENFORCE="yes")
    written = (machine.units / "ecs.service.d/healthd.conf").read_text().split()
    shipped = (ROOT / "deploy/systemd/require-boot.conf").read_text().splitlines()
    assert written == " ".join(line for line in shipped if not line.startswith("#")).split()
