"""The service: node daemon, aggregator, hooks. Never imports torch: probes do, in children of their own."""

from healthd import bundled_checks

__version__ = "0.1.0"

bundled_checks.install()
