"""Everything that runs in the worker process of a device or of the node."""
