"""Makes the catalogue of checks that can be enabled, as records without their code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checks.contract import Check
from checks.discover import PACKAGES, builtin_checks
from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError
from healthd.runner.settings import CheckInfo

BUILT_IN = "built-in"


def builtin_catalogue(packages: Sequence[str] = PACKAGES) -> dict[str, CheckInfo]:
    """The checks that come with healthd, by name; imported here, which takes some tens of milliseconds and no torch."""
    return {name: info_of(check, BUILT_IN) for name, check in builtin_checks(packages).items()}


def info_of(check: Check, origin: str) -> CheckInfo:
    """The record of a check."""
    return CheckInfo(
        name=check.name,
        tier=check.tier,
        scope=check.scope,
        interval_seconds=check.interval_seconds,
        timeout_seconds=check.timeout_seconds,
        judged=check.judge is not None,
        doc=check.doc,
        accelerators=check.accelerators,
        accelerator_faults=check.accelerator_faults,
        collective=check.collective,
        series=check.series,
        origin=origin,
    )


def catalogue_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, CheckInfo]:
    """The catalogue as a worker lists it, by name. ConfigError names a check whose declaration has a wrong type."""
    found = {}
    for answer in answers:
        try:
            info = wire.convert(answer, CheckInfo, what=f"check {answer.get('name')} of {answer.get('origin')}")
        except BadInputError as error:
            raise ConfigError(f"checks: {error}; mend what @check is given") from None
        found[info.name] = info
    return found
