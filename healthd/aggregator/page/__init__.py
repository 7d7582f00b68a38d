"""
The page for people: the fleet at a glance, why a node is bad, what a gate waits for, what a validation found.

It renders what the API tells, by the same tokens, and decides nothing. It works without script, but for the description
of the API; a small script keeps what is shown in step with the fleet. Nothing is loaded from elsewhere, and no byte of
a node goes out unescaped.
"""

from __future__ import annotations

from healthd.aggregator.page.routes import ROUTERS, add_to

__all__ = ["ROUTERS", "add_to"]
