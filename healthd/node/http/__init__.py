"""The HTTP servers of the node: the read-only TCP port, the Unix socket of operators, and what both render."""
