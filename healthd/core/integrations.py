"""What an integration tells the core of itself. An integration is a leaf: the core never imports one by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Integration:
    """One line of `healthd.integrations`. Places are `module:name`, imported when they are used; None: it has none."""

    name: str
    """Its folder in `healthd/integrations` and `tests/integrations`."""

    node_settings: tuple[str, str] | None = None
    """Key of its table below `[node]`, and where the record of the table is."""

    node_service: str | None = None
    """What runs in the node daemon: a `healthd.node.services.NodeService`."""


def node_tables(integrations: Iterable[Integration]) -> Mapping[str, str]:
    """Key below `[node]` -> where the record is."""
    return dict(one.node_settings for one in integrations if one.node_settings is not None)
