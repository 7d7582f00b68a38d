"""The API server of the cluster that a node daemon runs in."""

from __future__ import annotations

import os

from healthd.clients.kubernetes import ApiServer, api_server
from healthd.core.errors import ConfigError
from healthd.integrations.kubernetes.settings import KubernetesSettings


def server_of_pod(wanted: KubernetesSettings) -> ApiServer | None:
    """The API server of the settings, or of the pod that this is; None where it is no pod. ConfigError."""
    try:
        return api_server(os.environ, wanted.service_account, wanted.api_server)
    except ConfigError as error:
        if wanted.api_server is not None or wanted.on:
            raise ConfigError(f"node.kubernetes: {error}") from None
        return None
