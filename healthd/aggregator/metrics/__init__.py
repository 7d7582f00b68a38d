"""The aggregator's own metrics."""
