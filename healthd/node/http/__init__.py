"""What the node serves: the TCP port that only reads, the Unix socket of operators, and what both render."""
