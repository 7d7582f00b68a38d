"""The daemon of one node: watches it, serves what it knows, and keeps one line to the aggregator."""
