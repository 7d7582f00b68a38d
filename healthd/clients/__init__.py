"""Clients of systems outside that several integrations use."""

__all__ = ["kubernetes"]
