"""What an operator can set for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthd.core.config import tables_of
from healthd.core.integrations import device_tables
from healthd.integrations import INTEGRATIONS

_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesActuatorSettings:
    """The taint on nodes of Kubernetes, where `kind` is kubernetes."""

    taint_key: str = "healthd.internal/removed"
    """Key of the taint. `.internal` is reserved for private use, so no one else owns this domain."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with `token` and `ca.crt`, where Kubernetes puts it. Both are read again for each request."""

    api_server: str | None = None
    """URL of the API server; None: from the variables of every pod (KUBERNETES_SERVICE_HOST)."""

    devices: Mapping[str, Any] = tables_of(lambda: device_tables(INTEGRATIONS))
    """What is set for devices, by key: see `healthd.clients.kubernetes.MarkedNodes`."""

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.taint_key):
            raise ValueError(f"taint_key: {self.taint_key!r} is not a taint key; write domain/name")
