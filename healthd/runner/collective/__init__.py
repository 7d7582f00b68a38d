"""Workers as ranks of one group, inside the node and over several nodes."""
