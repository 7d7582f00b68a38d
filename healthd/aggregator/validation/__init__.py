"""Collectives over the nodes of a gate, and who is at fault when they fail together."""
