"""What every room may use: records, settings, errors, the wire, supervised tasks."""

__all__ = [
    "backoff",
    "bounded",
    "config",
    "errors",
    "evidence",
    "file_trust",
    "http.addresses",
    "http.client",
    "http.server",
    "integrations",
    "model",
    "model.results",
    "node_name",
    "redaction",
    "tasks",
    "text",
    "threads",
    "wire",
    "workload",
]
