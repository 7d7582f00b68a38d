"""Taints on devices in deploy/kubernetes: no more rights than the code uses, and no job is kept away at first."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.integrations.dra.rules import CREATE_RULES, DELETE_RULES, LIST_RULES, PATCH_RULES, READ_SLICES
from healthd.integrations.dra.settings import DeviceTaintSettings
from tests.deploy.kubernetes_kit import assert_bound, of_config_map, rights, with_all_components

pytestmark = pytest.mark.system("kubectl")


def test_component_gives_the_rights_that_the_code_uses_and_keeps_no_job_away(tmp_path: Path) -> None:
    built = with_all_components(tmp_path)
    name = "healthd-device-taints"
    assert rights(built, name) == {READ_SLICES, LIST_RULES, CREATE_RULES, PATCH_RULES, DELETE_RULES}
    assert_bound(built, name, "healthd-aggregator")
    actuator = of_config_map("", "healthd-aggregator", built).actuator.integrations["kubernetes"]
    assert actuator.devices["device"] == DeviceTaintSettings(taints="None")
