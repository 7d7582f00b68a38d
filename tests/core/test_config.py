"""Settings: layers, and one clear line for everything that is not known."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from checks.contract import Tier
from healthd.aggregator.policy import Policy
from healthd.cli.settings.options import load_settings
from healthd.cli.settings.tree import Settings as WholeSettings
from healthd.core.config import load, parse_duration
from healthd.core.errors import ConfigError
from tests.every import every


@dataclass(frozen=True)
class Program:
    command: tuple[str, ...]
    timeout_seconds: float = 10.0


@dataclass(frozen=True)
class Gate:
    max_age_seconds: float = 600.0
    tier: Literal["passive", "quick"] = "quick"
    wait_seconds: float | None = None


@dataclass(frozen=True)
class Settings:
    listen: str = "127.0.0.1:8080"
    state_dir: Path = Path("/var/lib/healthd")
    cpu_devices: int = 2
    insecure: bool = False
    fault: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    gate: Gate = Gate()
    programs: dict[str, Program] = field(default_factory=dict)
    directories: tuple[Path, ...] = ()
    ca_file: Path | None = None


def read(
    text: str, tmp_path: Path, environ: Mapping[str, str] | None = None, arguments: Mapping[str, Any] | None = None
) -> Settings:
    file = tmp_path / "healthd.toml"
    file.write_text(text)
    return load(Settings, file=file, environ=environ or {}, arguments=arguments or {})


def test_argument_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    text = 'listen = "a:1"\ncpu_devices = 3\n[gate]\nmax_age = "1m"\n'
    settings = read(text, tmp_path, {"HEALTHD_LISTEN": "b:2", "HEALTHD_GATE_MAX_AGE": "2m"}, {"gate.max_age": "3m"})
    assert (settings.listen, settings.cpu_devices, settings.gate.max_age_seconds) == ("b:2", 3, 180.0)
    assert settings.gate.tier == "quick"


def test_unknown_key_names_file_line_and_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"healthd\.toml:4: unknown key 'gate\.max_agee'; did you mean 'max_age'\?"):
        read('# a comment\nlisten = "a:1"\n[gate]\nmax_agee = "1m"\n', tmp_path)


def test_unknown_dotted_key_is_found_on_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"healthd\.toml:2: unknown key 'gate\.tyer'; did you mean 'tier'"):
        read('listen = "a:1"\ngate.tyer = "quick"\n', tmp_path)


def test_wrong_type_names_file_line_and_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"healthd\.toml:1: cpu_devices: Expected `int`, got `str`"):
        read('cpu_devices = "many"\n', tmp_path)


def test_wrong_choice_lists_what_is_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"healthd\.toml:2: gate\.tier: 'quik': choose one of: passive, quick"):
        read('[gate]\ntier = "quik"\n', tmp_path)


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"healthd\.toml:2: not TOML: "):
        read('listen = "a:1"\ngate = = 3\n', tmp_path)


def test_unknown_variable_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environment: unknown variable 'HEALTHD_LISTN'; did you mean 'HEALTHD_LISTEN'"
    ):
        read("", tmp_path, {"HEALTHD_LISTN": "x"})


def test_every_variable_that_the_code_reads_is_known(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    text = "".join(file.read_text() for room in ("healthd", "checks") for file in (root / room).rglob("*.py"))
    names = set(re.findall(r"\bHEALTHD_[A-Z_]*[A-Z]\b", text))
    assert "HEALTHD_IMDS" in names
    defaults = {"node.name": "n1", "node.state_dir": tmp_path, "node.run_dir": tmp_path}
    for name in sorted(names):
        said = ""
        try:
            load(WholeSettings, file=None, environ={name: "1"}, arguments={}, sections=("node",), defaults=defaults)
        except ConfigError as error:  # a value that is not the right one
            said = str(error)
        assert "unknown variable" not in said


def test_variables_that_kubernetes_injects_are_ignored(tmp_path: Path) -> None:
    injected = {
        "HEALTHD_SERVICE_HOST": "10.0.0.1",
        "HEALTHD_SERVICE_PORT": "8080",
        "HEALTHD_SERVICE_PORT_HTTP": "8080",
        "HEALTHD_PORT": "tcp://10.0.0.1:8080",
        "HEALTHD_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "HEALTHD_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    assert read("", tmp_path, injected) == Settings()


def test_text_becomes_lists_tables_booleans_and_durations(tmp_path: Path) -> None:
    environ = {
        "HEALTHD_FAULT": "matmul=fail, digest@cpu:1=corrupt",
        "HEALTHD_LABELS": "pool=a,zone=b",
        "HEALTHD_INSECURE": "yes",
        "HEALTHD_CPU_DEVICES": "3",
        "HEALTHD_GATE_WAIT": "1h",
    }
    settings = read("", tmp_path, environ)
    assert settings.fault == ("matmul=fail", "digest@cpu:1=corrupt")
    assert settings.labels == {"pool": "a", "zone": "b"}
    assert (settings.insecure, settings.cpu_devices, settings.gate.wait_seconds) == (True, 3, 3600.0)


def test_tables_of_named_records_and_free_tables(tmp_path: Path) -> None:
    text = '[checks.matmul]\nsize = 64\n[programs.disk]\ncommand = ["check_disk", "-w", "5%"]\ntimeout = "5s"\n'
    settings = read(text, tmp_path)
    assert settings.checks == {"matmul": {"size": 64}}
    assert settings.programs["disk"] == Program(command=("check_disk", "-w", "5%"), timeout_seconds=5.0)
    with pytest.raises(
        ConfigError, match=r"healthd\.toml:3: unknown key 'programs\.disk\.comand'; did you mean 'command'"
    ):
        read('[programs.disk]\ntimeout = "5s"\ncomand = ["x"]\n', tmp_path)
    with pytest.raises(ConfigError, match=r"'programs\.disk\.command' must be set"):
        read("[programs.disk]\n", tmp_path)


def test_missing_file_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; name another with --config"):
        load(Settings, file=tmp_path / "nothing.toml", environ={}, arguments={})


@every(("text", "seconds"), [("2s", 2), ("10m", 600), ("1h", 3600), ("250ms", 0.25), (5, 5), ("7", 7)])
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@every("text", ["", "soon", "-3s", -1, True, "10 minutes", float("inf"), float("nan"), 10**400, "9" * 400])
def test_what_is_no_duration_says_what_is(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration; write 2s, 10m or 1h"):
        parse_duration(text)


def test_a_commands_own_section_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text('[gate]\nwait = "1m"\n')
    environ = {"HEALTHD_MAX_AGE": "5s", "HEALTHD_TIER": "passive", "HEALTHD_GATE_TIER": "quick"}
    settings = load(Settings, file=file, environ=environ, arguments={"wait": "2m"}, sections=("gate",))
    assert settings.gate == Gate(max_age_seconds=5.0, tier="quick", wait_seconds=120.0)
    other = load(Settings, file=file, environ=environ, arguments={}, sections=("programs",))
    assert other.gate == Gate(tier="quick", wait_seconds=60.0)


def test_defaults_are_the_weakest_and_the_first_section_with_the_key_is_meant(tmp_path: Path) -> None:
    settings = load(
        Settings,
        file=None,
        environ={"HEALTHD_WAIT": "3s"},
        arguments={"max_age": "1m"},
        sections=("programs", "gate"),
        defaults={"listen": "x:1", "gate.tier": "passive", "gate.wait": 9.0},
    )
    assert settings == Settings(listen="x:1", gate=Gate(max_age_seconds=60.0, tier="passive", wait_seconds=3.0))


def test_lists_of_paths_come_from_file_variable_and_argument(tmp_path: Path) -> None:
    assert read('directories = ["/a", "~/b"]\n', tmp_path).directories == (Path("/a"), Path("~/b").expanduser())
    assert read("", tmp_path, {"HEALTHD_DIRECTORIES": "/a, /b"}).directories == (Path("/a"), Path("/b"))
    assert read("", tmp_path, {}, {"directories": "/c"}).directories == (Path("/c"),)
    with pytest.raises(ConfigError, match=r"healthd\.toml:1: directories: Expected `str`, got `int`"):
        read("directories = [3]\n", tmp_path)


# --- times by tier ----------------------------------------------------------------------------------------------------


def policy(tmp_path: Path, text: str = "", **variables: str) -> Policy:
    file = tmp_path / "healthd.toml"
    file.write_text(text)
    defaults = {"node.name": "n", "node.state_dir": "/s", "node.run_dir": "/r"}
    return load(WholeSettings, file=file, environ=variables, arguments={}, defaults=defaults).policy


def test_a_tier_that_is_named_has_its_time_and_the_others_keep_theirs(tmp_path: Path) -> None:
    usual = Policy().run_seconds
    assert set(usual) == set(Tier)
    by_variable = policy(tmp_path, HEALTHD_POLICY_RUN="quick=1500,deep=2h")
    assert by_variable.run_seconds == {**usual, Tier.QUICK: 1500.0, Tier.DEEP: 7200.0}
    by_file = policy(tmp_path, '[policy.run]\nquick = "20m"\nsoak = 60\n')
    assert by_file.run_seconds == {**usual, Tier.QUICK: 1200.0, Tier.SOAK: 60.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[policy.run]\nquick = "soon"', "'soon' is not a duration; write 2s, 10m or 1h"),
        ('[policy.run]\nquik = "20m"', "policy.run: "),
        ("[policy.run]\nquick = 0", "run: quick must be more than 0 s, not 0"),
    ],
)
def test_a_time_that_is_none_is_told_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ('[policy]\nsettle = "0s"', {}),
        ('[policy]\ntuning.settle = "0s"', {}),
        ('[policy.tuning]\nsettle = "0s"', {}),
        ("", {"HEALTHD_POLICY_SETTLE": "0s"}),
        ("", {"HEALTHD_POLICY_TUNING_SETTLE": "0s"}),
    ],
)
def test_what_no_operator_sets_is_an_unknown_key(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown (key|variable)"):
        policy(tmp_path, text, **variables)


def test_an_empty_path_is_no_working_directory(tmp_path: Path) -> None:
    """Manifests and templates set variables whose value was left empty."""
    assert read('ca_file = "/ca.pem"', tmp_path, {"HEALTHD_CA_FILE": ""}).ca_file is None
    for text, variables, where in (
        ("", {"HEALTHD_STATE_DIR": ""}, "HEALTHD_STATE_DIR"),
        ('state_dir = ""', {}, "healthd.toml:1"),
        ('ca_file = ""', {}, "healthd.toml:1"),
    ):
        with pytest.raises(ConfigError, match=rf"{where}.*must not be empty"):
            read(text, tmp_path, variables)


def test_home_of_nobody_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"healthd\.toml:1: state_dir: .*'~nobody-of-that-name/x'.* unknown user"):
        read('state_dir = "~nobody-of-that-name/x"', tmp_path)


def test_file_without_end_is_none() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: cannot be read: larger than 4 MiB"):
        load(Settings, file=Path("/dev/zero"), environ={}, arguments={})


def test_settings_out_of_a_pipe_are_refused(tmp_path: Path) -> None:
    """`healthd check` reads them a second time, where the file has tables of others: there would be nothing."""
    end, begin = os.pipe()
    os.write(begin, b'[limits.matmul_flops_per_second]\nlower = 1.0\n[aggregator]\nlisten = "127.0.0.1:1"\n')
    os.close(begin)
    try:
        with pytest.raises(ConfigError, match=r"/dev/fd/\d+: cannot be read: it is a pipe, but settings are read more"):
            load_settings({"config": Path(f"/dev/fd/{end}"), "state_dir": tmp_path}, section="node")
    finally:
        os.close(end)


def test_name_that_is_given_twice_is_a_slip(tmp_path: Path) -> None:
    assert read("", tmp_path, {"HEALTHD_LABELS": "pool=a,rack=b"}).labels == {"pool": "a", "rack": "b"}
    with pytest.raises(ConfigError, match="HEALTHD_LABELS: labels: 'pool=a,pool=b' has a name twice"):
        read("", tmp_path, {"HEALTHD_LABELS": "pool=a,pool=b"})
