"""The HTTP server of both services, and the client of an aggregator."""
