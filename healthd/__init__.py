"""The service: node daemon, aggregator, hooks. Never imports torch: probes do, in children of their own."""

__version__ = "0.1.0"
