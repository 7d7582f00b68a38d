"""The loop that steps gates and commits."""

from healthd.aggregator.engine.admission import Rights, less_than_policy
from healthd.aggregator.engine.bulkheads import Fault, Where
from healthd.aggregator.engine.engine import Engine, GivenBack, steady_clock
from healthd.aggregator.engine.preflights import MOST_ASKED, Handshakes, RollCall, RollCallAnswer, RollCallBody

__all__ = [
    "MOST_ASKED",
    "Engine",
    "Fault",
    "GivenBack",
    "Handshakes",
    "Rights",
    "RollCall",
    "RollCallAnswer",
    "RollCallBody",
    "Where",
    "less_than_policy",
    "steady_clock",
]
