"""The aggregator: registry, gate, store, API."""
