"""The dashboards as files: in step with their code, their variables and links lead somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.watch.stand import RECORDING, RUNBOOKS, dashboards, panels, queries, recorded_metrics, rules

BUILT_IN = {"__rate_interval", "__range", "__value", "__url_time_range", "__all"}


@pytest.mark.filterwarnings("default")
def test_dashboards_are_in_step_with_their_code() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from deploy.grafana import build

    made = build.files()
    assert {path.stem for path in made} == set(dashboards())
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: run `make dashboards`"


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_dashboard_is_complete(name: str) -> None:
    dashboard = dashboards()[name]
    assert dashboard["uid"] == name
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "job", "pool", "page", "runbooks"} <= variables
    used = set(re.findall(r"\$\{?([a-z_]+)", str(dashboard["panels"]) + str(dashboard["links"])))
    assert used - BUILT_IN <= variables
    titles = [panel["title"] for panel in panels(dashboard)]
    assert titles
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        if panel["type"] != "table":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_panels_do_not_overlap_and_fit_the_width() -> None:
    for dashboard in dashboards().values():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place.get("x", 0), place.get("x", 0) + place["w"])
                for y in range(place.get("y", 0), place.get("y", 0) + place["h"])
            }
            assert not taken & cells, panel["title"]
            assert place.get("x", 0) + place["w"] <= 24
            taken |= cells


def links_of(value: Any) -> set[str]:
    return set(re.findall(r"'url': '([^']+)'", str(value)))


def test_links_between_dashboards_and_to_runbooks_lead_somewhere() -> None:
    found = set().union(*(links_of(dashboard) for dashboard in dashboards().values()))
    assert any(url.startswith("/d/healthd-node?") for url in found)
    for url in found:
        if url.startswith("/d/"):
            assert re.split(r"[/?]", url)[2] in dashboards()
        if url.startswith("${runbooks}/"):
            assert (RUNBOOKS / url.removeprefix("${runbooks}/").partition("#")[0]).is_file()


def test_panels_use_only_what_is_recorded() -> None:
    made = {rule["record"] for rule in rules(RECORDING)}
    assert set().union(*(recorded_metrics(expression) for _, _, expression in queries())) <= made
