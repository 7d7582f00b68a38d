"""In which format metrics are sent: what both services do alike."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder

from checks.printable import printable_bytes


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """
    The metrics and their content type, as the `Accept` header asks: Prometheus text or OpenMetrics.

    One that cannot be read asks for nothing. Control characters in labels are escaped.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        encode, content_type = choose_encoder("")
    return printable_bytes(encode(registry), backslash=rb"\\"), content_type


def task_errors_metric(errors: Mapping[str, int]) -> CounterMetricFamily:
    """`healthd_task_errors_total`, the same of every service; `errors` are those of `Tasks.errors`."""
    metric = CounterMetricFamily(
        "healthd_task_errors",
        "How often a task of the service failed unexpectedly: it was started again, or the service ended with it. "
        "The log has the traceback.",
        labels=["task"],
    )
    for task, count in errors.items():
        metric.add_metric([task], count)
    return metric
