"""What the node knows: the one snapshot, and the files that keep it over a restart."""
