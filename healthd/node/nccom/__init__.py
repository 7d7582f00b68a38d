"""A round of nccom-test over several nodes, and the part that this node has in it."""
