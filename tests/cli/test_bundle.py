"""`healthd bundle`: what is in it, what is not, and that no broken source keeps the rest from it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.host.machine import Host
from healthd.cli.settings.options import load_settings
from healthd.cli.support.record import NoLogError, collect, hosts_of, journal, nccom_logs, render
from healthd.core.pseudonyms import Redactor
from healthd.core.redaction import GONE
from tests.cli.cli_kit import environment, healthd
from tests.every import every
from tests.fakes.hollow_torch import make_python
from tests.hosts.machine import Machine
from tests.patience import PATIENCE

ARN = "arn:aws:ecs:us-west-2:012345678910:task/default/1f2a"
LS = [
    {
        "neuron_device": 0,
        "memory_size": 34359738368,
        "neuron_processes": [
            {"pid": 7, "command": "python3 train.py --key hunter2", "neuron_runtime_version": "2.30.2.0"}
        ],
        "instance_id": "i-0123456789abcdef0",
    }
]
MONITOR = {
    "instance_info": {
        "instance_name": "ann's",
        "instance_id": "i-0123456789abcdef0",
        "subnet_id": "subnet-0123456789abcdef0",
    }
}


def script(machine: Machine, name: str, said: str, end: str = "") -> None:
    machine.write(f"/bin/{name}", f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n{end}\n")
    (machine.root / "bin" / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One whose tools and logs know too much."""
    made = Machine(tmp_path / "host")
    made.write("/etc/hostname", "anns-trainer\n")
    made.write(
        "/dev/kmsg",
        "6,1,5000000,-;Command line: root=/dev/x neuron.token=abc\n"
        "3,2,6000000,-;neuron: nd5: NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR on anns-trainer (10.0.3.7)\n"
        "6,3,7000000,-;the cake is ready\n",
    )
    script(made, "neuron-ls", json.dumps(LS))
    script(made, "neuron-monitor", json.dumps(MONITOR), "exec sleep 60")
    script(
        made, "journalctl", "2026-11-21T12:00:00+0000 anns-trainer healthd[7]: node anns-node: token=hunter2 10.0.3.7"
    )
    for number in range(5):
        log = made.root / f"tmp/nccom_test_log_{number}.log"
        made.write(f"/tmp/{log.name}", f"run {number}: {'x' * 300_000} ncclInvalidUsage at 10.0.3.7\n")
        os.utime(log, (number, number))
    (made.root / "tmp/nccom_test_log_9.log").symlink_to("/etc/passwd")
    os.mkfifo(made.root / "tmp/nccom_test_log_8.log")
    script(made, "fi_info", "provider: efa", "exit 3")
    return made


