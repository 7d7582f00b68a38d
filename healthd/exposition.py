"""In which format metrics are sent: what both services do alike."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """
    The metrics and their content type, as the `Accept` header asks: Prometheus text or OpenMetrics.

    One that cannot be read asks for nothing.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        encode, content_type = choose_encoder("")
    return encode(registry), content_type
