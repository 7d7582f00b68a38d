"""
A real systemd starts the agent after the boot check, and with require-boot.conf on a fit node alone.

The manager is a user's (systemd --user) in mounts of its own, so nothing of this machine is touched; it takes units,
orders and requirements as the system's does. The units' own words about order are the shipped ones, what they start is
a line in a log. Not shown here: the sandbox of the units, which needs the system's manager.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "deploy/systemd"
MANAGER = "/lib/systemd/systemd"

# The agent of AWS, as amazon-ecs-agent's own unit orders it: it starts when user data is done.
ECS = "[Unit]\nAfter=cloud-final.service\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart={say} agent\n"

pytestmark = pytest.mark.system(MANAGER, "systemctl", "unshare", root=True)


class Boot:
    """One boot: the units, and the order in which they were started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.units, self.log = folder, folder / "units", folder / "log"
        self.later = folder / "later"
        for made in (self.units, self.later):
            made.mkdir()
        self.say = folder / "say"
        self.say.write_text(f'#!/bin/sh\necho "$1" >>{self.log}\nexit ${{2:-0}}\n', encoding="ascii")
        self.say.chmod(0o755)
        self.log.touch()
        for usual in ("basic.target", "shutdown.target"):
            self.unit(usual, "[Unit]\nDescription=as everywhere\n")
        self.unit("all.target", "[Unit]\nWants=ecs.service cloud-final.service end.service\n")
        self.unit("ecs.service", ECS.format(say=self.say))
        self.user_data("")
        ended = "After=ecs.service cloud-final.service healthd-boot.service"
        self.unit("end.service", f"[Unit]\n{ended}\n[Service]\nType=oneshot\nExecStart={self.say} end\n")

    def unit(self, name: str, text: str, *, folder: Path | None = None) -> None:
        file = (folder or self.units) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="ascii")

    def user_data(self, script: str) -> None:
        """What cloud-final runs; `systemctl` is that of the manager."""
        file = self.folder / "user-data"
        file.write_text(f'#!/bin/bash\nsystemctl() {{ command systemctl --user "$@"; }}\n{script}\n', encoding="ascii")
        file.chmod(0o755)
        text = f"[Service]\nType=oneshot\nExecStart={file}\nExecStartPost={self.say} user-data\n"
        self.unit("cloud-final.service", text)

    def healthd(self, code: int, *, folder: Path | None = None) -> None:
        """The daemon and the boot check, with the shipped [Unit]; the check takes a moment and ends by `code`."""
        for name, seconds, last in (("healthd-node", 0.0, 0), ("healthd-boot", 0.5, code)):
            shipped = (FOLDER / f"{name}.service").read_text(encoding="ascii")
            head = shipped[: shipped.index("[Service]")]
            start = f"ExecStartPre=/bin/sleep {seconds}\nExecStart={self.say} {name} {last}"
            kept = "Type=oneshot\nRemainAfterExit=yes"
            self.unit(f"{name}.service", f"{head}[Service]\n{kept}\n{start}\n", folder=folder)

    def require(self, *, folder: Path | None = None) -> None:
        text = (FOLDER / "require-boot.conf").read_text(encoding="ascii")
        text = text.replace("/bin/systemctl", "/bin/systemctl --user")
        self.unit("ecs.service.d/healthd.conf", text, folder=folder)

    def want(self) -> None:
        """As `systemctl enable` does."""
        self.unit("all.target.d/want.conf", "[Unit]\nWants=healthd-boot.service healthd-node.service\n")

    def run(self) -> list[str]:
        script = (
            "mount -t tmpfs none /run && mkdir -p /run/systemd/system /run/user/0 && chmod 700 /run/user/0 && "
            f"{{ timeout --signal=KILL 20 {MANAGER} --user --unit=all.target & }} && manager=$! && "
            f"for i in $(seq 150); do grep -q end {self.log} && break; sleep 0.1; done; kill -KILL $manager; wait"
        )
        environment = {
            "PATH": os.environ["PATH"],
            "SYSTEMD_UNIT_PATH": str(self.units),
            "XDG_RUNTIME_DIR": "/run/user/0",
        }
        subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=40,
            check=False,
        )
        lines = self.log.read_text(encoding="ascii").split()
        if "end" not in lines:
            pytest.skip("systemd does not run as a user's manager in here")
        return lines[: lines.index("end")]


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    return Boot(tmp_path)


def test_the_agent_starts_after_the_boot_check_whatever_it_says(boot: Boot) -> None:
    boot.healthd(code=3)
    boot.want()
    started = boot.run()
    assert started.index("healthd-node") < started.index("healthd-boot") < started.index("agent")


@pytest.mark.parametrize(("code", "agents"), [(0, 1), (2, 0), (3, 0)])
def test_with_the_requirement_the_agent_starts_on_a_fit_node_alone(boot: Boot, code: int, agents: int) -> None:
    boot.healthd(code=code)
    boot.require()
    started = boot.run()
    assert started.count("agent") == agents
    assert started.count("healthd-boot") == 1


LATE = """cp -r {later}/. {units}/
systemctl daemon-reload
systemctl start --no-block healthd-node.service healthd-boot.service"""


@pytest.mark.parametrize(("code", "agents"), [(0, 1), (2, 0), (3, 0)])
def test_units_that_user_data_installs_still_hold_back_the_agent_that_waits_for_it(
    boot: Boot, code: int, agents: int
) -> None:
    boot.healthd(code=code, folder=boot.later)
    boot.require(folder=boot.later)
    boot.user_data(LATE.format(later=boot.later, units=boot.units))
    started = boot.run()
    assert started.count("agent") == agents
    assert started.index("user-data") < started.index("healthd-boot")
    if agents:
        assert started.index("healthd-boot") < started.index("agent")


def test_user_data_that_failed_after_the_requirement_was_written_starts_no_agent(boot: Boot) -> None:
    boot.require(folder=boot.later)
    boot.user_data(f"cp -r {boot.later}/. {boot.units}/\nsystemctl daemon-reload")
    assert "agent" not in boot.run()


def test_without_the_requirement_user_data_that_failed_keeps_no_agent_from_starting(boot: Boot) -> None:
    boot.user_data("false")
    assert "agent" in boot.run()


def test_the_shipped_boot_check_is_what_is_tested_here() -> None:
    text = (FOLDER / "healthd-boot.service").read_text(encoding="ascii")
    assert re.search(r"^Type=oneshot\nRemainAfterExit=yes$", text, re.MULTILINE)
