"""What runs in the child process of a device or of the node."""
