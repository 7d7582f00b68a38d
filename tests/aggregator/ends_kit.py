"""How long a daemon may take to end."""

from __future__ import annotations

import signal
import time

from tests.aggregator.cluster import Cluster
from tests.aggregator.service import Service, until

PROMISED_SECONDS = 5.0


def ends_in_time(service: Service, cluster: Cluster) -> None:
    """It ends within its promised seconds, and leaves nothing."""
    began = time.monotonic()
    service.signal(signal.SIGTERM)
    assert service.ended(10) == 0, service.said()
    assert time.monotonic() - began < PROMISED_SECONDS
    assert "Traceback" not in service.said()
    until(lambda: not cluster.alive(), 1.0, lambda: str(cluster.alive()))
