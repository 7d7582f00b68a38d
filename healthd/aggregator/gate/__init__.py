"""The gate: a pure state machine. It knows neither store, HTTP, nor asyncio."""

from healthd.aggregator.gate.machine import resume, step
from healthd.aggregator.gate.rendezvous import Handshake
from healthd.aggregator.gate.reservation import StepContext, deadline_of

__all__ = [
    "Handshake",
    "StepContext",
    "deadline_of",
    "decisions",
    "eligibility",
    "records",
    "rendezvous",
    "resume",
    "step",
]
