"""Makes the actuator that is configured: of an integration for nodes, of others for devices in front of it."""

from __future__ import annotations

from typing import Protocol

from healthd.aggregator.drain.plan import Actuator
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.core.config import record_at
from healthd.core.integrations import actuators
from healthd.integrations import INTEGRATIONS


class MakeActuator(Protocol):
    """Makes the actuator of a scheduler. ConfigError says what is missing for it."""

    def __call__(self, settings: ActuatorSettings) -> Actuator:
        """As configured."""


class MakeDeviceActuator(Protocol):
    """Makes an actuator that takes out single devices where it can, and else nodes, by another one."""

    def __call__(self, nodes: Actuator, *, undo: bool) -> Actuator | None:
        """
        None where it is off, or where it does not go with `nodes`. `undo`: it is to undo what an earlier one has done,
        whatever is configured now.
        """


def make_actuator(settings: ActuatorSettings) -> Actuator | None:
    """The one that is configured; None where none is. ConfigError says what is missing for it."""
    if settings.kind == "none":
        return None
    make: MakeActuator = record_at(actuators(INTEGRATIONS)[settings.kind])
    return make(settings)


def with_devices(nodes: Actuator, *, undo: bool = False) -> Actuator:
    """The actuator with those in front of it that take out devices; itself where there is none."""
    for one in INTEGRATIONS:
        if one.device_actuator is not None:
            make: MakeDeviceActuator = record_at(one.device_actuator)
            nodes = make(nodes, undo=undo) or nodes
    return nodes