def opened(path: Path) -> dict[str, str]:
    assert path.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive.getmembers():
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                found[member.name.removeprefix("healthd-bundle/")] = content.read().decode()
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests in which the doctor's look at the probes' torch, seconds long, is not the point."""
    return make_python(tmp_path_factory.mktemp("python") / "venv")


def bundled(folder: Path, machine: Machine, *options: str, python: Path | str = sys.executable) -> dict[str, str]:
    config = folder / "healthd.toml"
    config.write_text(
        '[aggregator]\ndatabase = "postgresql://ann:hunter2@db.example.internal/h"\n'
        f'[probe]\npython = "{python}"\n'
        '[programs.mine]\ncommand = ["/opt/mine", "--password", "hunter2"]\n'
        "[checks.mine]\nsince = 2026-11-21\n"  # TOML has dates, and JSON has none
    )
    said = healthd(
        folder,
        *("bundle", "--config", str(config), "--output", str(folder / "b.tgz")),
        *("--host-root", str(machine.root), *options),
        env=environment(folder, HEALTHD_NODE_NAME="anns-node"),
        timeout=90,
    )
    assert (said.code, said.err) == (0, "")
    assert "not available" in said.out  # no daemon is there
    return opened(folder / "b.tgz")


def test_folder_that_is_called_like_a_log_hides_no_log(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "nccom_test_log_folder").mkdir(parents=True)
    (tmp_path / "tmp" / "nccom_test_log_1").write_text("Connect to 10.0.0.2 failed")
    before = len(os.listdir("/proc/self/fd"))
    text = nccom_logs(Host(tmp_path), 4096)
    assert "Connect to 10.0.0.2 failed" in text
    assert "nccom_test_log_folder" not in text
    assert len(os.listdir("/proc/self/fd")) == before


def test_bundle_without_a_daemon_has_what_there_is_and_nothing_private(tmp_path: Path, machine: Machine) -> None:
    found = bundled(tmp_path, machine)
    assert next(iter(found)) == "README.txt"
    assert "state.json: " in found["README.txt"]
    assert "is 'healthd node' running?" in found["README.txt"]
    assert "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR on host-" in found["machine/dev/kmsg"]
    assert "cake" not in found["machine/dev/kmsg"]
    assert json.loads(found["machine/bin/neuron-ls.0.out"])[0]["neuron_processes"][0] == {
        "pid": 7,
        "command": GONE,
        "neuron_runtime_version": "2.30.2.0",
    }
    assert json.loads(found["machine/bin/neuron-monitor.0.out"])["instance_info"]["subnet_id"] == "subnet-1"
    assert found["machine/bin/fi_info.0.out"] == "provider: efa\n"
    assert "3)]" in found["machine/bin/fi_info"], "it ends with the same code again"
    settings = json.loads(found["settings.json"])
    assert settings["variables"] == ["HEALTHD_NODE_NAME", "HEALTHD_NODE_RUN_DIR", "HEALTHD_NODE_STATE_DIR"]
    assert settings["content"]["checks"] == {"mine": {"since": "2026-11-21"}}
    assert {"doctor.json", "schedulers.json", "versions.json", "instance.json"} <= set(found)
    assert "healthd[7]: node host-" in found["journal.txt"]
    logs = found["nccom-logs.txt"]
    assert re.findall(r"^--- (.*)$", logs, re.MULTILINE) == [f"/tmp/nccom_test_log_{n}.log" for n in (4, 3, 2)]
    assert logs.count("ncclInvalidUsage at ip-") == 3
    assert len(logs) < 800_000
    assert "root:" not in logs
    probe = json.loads(found["versions.json"])["probe"]
    assert probe["python"]
    assert probe["versions"]["torch"]
    everything = "\n".join(found.values())
    assert "i-0123456789abcdef0" in everything
    for private in ("hunter2", "anns-", "ann's", "10.0.3.7", "token=abc"):
        assert private not in everything


def test_the_record_in_a_bundle_replays_and_names_no_server(tmp_path: Path, machine: Machine, python: Path) -> None:
    mounts = machine.host.read("/proc/self/mountinfo")
    machine.write("/proc/self/mountinfo", f"{mounts}40 1 0:9 / /data rw - nfs4 filer7:/anns rw\n")
    machine.write("/etc/hosts", "10.0.0.9 ledger-db\n")
    machine.write("/proc/net/if_inet6", "fd000000000000000000000000000007 02 40 00 80 eth0\n")
    machine.write("/dev/neuron0", "")
    found = bundled(tmp_path, machine, python=python)
    assert not [name for name, text in found.items() if re.search("filer7|ledger-db|fd00000000", text)]
    with tarfile.open(tmp_path / "b.tgz") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    again = Host(tmp_path / "out/healthd-bundle/machine")
    listed = json.loads(again.run(["neuron-ls", "-j"], timeout_seconds=10 * PATIENCE).stdout)
    assert (listed[0]["neuron_device"], listed[0]["instance_id"]) == (0, "i-0123456789abcdef0")
    line = again.first_line(["neuron-monitor"], timeout_seconds=10 * PATIENCE)
    assert json.loads(line)["instance_info"]["instance_id"] == "i-0123456789abcdef0"
    (fault,) = again.kernel_log()
    assert fault[0] == 6.0
    assert "NEURON_HW_ERR" in fault[1]
    assert again.exists("/dev/neuron0")


def test_bundle_that_is_not_redacted_says_so(tmp_path: Path, machine: Machine, python: Path) -> None:
    found = bundled(tmp_path, machine, "--no-redact", python=python)
    assert "Written with --no-redact" in found["README.txt"]
    assert "on anns-trainer (10.0.3.7)" in found["machine/dev/kmsg"]
    assert "hunter2" in found["settings.json"]
    assert "hunter2" not in found["machine/bin/neuron-ls.0.out"], "a record has no command lines"


def test_bundle_beside_a_daemon_has_its_state(tmp_path: Path, machine: Machine, python: Path) -> None:
    program = Path(__file__).parent.parent / "node/node_process.py"
    daemon = subprocess.Popen([sys.executable, str(program), str(tmp_path), "127.0.0.1:0", "disk_space"], cwd=tmp_path)
    try:
        until = time.monotonic() + 30 * PATIENCE
        while not (tmp_path / "run/node.sock").exists():
            assert daemon.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        found = bundled(tmp_path, machine, python=python)
    finally:
        daemon.terminate()
        daemon.wait(10 * PATIENCE)
    assert json.loads(found["state.json"])["checks"][0]["name"] == "disk_space"
    assert "state.json: " not in found["README.txt"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "variables", "trouble"),
    [
        ("[node\n", {}, "healthd.toml:1: not TOML"),
        ('[node]\nlisten_on = "x:1"\n', {}, "healthd.toml:2: unknown key 'node.listen_on'"),
        ("", {"HEALTHD_LISTEN_ON": "x:1"}, "unknown variable 'HEALTHD_LISTEN_ON'"),
    ],
)
def test_settings_that_are_broken_are_told_and_the_rest_is_there(
    tmp_path: Path, machine: Machine, python: Path, text: str, variables: dict[str, str], trouble: str
) -> None:
    (tmp_path / "healthd.toml").write_text(text)
    own = {"HEALTHD_CONFIG": str(tmp_path / "healthd.toml"), "HEALTHD_PROBE_PYTHON": str(python), **variables}
    words = ("bundle", "--output", str(tmp_path / "b.tgz"), "--host-root", str(machine.root))
    said = healthd(tmp_path, *words, env=own, timeout=90)
    assert (said.code, said.err.count("\n")) == (0, 1)
    assert trouble in said.err
    found = opened(tmp_path / "b.tgz")
    assert trouble in found["README.txt"]
    assert "NEURON_HW_ERR" in found["machine/dev/kmsg"]
    assert ("settings.json" in found) == (text != "[node\n")


def test_options_that_make_no_sense_are_no_bundle(tmp_path: Path) -> None:
    words = ("bundle", "--output", str(tmp_path / "b.tgz"), "--host-root", str(tmp_path / "none"))
    said = healthd(tmp_path, *words)
    assert (said.code, said.out) == (2, "")
    assert "no such directory; --host-root needs a directory" in said.err
    assert not (tmp_path / "b.tgz").exists()


def test_journal_of_this_host_is_not_taken_for_that_of_another_machine(tmp_path: Path) -> None:
    with pytest.raises(NoLogError, match="--host-root names another machine"):
        journal(Host(tmp_path), 5.0)
    assert nccom_logs(Host(tmp_path), 1000) == "(empty)\n"


def test_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "b.tgz").write_text("mine")
    said = healthd(tmp_path, "bundle", "--output", str(tmp_path / "b.tgz"), env=environment(tmp_path))
    assert (said.code, (tmp_path / "b.tgz").read_text()) == (2, "mine")
    assert "File exists; name another with --output" in said.err


@pytest.mark.thorough
def test_archive_that_cannot_be_written_whole_is_told_and_not_left(tmp_path: Path, machine: Machine) -> None:
    python = make_python(tmp_path / "venv")
    words = f"bundle --output {tmp_path}/b.tgz --host-root {machine.root}"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 1; exec {sys.executable} -m healthd {words}"],
        env=environment(tmp_path, HEALTHD_PROBE_PYTHON=str(python)),
        capture_output=True,
        text=True,
        timeout=90 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"healthd: {tmp_path}/b.tgz: cannot be written: File too large; name another with --output\n"
    assert not (tmp_path / "b.tgz").exists()


def test_hosts_that_settings_speak_to_are_pseudonyms_everywhere(tmp_path: Path) -> None:
    settings = load_settings({"state_dir": tmp_path, "run_dir": tmp_path}, section="node")
    content = {
        "aggregator": {"database": "postgresql+psycopg://ann:x@pg1.corp.example:5432/h?application_name=h"},
        "node": {"kubernetes": {"api_server": "https://[2001:db8::7]:6443"}, "labels": {"pool": "train"}},
        "odd": "http://[",
    }
    found = {"settings.json": {"file": "f", "content": content}, "journal.txt": "no answer of PG1.corp.example: train"}
    files = render(found, {}, Redactor(hosts=hosts_of(settings, found)), redacted=True)
    everything = "\n".join(files.values()).lower()
    assert "pg1" not in everything
    assert "corp.example" not in everything
    assert "no answer of host-" in everything
    assert everything.count("train") == 2


def test_source_that_fails_or_hangs_is_named_and_the_others_are_there() -> None:
    end = threading.Event()

    def broken() -> Any:
        raise KeyError("x")

    began = time.monotonic()
    found, failed = collect(
        {"a.txt": lambda: "there", "b.txt": broken, "c.txt": lambda: end.wait(30 * PATIENCE)},
        0.3,
    )
    assert time.monotonic() - began < 5 * PATIENCE
    end.set()
    assert found == {"a.txt": "there"}
    assert failed == {"b.txt": "internal error: KeyError: 'x'", "c.txt": "was not read within 0.3 s"}


def test_what_is_said_of_failures_is_redacted_too() -> None:
    files = render({}, {"state.json": "https://10.1.2.3 is away"}, Redactor(), redacted=True)
    assert "https://ip-1 is away" in files["README.txt"]


def test_cut_json_of_a_tool_tells_no_command_line() -> None:
    name = "machine/bin/neuron-ls.0.out"
    files = render({name: '[{"command": "python --key hunter2'}, {}, Redactor(), redacted=True)
    assert "hunter2" not in files[name]


@every(
    ("text", "clean"),
    [
        (f"job {ARN} of account 012345678910", "job arn-1 of account account-1"),
        ("peers 10.0.0.1, 10.0.0.2 and 10.0.0.1", "peers ip-1, ip-2 and ip-1"),
        ("http://172.31.4.5:8090/v1", "http://ip-1:8090/v1"),
        ("127.0.0.1 0.0.0.0 169.254.169.254", "127.0.0.1 0.0.0.0 169.254.169.254"),
        ("fe80::1ff:fe23:4567:890a and 2001:db8::7 and ::1", "ip-1 and ip-2 and ::1"),
        ("driver version 2.30.2.0, peer 3.5.140.2", "driver version 2.30.2.0, peer ip-1"),
        ("0000:10:1c.0 0000:a0:1d.0", "0000:10:1c.0 0000:a0:1d.0"),
        ("12:34:56 std::vector 2026-11-21T12:00:00", "12:34:56 std::vector 2026-11-21T12:00:00"),
        ("0a:1b:2c:3d:4e:5f", "mac-1"),
        ("ip-10-0-0-1.us-west-2.compute.internal", "host-1"),
        ("trainer-7 Trainer-7.example.com xtrainer-7", "host-1 host-2 xtrainer-7"),
        ("103079215104 bytes", "103079215104 bytes"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer (removed)"),
        ("postgresql://ann:pw@db/x?token=t0", "postgresql://(removed)@db/x?token=(removed)"),
        ("AKIAIOSFODNN7EXAMPLE", "(removed)"),
        ("/home/ann/train.py", "/home/user-1/train.py"),
        ("012345678910.dkr.ecr.us-west-2.amazonaws.com/img", "host-1/img"),
        ("i-0123456789abcdef0", "i-0123456789abcdef0"),
    ],
)
def test_private_things_go_and_what_is_needed_stays(text: str, clean: str) -> None:
    redactor = Redactor(hosts=["trainer-7.example.com", "trainer-7", "localhost", "i-0123456789abcdef0"])
    redactor.learn(text)
    assert sorted(redactor.text(text)) == sorted(clean) if "host-2" in clean else redactor.text(text) == clean


def test_members_that_hold_commands_or_secrets_are_emptied() -> None:
    clean = Redactor().plain(
        {"command": ["a"], "env": {"A": "b"}, "api_key": "k", "token_file": "/etc/t", "node": {"token": None}, "n": 7}
    )
    assert clean == {
        "command": GONE,
        "env": GONE,
        "api_key": GONE,
        "token_file": "/etc/t",
        "node": {"token": None},
        "n": 7,
    }


def test_host_that_is_called_like_a_member_changes_no_member() -> None:
    assert Redactor(hosts=["node"]).plain({"results": ["node"]}) == {"results": ["host-1"]}


octets = st.integers(0, 255).map(str)
addresses = st.tuples(st.sampled_from(["10", "172", "192", "34", "52"]), octets, octets, octets).map(".".join)


@given(addresses, st.sampled_from(["[{}]", "{}/16", "x={}", '"{}"', "{},", "{}:8080", "on {}."]))
def test_no_address_gets_through(address: str, around: str) -> None:
    assert address not in Redactor().text(around.format(address))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_anything_can_be_redacted(value: Any) -> None:
    redactor = Redactor(hosts=["h1"])
    json.dumps(redactor.plain(value))
