"""What the tests of chance seen, and those beside them, are made with."""

from __future__ import annotations

from healthd.aggregator.validation import records as model
from healthd.aggregator.validation.records import Validation
from healthd.localize.model import ValidationVerdict as Found
from tests.aggregator.world import NOW

FOUR = ("n1", "n2", "n3", "n4")


def validation(found: Found | None, *history: model.Tested) -> Validation:
    none = dict.fromkeys(FOUR, 1)
    return Validation(id="v", members=FOUR, ranks=none, whole=none, seed=1, started_at=NOW, deadline=NOW + 300,
                      history=history, verdict=found)  # fmt: skip
