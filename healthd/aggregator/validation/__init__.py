"""Collectives over the nodes of a gate, and which node is at fault if they fail together."""

from healthd.aggregator.validation.groups import orders_of
from healthd.aggregator.validation.plan import add, advance, begin, lacking, sentence
from healthd.aggregator.validation.verdicts import consequence

__all__ = ["add", "advance", "begin", "consequence", "lacking", "orders_of", "records", "sentence"]
