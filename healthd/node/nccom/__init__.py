"""The part of a node in a round of nccom-test over several nodes."""
