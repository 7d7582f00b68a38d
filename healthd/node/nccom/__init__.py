"""This node's part in nccom-test over several nodes."""
