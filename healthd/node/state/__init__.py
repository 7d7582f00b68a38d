"""The state of the node: the one snapshot, and the files that save it over a restart."""
