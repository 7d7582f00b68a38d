"""What runs beside a job: launchers, and the hook that needs no standing service."""

__all__ = ["launchers", "member", "preflight.hook", "preflight.sidecar", "stopping"]
