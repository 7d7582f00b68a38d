"""The alerting rules: promtool is content, every alert has its cases, its conventions and a runbook that exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.every import every
from tests.watch.stand import (
    ALERTS,
    CASES,
    PROMETHEUS,
    RECORDING,
    ROOT,
    ROUTES,
    RUNBOOKS,
    alerts,
    recorded_metrics,
    rules,
    shipped_configuration,
)

needs_promtool = pytest.mark.system("promtool")


def promtool(*arguments: str, folder: Path = PROMETHEUS) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_is_content_with_the_rules() -> None:
    promtool("check", "rules", RECORDING.name, ALERTS.name)


@needs_promtool
def test_promtool_is_content_with_the_configuration(tmp_path: Path) -> None:
    for name in ("healthd.token", "healthd-ca.pem"):
        (tmp_path / name).write_text("")
    for file in (RECORDING, ALERTS):
        shutil.copy(file, tmp_path)
    (tmp_path / "prometheus.yml").write_text(shipped_configuration(tmp_path, "aggregator.example.com:8090"))
    promtool("check", "config", "--syntax-only", "prometheus.yml", folder=tmp_path)


def amtool(*arguments: str) -> str:
    done = subprocess.run(
        ["amtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.system("amtool")
def test_amtool_is_content_with_the_sample_of_alertmanager() -> None:
    amtool("check-config", ROUTES.name)


@pytest.mark.system("amtool")
@pytest.mark.parametrize("name", sorted(alerts()))
def test_drills_and_severities_have_their_receivers(name: str) -> None:
    severity = alerts()[name]["labels"]["severity"]
    wanted = {"critical": "on-call", "warning": "team", "info": "nobody"}[severity]
    labels = (f"alertname={name}", f"severity={severity}", "node=n1")
    said = amtool("config", "routes", "test", f"--config.file={ROUTES.name}", *labels)
    assert said.strip() == ("drills" if name == "HealthdFaultInjected" else wanted)


def test_what_a_drill_keeps_quiet_is_an_alert_that_there_is_and_never_a_critical_one() -> None:
    (rule,) = yaml.safe_load(ROUTES.read_text())["inhibit_rules"]
    (matcher,) = rule["target_matchers"]
    names = re.findall(r"Healthd\w+", matcher)
    assert names
    assert {alerts()[name]["labels"]["severity"] for name in names} <= {"warning", "info"}


@needs_promtool
def test_every_alert_fires_where_it_should_and_nowhere_else() -> None:
    promtool("test", "rules", CASES.name)


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    seen: dict[str, set[bool]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for asked in case.get("promql_expr_test", ()):
            name = re.search(r'alertname="(\w+)"', asked["expr"])
            assert name is not None
            (sample,) = asked["exp_samples"]
            seen.setdefault(name[1], set()).add(sample["value"] > 0)
    assert set(seen) == set(alerts())
    assert {name for name, said in seen.items() if said != {True, False}} == set()


@every("name", sorted(alerts()))
def test_alert_keeps_the_conventions_and_its_runbook_is_there(name: str) -> None:
    rule = alerts()[name]
    assert re.fullmatch(r"Healthd([A-Z][a-z]+)+", name)
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    told = rule["annotations"]
    assert told.keys() == {"summary", "description", "runbook_url", "dashboard_url"}
    assert told["summary"].endswith(".")
    assert "{{" not in told["summary"], "a summary is the same for all"
    assert "$value" in told["description"] or "$labels" in told["description"]
    page = re.fullmatch(r'\{\{ or \$externalLabels\.healthd_runbooks "(.+)" \}\}/(\w+\.md)', told["runbook_url"])
    assert page is not None
    assert (ROOT / page[1] / page[2]).is_file()
    assert page[2] == f"{name}.md"
    board = re.search(r"/d/(healthd-\w+)", told["dashboard_url"])
    assert board is not None
    assert (ROOT / "deploy/grafana" / f"{board[1]}.json").is_file()


def test_no_runbook_of_an_alert_that_is_gone() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Healthd*.md")} == set(alerts())


def test_rules_use_only_what_is_recorded() -> None:
    made = {rule["record"] for rule in rules(RECORDING)}
    asked = set().union(*(recorded_metrics(rule["expr"]) for rule in [*rules(ALERTS), *rules(RECORDING)]))
    assert asked == made, "recorded and never asked for, or asked for and not recorded"
