"""What an operator can set of the controller; what a queue can, is in the annotations of its AdmissionCheck."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KueueSettings:
    """The controller of Kueue's AdmissionChecks, `healthd kueue`."""

    aggregator: str = "http://127.0.0.1:8090"
    """URL of the aggregator. If there are several, list all, separated by commas."""

    token_file: Path | None = None
    """File with the bearer token: of scope `gate`, for all nodes."""

    ca_file: Path | None = None
    """PEM file of the CA that signed the aggregator's certificate; None trusts the system's."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with `token` and `ca.crt` of the account that reads Workloads and writes their checks. Both are read
    again for each request."""

    api_server: str | None = None
    """URL of the API server; None: from the variables of every pod (KUBERNETES_SERVICE_HOST)."""
